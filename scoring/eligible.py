"""Which variants can be chosen at all: by what was measured, and in each bootstrap draw of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from scoring.constraints import MEASURES, Constraints, violations
from scoring.draws import Draws
from scoring.metrics import METRICS
from scoring.normalize import REFERENCE, Floats

Booleans = npt.NDArray[np.bool_]
Values = Mapping[str, Mapping[str, float | None]]
"""What ``Constraints`` can limit, by variant and measure."""
GIB: Final = 2**30


@dataclass(frozen=True)
class Limits:
    """A profile's limits, and the values and draws of what they limit."""

    limits: Mapping[str, float]
    """The limit of each measure, see ``Constraints.limits``."""
    values: Values
    drawn: Draws
    """The draws of each variant and measure; a value without draws is exact."""

    def met(self, names: Sequence[str], draws: int) -> pd.DataFrame:
        """In which draws (rows) each variant (columns) meets every limit."""
        met = pd.DataFrame(True, index=range(draws), columns=list(names))
        for name in names:
            for measure, limit in self.limits.items():
                value = self.values[name].get(measure)
                given = self.drawn[name].get(measure, np.array(math.nan if value is None else value))
                met[name] &= np.broadcast_to(meets(measure, limit, given), draws)
        return met

    def near(self, names: Iterable[str]) -> list[str]:
        """A sentence for each of these variants and each limit that its 95 % interval crosses."""
        return [said for name in names for measure in self.limits if (said := self._near(name, measure))]

    def _near(self, name: str, measure: str) -> str | None:
        limit, value = self.limits[measure], self.values[name].get(measure)
        if value is None or not math.isfinite(value) or measure not in self.drawn[name]:
            return None
        low, high = np.percentile(self.drawn[name][measure], [2.5, 97.5])
        low, high = min(low, value), max(high, value)
        if meets(measure, limit, np.array(low)) == meets(measure, limit, np.array(high)):
            return None
        bound = "minimum" if MEASURES[measure].higher_is_better else "maximum"
        return (
            f"{name} {'meets' if meets(measure, limit, np.array(value)) else 'violates'} the {bound} of "
            f"{limit:.12g} for {measure} with {value:.4g}, but its 95 % interval of {low:.4g} to {high:.4g} "
            "crosses the limit."
        )


def values_of(raw: pd.DataFrame, given: Values, reference: str = REFERENCE) -> dict[str, dict[str, float | None]]:
    """The *given* values, and those that follow from *raw*: ``quality_recovery``, ``e2el_p95_ms``, ``memory_gib``."""
    best = float(raw["quality"].get(reference, float("nan")))
    return {
        str(name): {
            "quality_recovery": quality / best if best > 0 else None,
            "e2el_p95_ms": latency,
            "memory_gib": memory / GIB,
            **given.get(str(name), {}),
        }
        for name, quality, latency, memory in raw[["quality", "latency", "memory"]].itertuples(name=None)
    }


def exclusions(
    raw: pd.DataFrame, constraints: Constraints, samples: Draws, values: Values
) -> dict[str, tuple[str, ...]]:
    """The variants that cannot be chosen, each with every reason."""
    found: dict[str, tuple[str, ...]] = {}
    for name in map(str, raw.index):
        violated = violations(values[name], constraints)
        if reasons := (*unusable(raw, samples, name), *(each.text for each in violated)):
            found[name] = reasons
    return found


def unusable(raw: pd.DataFrame, samples: Draws, name: str) -> list[str]:
    """Why a variant's metrics cannot be scored: one was not measured, or has draws that are negative or not finite.

    Such values must not pass as a low or high score.
    """
    missing = [f"{metric} was not measured" for metric in METRICS if not 0 <= raw[metric][name] < math.inf]
    given = samples.get(name, {})
    return missing + [
        f"{metric} has draws that are negative or not finite"
        for metric in METRICS
        if metric in given and not (np.isfinite(given[metric]) & (given[metric] >= 0)).all()
    ]


def drawn_values(raw: pd.DataFrame, samples: Draws, reference: str = REFERENCE) -> dict[str, dict[str, Floats]]:
    """The draws of what can be limited, by variant and measure: given, or computed from latency and quality."""
    quality = {
        name: samples.get(name, {}).get("quality", np.array(raw["quality"][name])) for name in map(str, raw.index)
    }
    whole = quality.get(reference, np.array(math.nan))
    found: dict[str, dict[str, Floats]] = {}
    for name in quality:
        given = samples.get(name, {})
        limited = {measure: draws for measure, draws in given.items() if measure in MEASURES}
        # The correction for few rounds can widen a share beyond 1.
        found[name] = {each: np.minimum(d, 1.0) if MEASURES[each].unit == "0–1" else d for each, d in limited.items()}
        if "latency" in given:
            found[name]["e2el_p95_ms"] = given["latency"]
        with np.errstate(over="ignore"):  # an infinite value meets no limit
            found[name]["quality_recovery"] = quality[name] / np.where(whole > 0, whole, math.nan)
    return found


def meets(measure: str, limit: float, values: Floats) -> Booleans:
    """Which *values* of a measure meet its *limit*; a value that is not finite was not measured, and meets none."""
    within: Booleans = values >= limit if MEASURES[measure].higher_is_better else values <= limit
    within &= np.isfinite(values)
    return within
