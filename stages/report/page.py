"""What a run left, collected into one document and drawn as one page without JavaScript (Argo's UI blocks it)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from scoring.metrics import METRICS, odds, shown, si
from stages.parts.base import program
from stages.parts.base.errors import SlipwayError
from stages.parts.base.record import Record
from stages.parts.base.store import ModelStore
from stages.parts.records.acquired import ACQUIRED, Acquired
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import Production
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.releases.release import CANDIDATE_METRICS
from stages.report.record import RunReport

TEMPLATE: Final = Path(__file__).with_name("report.html.jinja")
HTML: Final = "report.html"
RecordT = TypeVar("RecordT", bound=Record)


def collect(store: ModelStore, run_id: str, status: str, settings: Mapping[str, Any] | None = None) -> RunReport:
    """Everything this run left; a part that is missing or damaged is left out rather than fatal."""
    outcomes = program.outcomes(store.run(run_id))
    selected = next((each for each in outcomes if each.stage == "select" and each.result != "failed"), None)
    # Either may have moved on since, and a release that was rolled back is in neither's place.
    read = [_readable(Production, path) for path in (store.production_metrics, store.path / CANDIDATE_METRICS)]
    decision = next((each for each in read if each and selected and each.key == selected.key), None)
    names = [each.variant for each in outcomes if each.stage == "evaluate" and each.result != "failed"]
    variants = [_readable(Variant, store.optimized(name) / VARIANT) for name in names]
    evaluations = [_readable(Evaluation, store.evaluation(name)) for name in names]
    return RunReport(
        run=run_id,
        model=store.model,
        status=status,
        settings=dict(settings or {}),
        outcomes=tuple(outcomes),
        base=_readable(Acquired, store.base / ACQUIRED),
        decision=decision,
        variants=tuple(each for each in variants if each),
        evaluations=tuple(each for each in evaluations if each),
        written_at=datetime.now().astimezone(),
    )


def render(report: RunReport) -> str:
    """The report as one HTML page without any outside reference."""
    import jinja2

    from stages.report import facts

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"si": si, "gib": lambda value: f"{value / 2**30:.2f} GiB"}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    decision = report.decision
    candidates = decision.candidates if decision else ()
    ranking = [each.variant for each in candidates]
    evaluations = sorted(report.evaluations, key=lambda each: _place(ranking, each.variant))
    settings = facts.settings_file(report) if decision and report.settings else ""
    names = [*ranking, *(each.variant for each in evaluations), *(each.variant for each in report.variants)]
    return template.render(
        report=report,
        evaluations=evaluations,
        by_name={each.variant: each for each in evaluations},
        measured=[each.variant for each in candidates if each.raw],
        looks=facts.styles(names),
        tasks=list({score.task: score for each in evaluations for score in each.quality}.values()),
        concurrencies=sorted({point.concurrency for each in evaluations for point in each.sweep}),
        slo=next((each.goodput for each in evaluations if each.goodput), None),
        costs=any(each.cost for each in candidates),
        command=facts.command(decision, _source(report)) if decision else "",
        settings=settings,
        facts=facts,
        metrics=METRICS,
        shown=shown,
        odds=odds,
    )


def _place(ranking: Sequence[str], variant: str) -> tuple[int, bool, str]:
    """As ranked; without a ranking fp16 first."""
    return ranking.index(variant) if variant in ranking else len(ranking), variant != "fp16", variant


def _source(report: RunReport) -> str:
    """What ``slipway run`` was given: a name on the Hub, or a local directory."""
    source = report.base.source if report.base else ""
    return source.removeprefix("local:") if source.startswith("local:") else report.model


def _readable(record: type[RecordT], path: Path) -> RecordT | None:
    try:
        return record.read(path)
    except (SlipwayError, ValidationError):
        return None
