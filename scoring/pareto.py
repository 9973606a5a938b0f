"""The Pareto front: what remains when everything goes that another variant beats without giving anything up."""

from __future__ import annotations

import numpy as np
import pandas as pd

from scoring.metrics import METRICS
from scoring.normalize import Floats


def pareto_front(raw: pd.DataFrame) -> pd.Series[bool]:
    """Which variants no other dominates: at least as good in all metrics and better in one.

    Equal variants stay together. A variant with a missing or infinite metric is never on the front and dominates
    nobody.
    """
    signs = [1.0 if each.higher_is_better else -1.0 for each in METRICS.values()]
    values: Floats = raw.reindex(columns=list(METRICS)).to_numpy(dtype=float) * signs
    measured = np.all(np.isfinite(values), axis=1)
    ours, theirs = values[None], values[:, None]
    dominates = np.all(theirs >= ours, axis=-1) & np.any(theirs > ours, axis=-1)
    dominated = np.any(dominates.T & measured, axis=1)
    return pd.Series(measured & ~dominated, index=raw.index, name="pareto")
