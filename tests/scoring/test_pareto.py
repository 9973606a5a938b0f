from __future__ import annotations

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from scoring.metrics import METRICS
from scoring.pareto import pareto_front

few = st.integers(0, 3).map(float)
rows = st.lists(st.tuples(few, few, few, few), min_size=1, max_size=6)


def frame(values: list[tuple[float, ...]]) -> pd.DataFrame:
    return pd.DataFrame(values, columns=list(METRICS), index=[f"v{place}" for place in range(len(values))])


def dominates(one: pd.Series, other: pd.Series) -> bool:
    gains = [(one[name] - other[name]) * (1 if each.higher_is_better else -1) for name, each in METRICS.items()]
    return min(gains) >= 0 and max(gains) > 0


@given(rows)
def test_the_front_has_exactly_the_variants_that_are_not_dominated(values):
    raw = frame(values)
    expected = [not any(dominates(other, each) for _, other in raw.iterrows()) for _, each in raw.iterrows()]
    assert pareto_front(raw).to_list() == expected
    assert pareto_front(raw).any()


def test_equal_variants_stay_on_the_front_together():
    assert pareto_front(frame([(1, 1, 1, 1), (1, 1, 1, 1)])).to_list() == [True, True]


def test_a_variant_that_was_not_measured_is_not_on_the_front_and_dominates_no_other():
    raw = frame([(0.5, 10, 100, 1000), (0.9, float("nan"), 200, 10)])
    assert pareto_front(raw).to_list() == [True, False]
    assert pareto_front(raw.drop(columns="memory")).to_list() == [False, False]
