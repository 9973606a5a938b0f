"""The speed of the machine itself, which must not be credited to a variant.

Blocks compare the variants within minutes of each other and in an order that rotates, so that a drift of the machine is
part of the noise of starts. Where a server is started only once, nothing else shows it than probes around the load.
Measured values are never scaled by the probes, because the effect of a slower machine on a load depends on what limits
the load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

NOTED: Final = 0.05
"""A note says if the machine was slower by more than this share for a variant."""


def notes(speeds: Mapping[str, float]) -> list[str]:
    """A note if the machine was not equally fast for all variants."""
    if not speeds:
        return []
    fastest = max(speeds, key=lambda name: speeds[name])
    slower = {name: 1 - speed / speeds[fastest] for name, speed in speeds.items()}
    told = ", ".join(f"{share:.0%} slower for {name}" for name, share in slower.items() if share > NOTED)
    if not told:
        return []
    return [f"The machine itself was {told} than for {fastest}; latency and throughput are reported as measured."]
