from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoring.cost import per_million


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e6))
def test_the_cost_rises_with_the_price_and_falls_with_the_rate(price, rate):
    cost = per_million(price, rate) or 0.0
    assert per_million(2 * price, rate) == pytest.approx(2 * cost)
    assert per_million(price, 2 * rate) == pytest.approx(cost / 2)


def test_a_million_tokens_at_a_thousand_a_second_take_a_thousand_seconds():
    assert per_million(3.6, 1000.0) == pytest.approx(1.0)


@pytest.mark.parametrize("rate", [0.0, float("nan"), float("inf"), -1.0])
def test_without_a_rate_there_is_no_cost(rate):
    assert per_million(1.0, rate) is None


@pytest.mark.parametrize("price", [0.0, -1.0, float("inf"), float("nan")])
def test_a_price_that_is_none_is_refused(price):
    with pytest.raises(ValueError, match="price"):
        per_million(price, 100.0)
