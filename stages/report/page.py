"""What a run left in the store, collected, and shown as one HTML page without JavaScript (Argo's UI blocks it) and
without outside references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from scoring.metrics import METRICS
from scoring.names import REFERENCE
from stages.parts.base import program
from stages.parts.base.files import write_text
from stages.parts.base.store import ModelStore
from stages.parts.records.acquired import ACQUIRED, Acquired
from stages.parts.records.drills import Drill, drilled
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import Production
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.records.watch import history, seen
from stages.parts.releases.release import CANDIDATE_METRICS
from stages.report import load, provenance, quality, scores
from stages.report.cells import Cell, Fact, Table, Variants, cell, heads, percent, row
from stages.report.load import predictions
from stages.report.plots import COLORS
from stages.report.run_report import JSON, RunReport

TEMPLATES: Final = Path(__file__).with_name("templates")
HTML: Final = "report.html"


def collect(store: ModelStore, run_id: str, status: str, settings: Mapping[str, Any] | None = None) -> RunReport:
    """Collect everything that the run left. Missing and damaged documents are left out, so that any run has a report.

    *status* says how the run ended, in Argo's words; *settings* are its profile, workload, optimize and serving.
    """
    outcomes = program.outcomes(store.run(run_id))
    evaluated = [outcome.variant for outcome in outcomes if outcome.stage == "evaluate" and outcome.result != "failed"]
    folders = dict.fromkeys(map(store.optimized, evaluated))
    variants = tuple(filter(None, (Variant.read_if_intact(folder / VARIANT) for folder in folders)))
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


def renew(store: ModelStore, release: str) -> None:
    """Write the reports of the runs that chose a release anew, with what has been seen of it since."""
    since = {"watched": history(seen(store).of(release)), "drills": drilled(store, release)}
    for path in store.runs.glob(f"*/{JSON}"):
        report = RunReport.read_if_intact(path)
        if report and report.decision and report.decision.release == release:
            report = report.model_copy(update=since)
            report.write(path)
            write_text(path.with_name(HTML), render(report))


def render(report: RunReport) -> str:
    return rendered("report.html.jinja", contents(report))


def rendered(template: str, shown: Mapping[str, Any]) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = percent
    return environment.get_template(template).render(shown)


def readiness(drills: Sequence[Drill]) -> Table | None:
    """List the drills of the release: what held, what did not and why, and the figures."""
    rows = []
    for drill in drills:
        name = cell(drill.drill, *(["short"] if drill.short else []))
        verdict = cell(drill.verdict, css="failed" if drill.failures else "ok")
        rows.append(row(name, verdict, cell(drill.text, css="text"), cell(f"{drill.at:%Y-%m-%d %H:%M}")))
    titles = (*heads("Drill", "Verdict"), Cell(("Why, and what was seen",), css="text"), *heads("When"))
    return Table("drills", titles, tuple(rows)) if rows else None


def contents(report: RunReport) -> dict[str, Any]:
    """Gather what the template lays out: the report, and what was made of it for each section. What follows from a
    decision is absent without one, and what follows from evaluations without any."""
    decision = report.decision
    ranking = [candidate.variant for candidate in decision.candidates] if decision else []
    reference = (decision.reference if decision else "") or (report.base.format if report.base else REFERENCE)

    def rank(name: str) -> tuple[int, bool, str]:
        """Sort by the ranking; variants outside of it come last, the reference before the others."""
        return ranking.index(name) if name in ranking else len(ranking), name != reference, name

    evaluations = sorted(report.evaluations, key=lambda evaluation: rank(evaluation.variant))
    measured, made = [each.variant for each in evaluations], [each.variant for each in report.variants]
    variants = Variants.styled((*ranking, *measured, *made), reference)
    shown: dict[str, Any] = {
        "report": report,
        "decision": decision,
        "evaluations": evaluations,
        "variants": variants,
        "reference": reference,
        "metrics": tuple(METRICS),
        "colors": range(COLORS),
        "left_out": [Fact(each.variant, each.reason) for each in report.outcomes if each.result == "left out"],
        "predicted": load.predicted(report.predictions, evaluations, variants),
        "drills": readiness(report.drills),
        "setup": provenance.setup(report.base, evaluations),
        "made": provenance.variants_made(report.variants, variants),
        "stages": provenance.stages_run(report.outcomes),
    }
    if evaluations:
        shown |= {
            "load_title": load.title(evaluations[0].load),
            "load_explanation": load.explanation(evaluations[0]),
            "times": load.times(evaluations, variants),
            "load": (load.measures(evaluations, variants), *load.cold_starts(evaluations, variants)),
            "fallbacks": load.fallbacks(evaluations),
            "rates": load.rates_tried(evaluations, variants),
            "quality": quality.quality(evaluations, decision, variants, reference),
        }
    if decision:
        reason, details = scores.sentences(decision.reason)
        shown |= {
            "reason": reason,
            "details": details,
            "tiles": scores.tiles(decision),
            "weights": scores.weights(decision),
            "scores": scores.scores(decision, variants),
            "score_plots": scores.score_plots(decision, variants),
            "comparisons": scores.comparisons(decision, variants),
            "left_out": scores.left_out(decision, evaluations),
            "points": (points := scores.loss_points(decision, variants)),
            "loss_plots": scores.loss_plots(decision, points) if points else None,
            "constraints": quality.constraints(decision, evaluations, variants),
            "settings_file": provenance.SETTINGS_FILE,
            "settings": provenance.settings_file(report),
            "command": provenance.command(report, decision),
            "reproduction": provenance.reproduction(report, decision),
        }
    return shown
