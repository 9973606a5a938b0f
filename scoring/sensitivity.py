"""How much a choice depends on the exact weights: it is repeated under many other weightings.

Weights express what a user wants and are not measured, so this is reported and does not affect the decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from scoring.anchored import DIGITS
from scoring.arrays import Floats
from scoring.metrics import METRICS

WEIGHTINGS: Final = 4000
CONCENTRATION: Final = 50.0
"""The concentration of the Dirichlet distribution around the profile's weights w: the standard deviation of each is
√(w(1−w)/51), so a weight of 0.5 stands for 0.36–0.64 (95 %), and one of 0.1 for 0.03–0.19."""
SEED: Final = 0


def shares_near(normalized: Mapping[str, Floats], shares: Mapping[str, float]) -> dict[str, float]:
    """Compute the share of weightings near *shares* under which each variant wins; ties are split.

    Weights are drawn from Dirichlet(50·shares). A weight of zero stays zero, because the metric does not matter.
    *normalized*: each variant's metrics between their anchors, in the order of ``METRICS``."""
    around = np.array([shares[name] for name in METRICS])
    weights = np.zeros((WEIGHTINGS, len(METRICS)))
    weights[:, around > 0] = np.random.default_rng(SEED).dirichlet(CONCENTRATION * around[around > 0], WEIGHTINGS)
    return _won(normalized, weights)


def shares_anywhere(normalized: Mapping[str, Floats]) -> dict[str, float]:
    """Compute the share of all weightings (Dirichlet(1, 1, 1, 1)) under which each variant wins; ties are split."""
    return _won(normalized, np.random.default_rng(SEED).dirichlet(np.ones(len(METRICS)), WEIGHTINGS))


def _won(normalized: Mapping[str, Floats], weights: Floats) -> dict[str, float]:
    scores = (weights @ np.array(list(normalized.values())).T).round(DIGITS)
    best = scores == scores.max(axis=1, keepdims=True)
    won = (best / best.sum(axis=1, keepdims=True)).mean(axis=0)
    return dict(zip(normalized, map(float, won), strict=True))
