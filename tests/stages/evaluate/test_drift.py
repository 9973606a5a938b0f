from __future__ import annotations

import math

import pytest

from stages.evaluate.drift import change, drift_of, probe
from stages.records import Speed


def speed(compute: float, memory: float) -> Speed:
    return Speed(compute_gflop_per_s=compute, memory_gib_per_s=memory)


def test_the_probe_measures_arithmetic_and_memory() -> None:
    found = probe()
    assert 0 < found.compute_gflop_per_s < math.inf
    assert 0 < found.memory_gib_per_s < math.inf


@pytest.mark.parametrize(
    ("after", "expected"), [((100, 10), 0), ((90, 10), 0.1), ((100, 13), 0.3), ((120, 9), 0.2), ((50, 5), 0.5)]
)
def test_the_change_is_that_of_what_changed_more(after: tuple[float, float], expected: float) -> None:
    assert change(speed(100, 10), speed(*after)) == pytest.approx(expected)


def test_of_several_starts_the_first_the_last_and_the_largest_change_are_kept() -> None:
    pairs = [(speed(100, 10), speed(101, 10)), (speed(100, 10), speed(100, 7)), (speed(99, 10), speed(98, 10))]
    found = drift_of(pairs, 1)
    assert (found.before, found.after) == (speed(100, 10), speed(98, 10))
    assert found.largest_change == pytest.approx(0.3)
    assert found.measured_again == 1
