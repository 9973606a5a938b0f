"""The machine's own speed, which is no variant's merit.

Variants that are measured one after another meet a machine that is not always equally fast: its clock, its neighbours.
Probes around each measurement tell by how much. How far the load feels a slower machine depends on what binds it, so
nothing is scaled by the probes: the measured values stay as they are, and what the machine differed between two
variants is added to what chance explains. A difference in speed then has to exceed that of the machine as well.
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
"""A machine that was slower by this share for one variant is told to the reader; it counts from the first per mille."""
FELT: Final = {
    **dict.fromkeys(("latency", "ttft_p95_ms", "tpot_p95_ms"), -1.0),
    **dict.fromkeys(("throughput", "goodput", "goodput_share"), 1.0),
}
"""Whether a metric rises or falls with the machine's speed."""


def deviations(speeds: Mapping[str, float]) -> dict[str, float]:
    """By variant, the logarithm of the machine's speed over the median of all: −0.1 is about 10 % slower."""
    if len(speeds) < 2:
        return dict.fromkeys(speeds, 0.0)
    middle = median(speeds.values())
    return {name: math.log(speed / middle) for name, speed in speeds.items()}


def widened(
    samples: Mapping[str, Mapping[str, Floats]], speeds: Mapping[str, float], *, draws: int = DRAWS, seed: int = SEED
) -> dict[str, dict[str, Floats]]:
    """The draws, each moved by a share of what the machine's speed would explain of it.

    In each draw one share z is taken for all variants from a normal distribution around 0 with 95 % within ±1, and
    what depends on speed is multiplied by exp(±z · deviation). The noise of two variants' difference
    (``scoring.confidence.noise_of``) then holds the whole difference between their machines.

    Args:
        speeds: of the machine, by variant, in any unit; a variant that is not named is left as it is.
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
    """What a reader has to know of a machine that was not equally fast for all; empty if it was."""
    if not speeds:
        return []
    fastest = max(speeds, key=lambda name: speeds[name])
    slower = {name: 1 - speed / speeds[fastest] for name, speed in speeds.items()}
    told = ", ".join(f"{share:.0%} slower for {name}" for name, share in slower.items() if share > NOTED)
    if not told:
        return []
    return [
        f"The machine itself was {told} than for {fastest}: differences in latency and throughput have to exceed that "
        "as well, and are told as they were measured."
    ]
