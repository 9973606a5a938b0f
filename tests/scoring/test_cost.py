from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoring.cost import cost_change, per_million


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


def test_what_costs_less_per_gpu_hour_is_the_inverse_of_the_rates():
    found = cost_change([5.0, 4.8], [7.1, 7.3])
    assert found.value == pytest.approx((5 * 4.8 / (7.1 * 7.3)) ** 0.5 - 1)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high < 0
    assert cost_change([7.1, 7.3], [5.0, 4.8]).value == pytest.approx(1 / (1 + found.value) - 1)


def test_the_interval_of_a_change_is_students_t_with_one_variance():
    before, after = np.log([10.0, 12.0, 11.0]), np.log([13.0, 18.0])
    stats: Any = import_module("scipy.stats")
    t = stats.ttest_ind(before, after, equal_var=True).confidence_interval(0.95)
    found = cost_change(np.exp(before).tolist(), np.exp(after).tolist())
    assert (found.low, found.high) == pytest.approx((np.expm1(t.low), np.expm1(t.high)))


def test_single_starts_show_no_noise_of_a_start():
    found = cost_change([5.0], [10.0])
    assert (found.value, found.low, found.high) == (pytest.approx(-0.5), None, None)
