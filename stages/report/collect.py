"""Collects what a run left in the store into its report."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from stages.parts.base import program
from stages.parts.base.store import ModelStore
from stages.parts.records.acquired import ACQUIRED, Acquired
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import Production
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.releases.release import CANDIDATE_METRICS
from stages.report.predicted import predictions
from stages.report.run_report import RunReport


def collect(store: ModelStore, run_id: str, status: str, settings: Mapping[str, Any] | None = None) -> RunReport:
    """Collect everything that the run left. Missing and damaged documents are left out, so that any run has a report.

    *status* says how the run ended, in Argo's words; *settings* are its profile, workload, optimize and serving.
    """
    outcomes = program.outcomes(store.run(run_id))
    evaluated = [outcome.variant for outcome in outcomes if outcome.stage == "evaluate" and outcome.result != "failed"]
    variants = tuple(filter(None, (Variant.read_if_intact(store.optimized(name) / VARIANT) for name in evaluated)))
    evaluations = tuple(filter(None, (Evaluation.read_if_intact(store.evaluation(name)) for name in evaluated)))
    return RunReport(
        run=run_id,
        model=store.model,
        status=status,
        settings=dict(settings or {}),
        outcomes=tuple(outcomes),
        base=Acquired.read_if_intact(store.base / ACQUIRED),
        decision=_decision(store, outcomes),
        variants=variants,
        evaluations=evaluations,
        predictions=predictions(store, variants, evaluations),
        written_at=datetime.now().astimezone(),
    )


def _decision(store: ModelStore, outcomes: list[program.Outcome]) -> Production | None:
    """Find the decision of this run, as long as its release is in production or the canary: not once a later run has
    replaced it, or after a rollback."""
    selected = next((outcome for outcome in outcomes if outcome.stage == "select" and outcome.result != "failed"), None)
    if selected is None:
        return None
    stored = map(Production.read_if_intact, (store.production_metrics, store.path / CANDIDATE_METRICS))
    return next((decision for decision in stored if decision and decision.key == selected.key), None)
