"""From raw metrics to a ranking: pure functions over a pandas frame, one row per variant.

Columns are the four metrics of ``METRICS`` in their own units. Nothing here reads a file or knows a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import pandas as pd

from scoring.metrics import METRICS
from scoring.normalize import REFERENCE, Floats, Method, normalize, preferred

DIGITS: Final = 9
"""Of a score. Beyond them a difference is the arithmetic's, not the variants'."""


def weigh(normalized: Floats, shares: Mapping[str, float]) -> Floats:
    """The weighted sum over the last axis (``METRICS``), in [0, 1] when *shares* add up to 1."""
    weights = np.array([shares[name] for name in METRICS])
    scores: Floats = np.clip((normalized * weights).sum(axis=-1), 0.0, 1.0).round(DIGITS)
    return scores


def rank(
    raw: pd.DataFrame,
    shares: Mapping[str, float],
    method: Method = "min-max",
    noise: Mapping[str, float] | None = None,
    reference: str = REFERENCE,
) -> pd.DataFrame:
    """The measurable variants, best first: the normalized metrics and ``score``.

    Ties go to the higher raw quality, then to less memory, lower latency, higher throughput, then by name: never to
    the order of input, and never to a variant that is worse in one metric and better in none.
    """
    scaled = normalize(raw, method, noise, reference)
    scored = scaled.assign(score=weigh(scaled.to_numpy(), shares))
    order = preferred(raw.reindex(index=scored.index, columns=list(METRICS)).astype(float)).index
    return scored.loc[order].sort_values("score", ascending=False, kind="stable")
