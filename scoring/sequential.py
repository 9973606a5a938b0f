"""Looking at growing data several times without deciding falsely more often: group-sequential tests.

The error rate is spent over the looks as in O'Brien and Fleming's test, little at first (Lan & DeMets 1983, Biometrika
70, 659–663), so that the number and times of the looks need not be fixed in advance. The limits are p-values, so they
also serve tests of Student's t (Jennison & Turnbull, Group Sequential Methods, 2000).
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import Final

import numpy as np

from scoring.arrays import Floats

POINTS: Final = 401
REACH: Final = 8.0
"""Standard deviations that the numerical integration covers."""
NORMAL: Final = NormalDist()
RESERVED: Final = 0.1
"""The share of what is left of the error rate that a budget leaves to larger ones that may extend it. What was spent
stays spent: without a reserve a further budget could decide nothing, and with the whole rate again errors add up."""


def spent(alpha: float, time: float) -> float:
    """Return the part of the one-sided error rate *alpha* that may be used up to *time*.

    The time is the number of budgets that have ended, and the used share of the present one."""
    ended = math.floor(time)
    left = alpha * RESERVED**ended
    now = (1 - RESERVED) * left
    used = 2 * NORMAL.cdf(NORMAL.inv_cdf(now / 2) / math.sqrt(time - ended)) if time > ended else 0.0
    return alpha - left + used


@lru_cache(maxsize=4096)
def limit(alpha: float, times: tuple[float, ...], step: int = 1) -> float:
    """Return the p-value at which a one-sided test may be decided at the last look; 0 if nothing may be spent.

    Args:
        alpha: the error rate of all looks together.
        times: of each look as in ``spent``, ascending. The information at look k is proportional to k: each look adds
            one start of the server. If part of the noise does not shrink with further starts, the error rate is lower
            than *alpha*.
        step: the starts that the last look adds.

    Raises:
        ValueError: the times are not ascending.
    """
    if any(later < earlier for earlier, later in pairwise(times)):
        raise ValueError(f"the times of the looks are not ascending: {times}")
    scale = _scale(times, step)
    bound = _bound(alpha, times, step)
    return 0.5 * math.erfc(bound / scale / math.sqrt(2)) if bound < REACH * scale else 0.0


# B is the sum of independent standard normal increments, one per start. What a look adds is kept, since the next look
# repeats all that came before it.
@lru_cache(maxsize=4096)
def _bound(alpha: float, times: tuple[float, ...], step: int) -> float:
    """Return the value of B above which the last look, which adds *step* starts, decides."""
    grid, density = _undecided(alpha, times[:-1])
    scale = _scale(times, step)
    wide = _grid(-REACH * scale, REACH * scale)
    before = max((spent(alpha, time) for time in times[:-1]), default=0.0)
    return _crossing(wide, _moved(grid, density, wide, step), spent(alpha, times[-1]) - before)


@lru_cache(maxsize=256)
def _undecided(alpha: float, times: tuple[float, ...]) -> tuple[Floats, Floats]:
    """Return the density of B where none of the looks decided, and the grid it is given at."""
    if not times:
        return np.zeros(1), np.ones(1)
    inside = _grid(-REACH * _scale(times, 1), _bound(alpha, times, 1))
    return inside, _moved(*_undecided(alpha, times[:-1]), inside, 1)


def _scale(times: tuple[float, ...], step: int) -> float:
    """Return the standard deviation of B at the last look."""
    return math.sqrt(len(times) - 1 + step)


def _grid(low: float, high: float) -> Floats:
    return np.linspace(low, high, POINTS, dtype=np.float64)


def _moved(grid: Floats, density: Floats, to: Floats, variance: int) -> Floats:
    """Return the density after adding a normal increment."""
    kernel = np.exp(-((to[:, None] - grid) ** 2) / 2 / variance) / math.sqrt(2 * math.pi * variance)
    weights = np.ones(1) if len(grid) == 1 else np.full(len(grid), grid[1] - grid[0])
    if len(grid) > 1:
        weights[[0, -1]] /= 2
    moved: Floats = kernel @ (density * weights)
    return moved


def _crossing(grid: Floats, density: Floats, probability: float) -> float:
    """Return the point above which the density holds *probability*, or the end of the grid if that is too small."""
    slices = (density[1:] + density[:-1]) / 2 * (grid[1] - grid[0])
    above = np.append(np.cumsum(slices[::-1])[::-1], 0.0)
    place = int((above >= probability).sum()) - 1
    if probability < above[-2]:
        return float(grid[-1])
    low, high = math.log(above[place]), math.log(above[place + 1])
    return float(grid[place] + (grid[1] - grid[0]) * (low - math.log(probability)) / (low - high))
