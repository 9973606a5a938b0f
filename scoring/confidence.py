"""How certain a ranking is: it is repeated in every bootstrap draw of the measurements.

A metric without draws is exact, such as the bytes of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Final

import numpy as np
import pandas as pd

from scoring.draws import Draws
from scoring.metrics import METRICS
from scoring.normalize import REFERENCE, Floats, Method, deltas_of, normalized, reference_of
from scoring.score import weigh

Z_95: Final = 1.959964


def joint(raw: pd.DataFrame, samples: Draws) -> Floats:
    """All draws as one array of shape (draws, variants in the order of *raw*, ``METRICS``).

    Raises:
        ValueError: the numbers of draws differ, or one is 0.
    """
    given = {
        (variant, metric): draws
        for variant, each in samples.items()
        for metric, draws in each.items()
        if variant in raw.index and metric in METRICS
    }
    counts = {len(draws) for draws in given.values()}
    if len(counts) > 1 or 0 in counts:
        raise ValueError(f"different numbers of draws: {sorted(counts)}")
    values = np.repeat(raw[list(METRICS)].to_numpy(dtype=float)[None], counts.pop() if counts else 1, axis=0)
    for (variant, metric), draws in given.items():
        values[:, list(raw.index).index(variant), list(METRICS).index(metric)] = draws
    return values


def noise_of(raw: pd.DataFrame, samples: Draws) -> dict[str, float]:
    """The largest difference between two variants that chance explains, for each metric in its unit.

    It is 1.96 standard deviations of the drawn difference, for the pair where this is largest, so that no pair is
    separated by less than its own noise. Paired draws keep it small.
    """
    values = joint(raw, samples)
    pairs = [(values[:, a] - values[:, b]).std(axis=0) for a, b in combinations(range(len(raw)), 2)]
    deltas = Z_95 * np.max(pairs, axis=0) if pairs else np.zeros(len(METRICS))
    return dict(zip(METRICS, map(float, deltas), strict=True))


def score_draws(
    raw: pd.DataFrame,
    samples: Draws,
    shares: Mapping[str, float],
    method: Method = "min-max",
    noise: Mapping[str, float] | None = None,
    reference: str = REFERENCE,
    among: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """The score of each variant (columns) in each draw (rows). Every variant of *raw* must be measurable.

    Args:
        among: which variants (columns) set the scale of each draw (rows); only their scores are meaningful. None: all.
    """
    row = list(raw.index).index(reference_of(raw, reference) or reference)
    setting = None if among is None else among[list(raw.index)].to_numpy()
    scaled = normalized(joint(raw, samples), method, deltas_of(noise), row, setting)
    return pd.DataFrame(weigh(scaled, shares), columns=raw.index)


def win_probabilities(scores: pd.DataFrame, able: pd.DataFrame | None = None) -> dict[str, float]:
    """The share of draws in which each variant has the highest score among the variants *able* to win the draw (None:
    all); k equal ones get 1/k each. A draw without an able variant has no winner, so the sum may be below 1."""
    given = scores.to_numpy() if able is None else np.where(able[scores.columns], scores, -np.inf)
    best = (given == given.max(axis=1, keepdims=True)) & np.isfinite(given)
    won = (best / np.maximum(best.sum(axis=1, keepdims=True), 1)).mean(axis=0)
    return dict(zip(map(str, scores.columns), map(float, won), strict=True))


def intervals(scores: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """The 95 % interval of each variant's score: percentiles 2.5 and 97.5 of its draws (Efron 1979)."""
    low, high = np.percentile(scores.to_numpy(), [2.5, 97.5], axis=0)
    return {str(name): (float(a), float(b)) for name, a, b in zip(scores.columns, low, high, strict=True)}
