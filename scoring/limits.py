"""Values that may be on the other side of a limit, by their bootstrap draws."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from scoring.arrays import Floats
from scoring.constraints import MEASURES
from scoring.draws import Draws
from scoring.names import REFERENCE


def near(name: str, measure: str, limit: float, value: float | None, draws: Floats | None) -> str | None:
    """A sentence if the 95 % interval of a variant's value crosses the limit; None also without draws."""
    if value is None or not math.isfinite(value) or draws is None:
        return None
    low, high = (float(each) for each in np.percentile(draws, [2.5, 97.5]))
    low, high = min(low, value), max(high, value)
    if meets(measure, limit, low) == meets(measure, limit, high):
        return None
    bound = "minimum" if MEASURES[measure].higher_is_better else "maximum"
    return (
        f"{name} {'meets' if meets(measure, limit, value) else 'violates'} the {bound} of "
        f"{limit:.12g} for {measure} with {value:.4g}, but its 95 % interval of {low:.4g} to {high:.4g} "
        "crosses the limit."
    )


def meets(measure: str, limit: float, value: float) -> bool:
    """Whether a value meets its limit; one that is not finite was not measured, and meets none."""
    return math.isfinite(value) and (value >= limit if MEASURES[measure].higher_is_better else value <= limit)


def limited_draws(samples: Draws, reference: str = REFERENCE) -> dict[str, dict[str, Floats]]:
    """The draws of what can be limited, by variant and measure: given, or computed from latency and quality."""
    whole = samples.get(reference, {}).get("quality")
    found: dict[str, dict[str, Floats]] = {}
    for name, given in samples.items():
        limited: Mapping[str, Floats] = {measure: draws for measure, draws in given.items() if measure in MEASURES}
        # The correction for few rounds can widen a share beyond 1.
        found[name] = {each: np.minimum(d, 1.0) if MEASURES[each].unit == "0–1" else d for each, d in limited.items()}
        if "latency" in given:
            found[name]["e2el_p95_ms"] = given["latency"]
        if "quality" in given and whole is not None and (whole > 0).all():
            found[name]["quality_recovery"] = given["quality"] / whole
    return found
