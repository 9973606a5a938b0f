"""The simulation of the search for the capacity, with fewer runs: seeds are fixed, and limits leave room for their
number. Versions that bisected and believed a single failed trial are beyond each limit of a deviation."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks.capacity import KINDS, LONG, NOISES, READ_AS, Kind, Noise, find, true_capacity_per_s
from stages.evaluate.bench import lengths

SOFT, LOOSE_KNEE, SHORT = KINDS[0], KINDS[3], KINDS[-1]
QUIET, PAUSES = NOISES[:2]
RUNS = 12
MORE_RUNS = 40
"""What blocks of one run have in common is seen in as many."""


@pytest.mark.parametrize(
    ("kind", "noise", "deviation"), [(SOFT, PAUSES, 0.1), (SHORT, QUIET, 0.09)], ids=["pauses", "short trials"]
)
def test_the_ratio_of_two_capacities_is_found_without_bias(kind: Kind, noise: Noise, deviation: float) -> None:
    found = find(kind, 1.3, noise, MORE_RUNS)
    assert found.true == pytest.approx(1.3, abs=0.01)
    assert found.deviation < deviation
    assert abs(found.bias) < 0.02 + 2 * found.error


def test_copies_have_the_same_capacity() -> None:
    found = find(SOFT, 1.0, PAUSES, RUNS)
    assert found.true == 1.0
    assert abs(found.bias) < 2.5 * found.error < 0.05


def test_the_search_takes_no_more_trials_than_a_workload_allows_and_a_few() -> None:
    first, later = find(SOFT, 1.0, PAUSES, RUNS).mean("trials")
    assert later < 3 < first <= 1 + SOFT.workload.trials  # the first look is one more


def test_where_latency_rises_softly_the_capacity_rises_more_than_the_speed() -> None:
    assert true_capacity_per_s(SOFT.faster(1.1)) / true_capacity_per_s(SOFT) > 1.15


def test_where_targets_are_loose_the_capacity_is_what_a_server_answers_that_is_never_idle() -> None:
    """No target gets in its way, so one that is 1.3 times as fast has 1.3 times the capacity."""
    capacity = true_capacity_per_s(LOOSE_KNEE)
    tokens = [answer + READ_AS * prompt for prompt, answer in lengths(LOOSE_KNEE.workload, 1, LONG)]
    assert capacity == pytest.approx(LOOSE_KNEE.slots / LOOSE_KNEE.step_s / fmean(tokens), rel=0.005)
    assert true_capacity_per_s(LOOSE_KNEE.faster(1.3)) / capacity == pytest.approx(1.3, rel=0.002)
