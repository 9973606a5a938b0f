from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from scoring.sequential import RESERVED, limit, spent

FIVE = (0.2, 0.4, 0.6, 0.8, 1.0)


def limits(alpha: float, times: tuple[float, ...], step: int = 1) -> list[float]:
    """Return the limit of each look, of which the last adds *step* starts."""
    return [limit(alpha, times[:look], step if look == len(times) else 1) for look in range(1, len(times) + 1)]


def test_five_looks_have_the_limits_of_the_literature():
    # Jennison & Turnbull and the R packages ldbounds and gsDesign: O'Brien-Fleming-like spending, two-sided 5 %.
    bounds = [-NormalDist().inv_cdf(each) for each in limits(0.025 / (1 - RESERVED), FIVE)]
    assert bounds == pytest.approx([4.8769, 3.3569, 2.6803, 2.2898, 2.0310], abs=1e-3)


def test_a_single_look_may_use_the_error_rate_but_for_the_reserve():
    assert limits(0.025, (1.0,))[0] == pytest.approx(0.025 * (1 - RESERVED), abs=2e-5)
    assert spent(0.025, 0.0) == 0


def test_each_further_budget_may_use_a_share_of_what_is_left():
    used = [spent(0.05, ended) for ended in (1.0, 1.5, 2.0, 3.0, 30.0)]
    assert used[0] == pytest.approx(0.05 * (1 - RESERVED))
    assert used[0] < used[1] < used[2] == pytest.approx(0.05 * (1 - RESERVED**2))
    assert used[2] < used[3] < used[4] <= 0.05


def test_a_look_without_further_budget_decides_nothing():
    assert limits(0.05, (0.5, 0.5, 1.0))[1] == 0


@pytest.mark.parametrize("times", [FIVE, (0.1, 0.15, 0.7, 1.0), (0.5, 1.0), (0.5, 1.0, 1.4, 2.0, 3.0, 4.0)])
def test_all_looks_together_keep_the_error_rate(times):
    noise = np.random.default_rng(0).standard_normal((100_000, len(times)))
    means = noise.cumsum(axis=1) / np.sqrt(np.arange(1, len(times) + 1))
    bounds = [-NormalDist().inv_cdf(each) if each else np.inf for each in limits(0.05, times)]
    assert (means > bounds).any(axis=1).mean() == pytest.approx(spent(0.05, times[-1]), abs=0.003)


def test_a_last_look_may_add_several_starts():
    noise = np.random.default_rng(0).standard_normal((100_000, 5)).cumsum(axis=1)[:, [0, 1, 4]]
    bounds = [-NormalDist().inv_cdf(each) for each in limits(0.05, (0.5, 1.0, 2.0), 3)]
    crossed = (noise / np.sqrt([1, 2, 5]) > bounds).any(axis=1).mean()
    assert crossed == pytest.approx(spent(0.05, 2.0), abs=0.003)


def test_looks_go_forward():
    with pytest.raises(ValueError, match="not ascending"):
        limits(0.05, (0.5, 0.4))
