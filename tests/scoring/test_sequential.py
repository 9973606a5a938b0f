from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from scoring.sequential import limits, spent

FIVE = (0.2, 0.4, 0.6, 0.8, 1.0)


def test_five_looks_have_the_limits_of_the_literature():
    # Jennison & Turnbull and the R packages ldbounds and gsDesign: O'Brien-Fleming-like spending, two-sided 5 %.
    bounds = [-NormalDist().inv_cdf(each) for each in limits(0.025, FIVE)]
    assert bounds == pytest.approx([4.8769, 3.3569, 2.6803, 2.2898, 2.0310], abs=1e-3)


def test_a_single_look_may_use_the_whole_error_rate():
    assert limits(0.025, (1.0,))[0] == pytest.approx(0.025, abs=2e-5)
    assert spent(0.025, 1.0) == 0.025
    assert spent(0.025, 0.0) == 0


def test_a_look_without_further_budget_decides_nothing():
    assert limits(0.05, (0.5, 0.5, 1.0))[1] == 0


@pytest.mark.parametrize("times", [FIVE, (0.1, 0.15, 0.7, 1.0), (0.5, 1.0)])
def test_all_looks_together_keep_the_error_rate(times):
    noise = np.random.default_rng(0).standard_normal((100_000, len(times)))
    means = noise.cumsum(axis=1) / np.sqrt(np.arange(1, len(times) + 1))
    bounds = [-NormalDist().inv_cdf(each) if each else np.inf for each in limits(0.05, times)]
    assert (means > bounds).any(axis=1).mean() == pytest.approx(0.05, abs=0.003)


def test_looks_go_forward():
    with pytest.raises(ValueError, match="not ascending"):
        limits(0.05, (0.5, 0.4))
