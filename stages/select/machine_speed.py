"""The speed of the machine itself, which must not be credited to a variant.

Blocks compare the variants within minutes of each other and in an order that rotates, so that a drift of the machine is
part of the noise of starts. Where a server is started only once, nothing else shows it than probes around the load.
Measured values are never scaled by the probes, because the effect of a slower machine on a load depends on what limits
the load.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import geometric_mean
from typing import Final

from stages.parts.records.evaluation import Evaluation

NOTED: Final = 0.05
"""A note says if the machine was slower by more than this share for a variant."""


def machine_speeds(evaluations: Mapping[str, Evaluation]) -> dict[str, float]:
    """Compute the speed of the machine when each variant was measured: the geometric mean of its probes. Variants
    measured on GPUs are missing, because GPUs are not probed."""
    return {
        name: geometric_mean([speed for probe in drift.probes() for speed in probe.model_dump().values()])
        for name, evaluation in evaluations.items()
        if (drift := evaluation.drift) and not evaluation.hardware.gpus
    }


def slower_shares(shares: Mapping[str, float]) -> str:
    """List the variants for which the machine was slower by more than a note needs; empty if there are none."""
    return ", ".join(f"{share:.0%} slower for {name}" for name, share in shares.items() if share > NOTED)


def slower_machine(speeds: Mapping[str, float]) -> list[str]:
    """Note a machine that was not equally fast for all variants."""
    if not speeds:
        return []
    fastest = max(speeds, key=lambda name: speeds[name])
    slower = slower_shares({name: 1 - speed / speeds[fastest] for name, speed in speeds.items()})
    if not slower:
        return []
    return [f"The machine itself was {slower} than for {fastest}; latency and throughput are reported as measured."]
