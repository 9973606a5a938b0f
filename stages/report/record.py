"""``report.json``: what a run left, for programs and for the page."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from pydantic import Field

from stages.parts.base.program import Outcome
from stages.parts.base.record import Record
from stages.parts.records.acquired import Acquired
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import Production
from stages.parts.records.variant import Variant

JSON: Final = "report.json"


class RunReport(Record):
    """``report.json``: the run as a whole. ``decision`` is None when the run did not come that far."""

    run: str
    model: str
    status: str
    settings: dict[str, Any] = Field(default_factory=dict)
    """What the run was told and its figures follow from: profile, workload, optimize, serving."""
    outcomes: tuple[Outcome, ...]
    base: Acquired | None
    decision: Production | None
    variants: tuple[Variant, ...]
    evaluations: tuple[Evaluation, ...]
    written_at: datetime
