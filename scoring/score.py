"""From raw metrics to a ranking: pure functions over a pandas frame, one row per variant.

Columns are the four metrics of ``METRICS`` in their own units. Nothing here reads a file or knows a model.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from scoring.metrics import METRICS


def measurable(raw: pd.DataFrame) -> pd.Series[bool]:
    """Which variants may be chosen: those with every metric measured, finite and not negative."""
    frame = raw.reindex(columns=list(METRICS)).astype(float)
    return (frame.ge(0) & frame.lt(float("inf"))).all(axis=1)


def normalize(raw: pd.DataFrame) -> pd.DataFrame:
    """Min–max over the variants: 1 is the best of them and 0 the worst, whatever the unit.

    A metric in which all are equal gives everyone 1, so that it decides nothing. Rows with a missing or
    infinite metric are left out: they must not stretch the scale of the others.
    """
    frame = raw.reindex(columns=list(METRICS)).astype(float)[measurable(raw)]
    signs = pd.Series({name: 1.0 if metric.higher_is_better else -1.0 for name, metric in METRICS.items()})
    signed = frame * signs
    lowest = signed.min()
    spread = signed.max() - lowest
    # Where nothing differs there is nothing to divide by.
    return ((signed - lowest) / spread.where(spread > 0)).fillna(1.0).clip(0.0, 1.0)


def weigh(normalized: pd.DataFrame, shares: Mapping[str, float]) -> pd.Series[float]:
    """The weighted sum per variant, in [0, 1] when *shares* add up to 1."""
    return normalized.mul(pd.Series(shares)).sum(axis=1).clip(0.0, 1.0)


def rank(raw: pd.DataFrame, shares: Mapping[str, float]) -> pd.DataFrame:
    """The measurable variants, best first: the normalized metrics and ``score``.

    Ties go to the higher quality, then to the smaller memory, then by name: never to the order of input.
    """
    normalized = normalize(raw)
    # Beyond nine digits a difference is the arithmetic's, not the variants'.
    scored = normalized.assign(score=weigh(normalized, shares).round(9), name=normalized.index)
    order = scored.sort_values(["score", "quality", "memory", "name"], ascending=[False, False, False, True])
    return order.drop(columns="name")
