"""What a plan assumes where nothing was measured. Every plan prints these figures; measured ones replace the speeds."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from scoring.closed import Closed


class Assumption(Closed):
    """A figure that is assumed because it was not measured."""

    name: str
    value: float
    unit: str
    reason: str


class Assumptions(Closed):
    driver_memory: Assumption
    runtime_gib: Assumption
    communication_gib: Assumption
    graphs_gib: Assumption
    forward_copies: Assumption
    estimate_error: Assumption
    compute_efficiency: Assumption
    bandwidth_efficiency: Assumption
    link_efficiency: Assumption
    link_latency_us: Assumption
    step_ms: Assumption


ASSUMED: Final = Assumptions.model_validate_json(Path(__file__).with_suffix(".json").read_bytes())
