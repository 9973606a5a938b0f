from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoring.items import flips, mcnemar, mean_difference


@given(st.integers(0, 200), st.integers(0, 200))
def test_mcnemar_is_the_binomial_test_of_a_fair_coin(lost, gained):
    tail = sum(math.comb(lost + gained, count) for count in range(min(lost, gained) + 1))
    assert mcnemar(lost, gained) == pytest.approx(min(1, 2 * tail * 0.5 ** (lost + gained)))
    assert mcnemar(lost, gained) == mcnemar(gained, lost)


def test_mcnemar_holds_for_many_items():
    assert mcnemar(0, 0) == 1
    assert mcnemar(0, 10) == 2 / 2**10
    # Normal approximation: z = 200/√10000 = 2
    assert mcnemar(4900, 5100) == pytest.approx(0.0455, abs=0.002)


def test_flips_are_counted_both_ways():
    reference = np.array([True, True, True, False, False])
    variant = np.array([True, False, False, True, False])
    found = flips(reference, variant)
    assert (found.lost, found.gained, found.p_value) == (2, 1, 1.0)


def test_a_difference_that_is_the_same_on_every_item_has_no_interval():
    noisy = np.random.default_rng(0).random(200)
    found = mean_difference(noisy, noisy + 0.25)
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))


def test_the_interval_of_a_mean_is_as_wide_as_its_standard_error_says():
    moved = np.random.default_rng(0).normal(0.1, 1, 1000)
    found = mean_difference(np.zeros(1000), moved)
    assert found.high - found.low == pytest.approx(2 * 1.96 * moved.std() / math.sqrt(1000), rel=0.02)


def test_items_that_share_a_text_are_sampled_together():
    moved = np.repeat(np.random.default_rng(0).normal(0.1, 1, 50), 20)
    apart = mean_difference(np.zeros(1000), moved)
    together = mean_difference(np.zeros(1000), moved, clusters=tuple(str(place // 20) for place in range(1000)))
    assert together.mean == apart.mean
    assert together.high - together.low == pytest.approx(math.sqrt(20) * (apart.high - apart.low), rel=0.05)


def test_a_weighted_difference_is_that_of_the_corpus():
    found = mean_difference(np.zeros(2), np.array([1.0, 2.0]), np.array([300.0, 100.0]))
    assert found.mean == pytest.approx(1.25)
    assert found.low < found.mean < found.high


def test_unpaired_items_are_refused():
    with pytest.raises(ValueError, match="not pairs"):
        flips(np.ones(3, dtype=bool), np.ones(4, dtype=bool))
    with pytest.raises(ValueError, match="not pairs"):
        mean_difference(np.zeros(3), np.zeros(4))
    with pytest.raises(ValueError, match="no items"):
        mean_difference(np.zeros(0), np.zeros(0))
