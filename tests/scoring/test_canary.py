from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoring.canary import exceeds, failures, increase, latency, mostly, quantile, share_above

BOUNDS = (0.1, 0.2, 0.4, math.inf)


def test_a_quantile_lies_linearly_within_its_bucket():
    counts = (10, 30, 40, 40)
    assert quantile(BOUNDS, counts, 0.5) == pytest.approx(0.15)  # the 20th: half of the 20 between 0.1 and 0.2
    assert quantile(BOUNDS, counts, 0.25) == pytest.approx(0.1)
    assert quantile(BOUNDS, counts, 0.875) == pytest.approx(0.3)


def test_a_quantile_beyond_the_last_bound_is_that_bound():
    assert quantile(BOUNDS, (0, 0, 1, 10), 0.95) == 0.4


@pytest.mark.parametrize("counts", [(), (0, 0, 0, 0), (0, 0, 0, math.nan)])
def test_without_observations_there_is_no_quantile_and_no_share(counts):
    bounds = BOUNDS if counts else ()
    assert math.isnan(quantile(bounds, counts, 0.95))
    assert math.isnan(share_above(bounds, counts, 0.1))


def test_the_share_above_a_limit_lies_linearly_within_its_bucket_too():
    counts = (10, 30, 40, 50)
    assert share_above(BOUNDS, counts, 0.15) == pytest.approx(0.6)
    assert share_above(BOUNDS, counts, 0.2) == pytest.approx(0.4)
    assert share_above(BOUNDS, counts, 99) == pytest.approx(0.2), "beyond the last bound is above any limit"


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.floats(0.01, 0.39))
def test_the_share_above_a_quantile_is_the_rest(steps, limit):
    counts = tuple(sum(steps[: number + 1]) for number in range(4))
    if counts[-1] == 0 or counts[2] == 0:
        return
    share = share_above(BOUNDS, counts, limit)
    assert 0 <= share <= 1
    if 0 < 1 - share < counts[2] / counts[-1]:
        assert share_above(BOUNDS, counts, quantile(BOUNDS, counts, 1 - share)) == pytest.approx(share, abs=1e-9)


def test_fishers_exact_test_by_hand():
    # Of 10 requests 5 fail, all at the one of two: 1 of C(10, 5) = 252 ways.
    assert increase(5, 5, 0, 5) == pytest.approx(1 / 252)
    # Fisher's tea: 3 of 4 against 1 of 4 is (16 + 1) / 70.
    assert increase(3, 4, 1, 4) == pytest.approx(17 / 70)
    assert increase(0, 5, 3, 5) == 1.0
    assert increase(1, 5, 0, 0) == 1.0


def test_large_counts_do_not_overflow():
    assert increase(100, 100_000, 100, 1_000_000) < 1e-30
    assert increase(100, 100_000, 1000, 1_000_000) == pytest.approx(0.5, abs=0.05)


def test_the_exact_binomial_test_by_hand():
    assert exceeds(2, 2, 0.05) == pytest.approx(0.0025)
    assert exceeds(1, 2, 0.05) == pytest.approx(1 - 0.95**2)
    assert exceeds(0, 50) == 1.0


@pytest.mark.parametrize(
    ("failed", "of", "stable_failed", "stable_of", "verdict"),
    [
        (0, 50, 0, 50, "pass"),
        (1, 3, 1, 3, "pass"),
        (1, 50, 0, 50, "pass"),
        (5, 5, 0, 5, "fail"),
        (25, 50, 2, 50, "fail"),
        (5, 50, 0, 50, "unclear"),
        (10, 50, 10, 50, "pass"),
        (0, 0, 0, 50, "unclear"),
        (0, 50, 0, 0, "unclear"),
        (1200, 100_000, 1000, 100_000, "pass"),
    ],
)
def test_failures_count_only_beyond_slack_and_chance(failed, of, stable_failed, stable_of, verdict):
    assert failures(failed, of, stable_failed, stable_of, slack=0.01, significance=0.01) == verdict


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        ((100, 100, 100, 100), "pass"),
        ((0, 100, 100, 100), "pass"),
        ((0, 0, 100, 100), "fail"),
        ((0, 0, 0, 100), "fail"),
        ((93, 93, 100, 100), "unclear"),  # 7 of 100 above: the percentile is, but chance may have it so
        ((49, 49, 49, 49), "unclear"),  # too few, however fast
        ((), "unclear"),
        ((0, 0, 0, math.nan), "unclear"),
    ],
)
def test_a_latency_fails_only_when_more_requests_are_over_the_limit_than_chance_explains(counts, verdict):
    bounds = BOUNDS if counts else ()
    assert latency(bounds, counts, 0.2, least=50, significance=0.01) == verdict


@pytest.mark.parametrize(
    ("worse", "of", "verdict"),
    [(0, 0, "unclear"), (0, 1, "pass"), (5, 10, "pass"), (1, 1, "unclear"), (6, 6, "unclear"), (7, 7, "fail")],
)
def test_a_slower_half_fails_only_when_chance_does_not_explain_it(worse, of, verdict):
    assert mostly(worse, of, significance=0.01) == verdict


def test_an_unknown_limit_is_unclear():
    assert latency(BOUNDS, (100, 100, 100, 100), math.nan, least=50, significance=0.01) == "unclear"
