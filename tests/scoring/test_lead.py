from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from scoring.lead import Lead


def test_the_interval_of_starts_is_students_t():
    values = [2.0, 2.3, 1.9, 2.2]
    expected = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert Lead.of_starts(values).interval() == pytest.approx(expected)


def test_a_single_start_has_no_interval():
    once = Lead.of_starts([2.0])
    assert (once.value, once.interval(), once.below(3.0)) == (2.0, None, 0.5)
    assert once.minus(Lead.of_starts([1.0, 1.1])).interval() is None


def test_two_estimates_of_other_starts_are_compared_as_by_welch():
    before, after = [1.0, 1.2, 1.1], [2.0, 2.4, 1.9, 2.3]
    expected = stats.ttest_ind(after, before, equal_var=False).confidence_interval(0.95)
    assert Lead.of_starts(after).minus(Lead.of_starts(before)).interval() == pytest.approx(
        (expected.low, expected.high)
    )


def test_the_noise_of_items_alone_is_normal():
    assert Lead(1.0, 0.0, 0.04, 0).reach() == pytest.approx(1.959964 * 0.2)
    assert Lead(1.0, 0.0, 0.0, 0).interval() == (1.0, 1.0)
    assert math.isinf(Lead(1.0, math.nan, 0.04, 0).reach())
