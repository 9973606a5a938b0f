"""``report.json``: what a run left, for programs to read and for the page to show."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from pydantic import Field

from stages.parts.base.program import Outcome
from stages.parts.base.store import Record
from stages.parts.records.acquired import Acquired
from stages.parts.records.drills import Drill
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import Production
from stages.parts.records.variant import Variant

JSON: Final = "report.json"


class PredictedFigures(Record):
    """What ``slipway plan`` predicts of a variant, without calibration, under the conditions of its evaluation."""

    variant: str
    weights_bytes: int
    kv_cache_tokens: int | None
    """None if it would not have fitted, or on a GPU that the catalogue lacks."""
    ttft_ms: float | None
    """Mean. None without a GPU, or on one that the catalogue lacks."""
    tpot_ms: float | None


class RunReport(Record):
    """``report.json``: the run as a whole."""

    run: str
    model: str
    status: str
    settings: dict[str, Any] = Field(default_factory=dict)
    """The run's profile, workload, optimize and serving settings, as far as they could be read."""
    outcomes: tuple[Outcome, ...]
    base: Acquired | None
    decision: Production | None
    """None if the run made no decision, or if the store no longer has it."""
    variants: tuple[Variant, ...]
    evaluations: tuple[Evaluation, ...]
    predictions: tuple[PredictedFigures, ...] = ()
    watched: tuple[str, ...] = ()
    """What ``slipway watch`` saw of its release in production: the last alarms, and the last look."""
    drills: tuple[Drill, ...] = ()
    """How its release withstood ``slipway drill``, of each drill the last time."""
    written_at: datetime
