"""Rank variants by their raw metrics: pure functions over a pandas frame with one row per variant.

The columns are the four metrics of ``METRICS`` in their own units.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import pandas as pd

from scoring.metrics import METRICS
from scoring.normalize import REFERENCE, Floats, Method, normalize, preferred

DIGITS: Final = 9
"""Decimals of a score; smaller differences come from the arithmetic, not from the variants."""


def weigh(normalized: Floats, shares: Mapping[str, float]) -> Floats:
    """The weighted sum over the last axis (``METRICS``), in [0, 1] if the *shares* add up to 1."""
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

    Ties are broken by higher raw quality, then less memory, lower latency, higher throughput, then by name: never by
    the order of the input, and never in favor of a variant that is worse in one metric and better in none.
    """
    scaled = normalize(raw, method, noise, reference)
    scored = scaled.assign(score=weigh(scaled.to_numpy(), shares))
    order = preferred(raw.reindex(index=scored.index, columns=list(METRICS)).astype(float)).index
    return scored.loc[order].sort_values("score", ascending=False, kind="stable")
