from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from scoring.pareto import pareto_front

few = st.integers(0, 3).map(float)
rows = st.lists(st.tuples(few, few, few, few), min_size=1, max_size=6)


def dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    gains = [ours - theirs for ours, theirs in zip(one, other, strict=True)]
    return min(gains) >= 0 and max(gains) > 0


@given(rows)
def test_the_front_has_exactly_the_rows_that_are_not_dominated(values):
    expected = [not any(dominates(other, each) for other in values) for each in values]
    assert pareto_front(values) == expected
    assert any(pareto_front(values))


def test_equal_rows_stay_on_the_front_together():
    assert pareto_front([(1, 1, 1), (1, 1, 1)]) == [True, True]


def test_a_row_that_was_not_measured_is_not_on_the_front_and_dominates_no_other():
    assert pareto_front([(0.5, 10, 100), (0.9, math.nan, 200)]) == [True, False]
    assert pareto_front([(math.inf, 10), (1, 1)]) == [False, True]
