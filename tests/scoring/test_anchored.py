from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import ValidationError

from scoring.anchored import SIGNS, log_ratios, ranked, scores
from scoring.criteria import Anchor, Anchors, Criteria, Margins, Weights
from scoring.metrics import METRICS

CASES = 100_000
REFERENCE = np.array([0.7, 800.0, 300.0, 16e9])
ratio = st.floats(0.2, 5.0)
rows = arrays(float, 4, elements=ratio)
weights = arrays(float, 4, elements=st.floats(0, 1)).filter(lambda each: each.sum() > 1e-3)


def criteria(shares=(0.5, 0.2, 0.2, 0.1), **given) -> Criteria:
    return Criteria(weights=Weights(**dict(zip(METRICS, map(float, shares), strict=True))), **given)


def score(values, made_by=None):
    return scores(log_ratios(np.array(values), REFERENCE), made_by or criteria())[0]


@pytest.mark.parametrize(
    ("better", "expected"),
    [
        ([1, 1, 1, 1], 0.5),  # the reference, in the middle of what can be lost and gained
        ([1, 2, 2, 1], 0.7),
        ([1, 2**0.5, 2**0.5, 1], 0.6),
        ([1, 1, 1, 4], 0.55),
        ([0.95, 1, 1, 1], 0.25),
        ([0.95**0.5, 1, 1, 1], 0.375),
        ([1.1, 9, 9, 9], 1.0),
        ([0.5, 0.5, 0.5, 0.25], 0.0),
    ],
)
def test_the_anchors_are_as_documented(better, expected):
    assert score(REFERENCE * np.array(better, dtype=float) ** SIGNS) == pytest.approx(expected)


def test_adding_or_removing_a_variant_never_changes_the_order_of_two():
    random = np.random.default_rng(0)
    ratios = random.normal(0.0, 0.4, (CASES, 4, 4))
    ratios[..., 0] *= 0.1
    ratios[::3, 1, 1:3] = ratios[::3, 0, 1:3]  # many that are equal in some metrics
    alone = ranked(ratios[:, :2], criteria())[:, 0]
    for size in (3, 4):
        order = ranked(ratios[:, :size], criteria())
        first = np.where((order == 0).argmax(axis=1) < (order == 1).argmax(axis=1), 0, 1)
        assert (first == alone).all()


@given(rows, weights, st.integers(0, 3), st.floats(1.0, 3.0))
def test_a_better_metric_never_lowers_a_score_and_never_the_rank(better, shares, metric, factor):
    improved = better.copy()
    improved[metric] *= factor
    worse, after = scores(np.log(np.array([better, improved])), criteria(shares))[0]
    assert after >= worse
    if factor > 1.001 and shares[metric] > 0.01:
        assert list(ranked(np.log(np.array([better, improved])), criteria(shares))) == [1, 0]


@given(rows, weights, arrays(float, 4, elements=st.floats(1e-6, 1e6)))
def test_units_do_not_matter(better, shares, units):
    values = REFERENCE * better
    given_units = scores(log_ratios(values * units, REFERENCE * units), criteria(shares))[0]
    assert given_units == pytest.approx(scores(log_ratios(values, REFERENCE), criteria(shares))[0], abs=1e-8)


def test_of_two_variants_that_are_both_clipped_the_slower_one_loses():
    ratios = np.log([[1.0, 0.3, 0.3, 1.0], [1.0, 0.4, 0.4, 1.0]])
    assert scores(ratios, criteria())[0].tolist() == [0.3, 0.3]
    assert ranked(ratios, criteria()).tolist() == [1, 0]


@pytest.mark.parametrize("memory", [0.25, 0.3, 0.6])
def test_a_fifth_slower_costs_more_than_any_memory_saved_and_as_fast_with_half_the_memory_wins(memory):
    ratios = np.log([[1.0, 1.0, 1.0, 1.0], [1.0, 1 / 1.2, 1 / 1.2, 1 / memory], [1.0, 1.0, 1.0, 2.0]])
    assert ranked(ratios, criteria()).tolist() == [2, 0, 1]


def test_a_quality_of_zero_counts_as_zero():
    assert score([0.0, 400.0, 600.0, 4e9]) == pytest.approx(0.5)
    assert score([0.0, 400.0, 600.0, 4e9], criteria((0, 0.5, 0.5, 0))) == pytest.approx(1.0)


def test_a_profile_may_set_its_anchors():
    anchors = Anchors(latency=Anchor(zero=0.5, one=1.0))
    made_by = criteria((0, 1, 0, 0), anchors=anchors)
    assert score(REFERENCE, made_by) == 1
    assert score(REFERENCE * np.array([1, 2**0.5, 1, 1]), made_by) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        (Anchor, {"zero": 1.0, "one": 1.0}),
        (Anchor, {"zero": 0.0, "one": 1.0}),
        (Margins, {"speed": 3}),
        (Criteria, {"error_rate": 0.0}),
        (Criteria, {"reference": {"quality": 0.7}}),
    ],
)
def test_criteria_that_mean_nothing_are_refused(what, wrong):
    with pytest.raises(ValidationError):
        what.model_validate(wrong)
