from __future__ import annotations

import math

import pytest

from stages.evaluate.drift import change, drift_of, probe
from stages.parts.records.evaluation import Drift, Speed


def speed(compute: float, memory: float) -> Speed:
    return Speed(compute_gflop_per_s=compute, memory_gib_per_s=memory)


def test_the_probe_measures_arithmetic_and_memory() -> None:
    found = probe()
    assert 0 < found.compute_gflop_per_s < math.inf
    assert 0 < found.memory_gib_per_s < math.inf


@pytest.mark.parametrize(
    ("after", "expected"), [((100, 10), 0), ((90, 10), 0.1), ((100, 13), 0.3), ((120, 9), 0.2), ((50, 5), 0.5)]
)
def test_the_change_is_the_larger_of_the_two(after: tuple[float, float], expected: float) -> None:
    assert change(speed(100, 10), speed(*after)) == pytest.approx(expected)


def test_of_several_blocks_every_probe_and_the_largest_change_are_kept() -> None:
    pairs = [(speed(100, 10), speed(101, 10)), (speed(100, 10), speed(100, 7)), (speed(99, 10), speed(98, 10))]
    found = drift_of(pairs)
    assert found.probes() == tuple(each for pair in pairs for each in pair)
    assert (found.before, found.after) == (speed(100, 10), speed(98, 10))
    assert found.largest_change == pytest.approx(0.3)


def test_an_evaluation_of_one_block_has_no_probes_between() -> None:
    found = drift_of([(speed(100, 10), speed(90, 10))])
    assert found.between == ()
    assert found.probes() == (speed(100, 10), speed(90, 10))
    told = found.model_dump(exclude={"between"})  # as it was written before several starts were kept
    assert Drift.model_validate(told) == found
