"""The Pareto front: the variants that no other variant improves on without a loss."""

from __future__ import annotations

import numpy as np
import pandas as pd

from scoring.arrays import Floats
from scoring.metrics import METRICS


def pareto_front(raw: pd.DataFrame) -> pd.Series[bool]:
    """Which variants are not dominated: no other is at least as good in all metrics and better in one.

    Equal variants do not dominate each other. A variant with a missing or infinite metric is never on the front and
    dominates no other.
    """
    signs = [1.0 if each.higher_is_better else -1.0 for each in METRICS.values()]
    values: Floats = raw.reindex(columns=list(METRICS)).to_numpy(dtype=float) * signs
    measured = np.all(np.isfinite(values), axis=1)
    ours, theirs = values[None], values[:, None]
    dominates = np.all(theirs >= ours, axis=-1) & np.any(theirs > ours, axis=-1)
    dominated = np.any(dominates.T & measured, axis=1)
    return pd.Series(measured & ~dominated, index=raw.index, name="pareto")
