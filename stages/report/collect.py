"""Collects what a run left in the store into its report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from stages.parts.base import program
from stages.parts.base.errors import SlipwayError
from stages.parts.base.record import Record
from stages.parts.base.store import ModelStore
from stages.parts.records.acquired import ACQUIRED, Acquired
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import Production
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.releases.release import CANDIDATE_METRICS
from stages.report.predicted import predictions
from stages.report.run_report import RunReport

RecordT = TypeVar("RecordT", bound=Record)


def collect(store: ModelStore, run_id: str, status: str, settings: Mapping[str, Any] | None = None) -> RunReport:
    """Collect everything that the run left. Missing and damaged documents are left out, so that any run has a report.

    Args:
        status: how the run ended, in Argo's words, such as "Succeeded".
        settings: the run's profile, workload, optimize and serving settings.
    """
    outcomes = program.outcomes(store.run(run_id))
    evaluated = [outcome.variant for outcome in outcomes if outcome.stage == "evaluate" and outcome.result != "failed"]
    variants = _all_readable(Variant, (store.optimized(name) / VARIANT for name in evaluated))
    evaluations = _all_readable(Evaluation, map(store.evaluation, evaluated))
    return RunReport(
        run=run_id,
        model=store.model,
        status=status,
        settings=dict(settings or {}),
        outcomes=tuple(outcomes),
        base=_readable(Acquired, store.base / ACQUIRED),
        decision=_decision(store, outcomes),
        variants=variants,
        evaluations=evaluations,
        predictions=predictions(store, variants, evaluations),
        written_at=datetime.now().astimezone(),
    )


def _decision(store: ModelStore, outcomes: list[program.Outcome]) -> Production | None:
    """Find the decision of this run, as long as the store still has it.

    Its release is in production, or it is the canary's. It is neither once a later run has replaced it, or after a
    rollback.
    """
    selected = next((outcome for outcome in outcomes if outcome.stage == "select" and outcome.result != "failed"), None)
    if selected is None:
        return None
    stored = [_readable(Production, path) for path in (store.production_metrics, store.path / CANDIDATE_METRICS)]
    return next((decision for decision in stored if decision and decision.key == selected.key), None)


def _all_readable(record: type[RecordT], paths: Iterable[Path]) -> tuple[RecordT, ...]:
    return tuple(document for path in paths if (document := _readable(record, path)))


def _readable(record: type[RecordT], path: Path) -> RecordT | None:
    try:
        return record.read(path)
    except (SlipwayError, ValidationError):
        return None
