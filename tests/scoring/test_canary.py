from __future__ import annotations

import math
import random

import pytest

from scoring.canary import Counts, Mean, at_most, failures, increase, level, mean_of, times_longer


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


def test_the_levels_of_all_looks_windows_and_tests_add_up_to_the_error_rate():
    tests = 28
    first = math.fsum(level(0.05, tests, 1, slices) for slices in range(20_000))
    assert first * tests == pytest.approx(0.05 / 2, rel=0.15)
    assert first * tests < 0.05 / 2
    windows = math.fsum(level(0.05, tests, window, 12) for window in range(1, 2000))
    assert windows == pytest.approx(2 * level(0.05, tests, 1, 12), rel=0.01)


def test_nothing_fails_before_the_second_slice_or_between_the_looks():
    assert level(0.05, 1, 1, 1) == 0
    looks = [slices for slices in range(200) if level(0.05, 1, 1, slices)]
    assert looks[:4] == [2, 3, 4, 5]
    assert 25 < len(looks) < 50, "further apart later on"


def autoregression(correlation: float, count: int, seed: int) -> list[float]:
    draw, last, found = random.Random(seed), 0.0, []
    for _ in range(count):
        last = correlation * last + math.sqrt(1 - correlation**2) * draw.gauss(0, 1)
        found.append(last)
    return found


@pytest.mark.parametrize(("correlation", "tolerated"), [(0.0, 0.07), (0.6, 0.1)])
def test_the_error_of_a_mean_covers_slices_that_are_like_their_neighbours(correlation, tolerated):
    runs = [mean_of(autoregression(correlation, 40, seed)) for seed in range(400)]
    beyond = sum(at_most(each, 0.0, 0.05) == "fail" for each in runs) / len(runs)
    assert 0.005 <= beyond <= tolerated
    independent = [mean_of(autoregression(correlation, 40, seed), independent=True) for seed in range(400)]
    if correlation:
        assert sum(at_most(each, 0.0, 0.05) == "fail" for each in independent) / len(runs) > 0.15


def test_one_slice_tells_nothing_and_equal_ones_everything():
    assert at_most(mean_of([]), 1.0, 0.01) == "unclear"
    assert at_most(mean_of([5.0]), 1.0, 0.01) == "unclear"
    assert at_most(mean_of([5.0] * 6), 1.0, 0.01) == "fail"
    assert at_most(mean_of([0.5] * 6), 1.0, 0.01) == "pass"


@pytest.mark.parametrize(
    ("value", "verdict"), [(0.0, "pass"), (0.97, "pass"), (0.98, "unclear"), (1.0, "unclear"), (1.5, "fail")]
)
def test_a_mean_passes_or_fails_when_it_is_clear_of_the_limit(value, verdict):
    assert at_most(Mean(value, 0.1, 1e7), 1.0, 0.001) == verdict


def test_nothing_fails_at_the_level_0():
    assert at_most(Mean(9.0, 0.1, 1e7), 1.0, 0.0) == "unclear"


def test_a_difference_has_the_errors_of_both():
    both = Mean(3.0, 0.3, 10).plus(Mean(1.0, 0.4, 10), -1)
    assert (both.value, both.error) == (pytest.approx(2.0), pytest.approx(0.5))
    assert 10 < both.degrees < 20
    assert Mean(3.0, math.inf, 0).plus(Mean(1.0, 0.4, 10), 1).degrees == 0


def test_how_much_longer_would_tell():
    assert times_longer(Mean(0.0, 1.0, 1e7), 0.1, 0.01) == pytest.approx((0.2533 / 0.1) ** 2, rel=0.01)
    assert times_longer(Mean(1.0, 0.1, 1e7), 0.9, 0.01) == pytest.approx(2.326**2, rel=0.01)
    assert times_longer(Mean(1.0, 0.1, 1e7), 1.0, 0.01) == math.inf


def slices(count: int, each: tuple[float, float], *others: tuple[float, float]) -> Counts:
    return Counts((*others, *[each] * count))


@pytest.mark.parametrize(
    ("canary", "stable", "verdict"),
    [
        (slices(12, (0, 10)), slices(12, (0, 10)), "pass"),
        (slices(12, (2, 10)), slices(12, (0, 10)), "fail"),
        (slices(12, (2, 10)), slices(12, (2, 10)), "pass"),
        (slices(2, (5, 5)), slices(2, (0, 5)), "fail"),
        (slices(9, (0, 10), *[(1, 10)] * 3), slices(12, (0, 10)), "unclear"),
        (slices(0, (0, 0)), slices(12, (0, 10)), "unclear"),
        (slices(12, (0, 10)), slices(0, (0, 0)), "unclear"),
        (slices(12, (1, 100)), slices(12, (0, 100)), "pass"),
    ],
    ids=["none", "many", "as many", "all", "a few", "no requests", "no reference", "within the slack"],
)
def test_failures_count_only_beyond_slack_and_chance(canary, stable, verdict):
    assert failures(canary, stable, slack=0.01, level=1e-3) == verdict


def test_a_burst_of_failures_counts_about_as_one():
    burst, spread = slices(11, (0, 20), (20, 20)), slices(10, (2, 20), (0, 20), (0, 20))
    assert (burst.count, burst.total) == (spread.count, spread.total)
    assert burst.design_effect > 15
    assert spread.design_effect < 2
    none = slices(12, (0, 20))
    assert failures(spread, none, slack=0.01, level=1e-3) == "fail"
    assert failures(burst, none, slack=0.01, level=1e-3) != "fail"
