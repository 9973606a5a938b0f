from __future__ import annotations

import math
from statistics import NormalDist

import pytest

from scoring.student import quantile, upper_tail, welch


@pytest.mark.parametrize("t", [-40.0, -2.0, -0.1, 0.0, 0.5, 3.0, 60.0])
def test_the_tail_is_exact_where_it_has_a_closed_form(t):
    assert upper_tail(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, rel=1e-9)
    assert upper_tail(t, 2) == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)), rel=1e-7)
    assert upper_tail(t, math.inf) == pytest.approx(1 - NormalDist().cdf(t), abs=1e-9)


TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 5: 2.5706, 10: 2.2281, 30: 2.0423}


@pytest.mark.parametrize(("degrees", "expected"), list(TABLE.items()))
def test_the_quantiles_are_those_of_the_tables(degrees, expected):
    assert quantile(0.975, degrees) == pytest.approx(expected, abs=1e-4)
    assert quantile(0.025, degrees) == pytest.approx(-expected, abs=1e-4)
    assert quantile(0.975, degrees + 0.5) < quantile(0.975, degrees)


def test_the_degrees_of_a_sum_are_those_of_its_noisy_part():
    assert welch((1.0, 5), (1.0, 5)) == pytest.approx(10)
    assert welch((1.0, 5), (0.0, 0)) == pytest.approx(5)
    assert welch((1.0, 5), (3.0, math.inf)) == pytest.approx(80)
    assert welch((0.0, 5), (3.0, math.inf)) == math.inf


def test_without_a_degree_of_freedom_nothing_is_known():
    assert upper_tail(9.0, 0) == 0.5
    assert quantile(0.9, 0) == math.inf
    assert upper_tail(math.inf, 3) == 0
    assert quantile(0.975, math.inf) == pytest.approx(1.959964, abs=1e-6)
