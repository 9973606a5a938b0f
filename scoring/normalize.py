"""Normalize raw metrics to numbers in [0, 1] that can be weighted, so that noise does not decide.

Both methods first take the noise out of every metric. With δ the largest difference between two variants that chance
explains (one per metric, in its unit; ``scoring.confidence.noise_of``) and v oriented so that higher is better:

    v' = min(v + δ, best)

A variant within δ of the best counts as the best; the others keep the part of their gap that exceeds the noise. δ is
the same for all variants: otherwise a noisier variant could overtake a better one.

min-max:   1 − (best − v') / (best − worst); without noise the plain min–max. The worst value of a metric gets
           δ / (best − worst), not 0: as a difference approaches the noise, its effect fades out without a jump.
relative:  r⁴ / (1 + r⁴) with r = v' / reference' (inverted where lower is better), the logistic function of
           4·ln r. The reference gets 0.5, 1 % better 0.51, 2 % worse 0.48 (the slope at r = 1 is 1), double 0.94 and
           half, symmetrically, 0.06.

If all variants are equal, or within the noise, they get the same value: 1 (min-max), or 0.5 like the reference
(relative).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from scoring.metrics import METRICS

Floats = npt.NDArray[np.float64]
Method = Literal["min-max", "relative"]

REFERENCE: Final = "fp16"
STEEPNESS: Final = 4.0
"""The factor of ln r in the logistic function: its slope at r = 1 is a quarter of this, so 1 % counts as 0.01."""
_SIGNS: Final = np.array([1.0 if metric.higher_is_better else -1.0 for metric in METRICS.values()])
PREFERENCE: Final = {"quality": False, "memory": True, "latency": True, "throughput": False}
"""The order in which raw metrics break ties, and whether the smaller value comes first."""


def measurable(raw: pd.DataFrame) -> pd.Series[bool]:
    """Which variants can be scored: those whose metrics were all measured, are finite and not negative."""
    frame = raw.reindex(columns=list(METRICS)).astype(float)
    return (frame.ge(0) & frame.lt(float("inf"))).all(axis=1)


def normalize(
    raw: pd.DataFrame,
    method: Method = "min-max",
    noise: Mapping[str, float] | None = None,
    reference: str = REFERENCE,
) -> pd.DataFrame:
    """The metrics of the measurable variants in [0, 1], where higher is better.

    Rows with a missing or infinite metric are left out, so that they do not affect the scale of the others.

    Args:
        raw: one row per variant, columns ``METRICS`` in their units.
        noise: δ by metric, in its unit; metrics that are missing have none.
        reference: for ``relative``; if it is not measurable, ``reference_of`` gives its substitute.
    """
    frame = raw.reindex(columns=list(METRICS)).astype(float)[measurable(raw)]
    if frame.empty:
        return frame
    deltas = deltas_of(noise)
    row = frame.index.get_loc(reference_of(frame, reference))
    assert isinstance(row, int)  # noqa: S101 - variants have different names
    return pd.DataFrame(normalized(frame.to_numpy(), method, deltas, row), index=frame.index, columns=frame.columns)


def reference_of(raw: pd.DataFrame, wanted: str = REFERENCE) -> str | None:
    """*wanted*, or if it is not measurable the measurable variant with the highest quality; None if there is none."""
    rows = raw[measurable(raw)]
    if wanted in rows.index:
        return wanted
    return next(iter(preferred(rows).index), None)


def preferred(raw: pd.DataFrame) -> pd.DataFrame:
    """The rows by ``PREFERENCE``, then by name, independent of the order of the input."""
    named = raw.assign(name=raw.index)
    return named.sort_values([*PREFERENCE, "name"], ascending=[*PREFERENCE.values(), True]).drop(columns="name")


def deltas_of(noise: Mapping[str, float] | None) -> Floats:
    """δ in the order of ``METRICS``."""
    return np.array([(noise or {}).get(name, 0.0) for name in METRICS])


def normalized(
    values: Floats, method: Method, deltas: Floats, reference: int, among: npt.NDArray[np.bool_] | None = None
) -> Floats:
    """``normalize`` for arrays of shape (…, variants, metrics): many draws at once.

    Args:
        values: finite, not negative, metrics in the order of ``METRICS``.
        deltas: δ by metric; infinite if the metric is not comparable.
        reference: the position of the reference among the variants.
        among: which variants set the scale, shape (…, variants); only their results are meaningful. None: all.
    """
    oriented = values * _SIGNS
    setting = True if among is None else among[..., None]
    best = oriented.max(axis=-2, keepdims=True, initial=-np.inf, where=setting)
    lifted = np.minimum(oriented + deltas, best)
    # Division by zero is expected where nothing differs, or a metric is 0.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if method == "min-max":
            spread = best - oriented.min(axis=-2, keepdims=True, initial=np.inf, where=setting)
            scaled = 1.0 - np.where(spread > 0, (best - lifted) / spread, 0.0)
        else:
            ratio = (np.abs(lifted) / np.abs(lifted[..., reference : reference + 1, :])) ** _SIGNS
            # 0/0 is NaN: both are 0, so they are equal.
            scaled = 1.0 / (1.0 + np.where(np.isnan(ratio), 1.0, ratio) ** -STEEPNESS)
    return np.clip(scaled, 0.0, 1.0)
