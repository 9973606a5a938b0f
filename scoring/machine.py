"""The speed of the machine itself, which must not be credited to a variant.

If variants are measured one after another, the machine is not equally fast for all of them, because of its clock or its
neighbours. Probes around each measurement show the difference. How much a slower machine affects the load depends on
what limits the load, so measured values are not scaled by the probes; instead, the difference between the machine's
speeds is added to what chance explains. A difference between two variants must then exceed that of the machine as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Final

import numpy as np

from scoring.draws import DRAWS, SEED
from scoring.normalize import Floats

Z_95: Final = 1.959964
NOTED: Final = 0.05
"""A note says if the machine was slower by more than this share for a variant; smaller differences count as well."""
FELT: Final = {
    **dict.fromkeys(("latency", "ttft_p95_ms", "tpot_p95_ms"), -1.0),
    **dict.fromkeys(("throughput", "goodput", "goodput_share"), 1.0),
}
"""Whether a metric rises or falls with the machine's speed."""


def deviations(speeds: Mapping[str, float]) -> dict[str, float]:
    """The logarithm of the machine's speed relative to the median, for each variant: −0.1 is about 10 % slower."""
    if len(speeds) < 2:
        return dict.fromkeys(speeds, 0.0)
    middle = median(speeds.values())
    return {name: math.log(speed / middle) for name, speed in speeds.items()}


def widened(
    samples: Mapping[str, Mapping[str, Floats]], speeds: Mapping[str, float], *, draws: int = DRAWS, seed: int = SEED
) -> dict[str, dict[str, Floats]]:
    """The draws, each shifted by a random share of what the machine's speed would explain.

    Each draw has one share z for all variants, from a normal distribution around 0 with 95 % within ±1. The metrics
    that depend on speed are multiplied by exp(±z · deviation). The noise of the difference between two variants
    (``scoring.confidence.noise_of``) then includes the whole difference between their machines.

    Args:
        speeds: the speed of the machine by variant, in any unit; variants that are missing are not changed.
    """
    by = deviations(speeds)
    share = np.random.default_rng([seed, *b"machine"]).normal(0.0, 1 / Z_95, draws)
    return {
        variant: {
            metric: values * np.exp(FELT[metric] * by[variant] * share[: len(values)])
            if metric in FELT and by.get(variant)
            else values
            for metric, values in each.items()
        }
        for variant, each in samples.items()
    }


def notes(speeds: Mapping[str, float]) -> list[str]:
    """A note if the machine was not equally fast for all variants."""
    if not speeds:
        return []
    fastest = max(speeds, key=lambda name: speeds[name])
    slower = {name: 1 - speed / speeds[fastest] for name, speed in speeds.items()}
    told = ", ".join(f"{share:.0%} slower for {name}" for name, share in slower.items() if share > NOTED)
    if not told:
        return []
    return [
        f"The machine itself was {told} than for {fastest}: differences in latency and throughput must exceed that as "
        "well to count; they are reported as measured."
    ]
