"""The report as one HTML page without JavaScript (Argo's UI blocks it) and without outside references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scoring.metrics import METRICS
from scoring.names import REFERENCE
from stages.report.cells import Fact, Table, Variants
from stages.report.choice import FirstScreen, first_screen
from stages.report.constraints import constraints
from stages.report.load import LoadSection, load_section
from stages.report.predicted import predicted
from stages.report.provenance import setup, stage_name, stages_run, variants_made
from stages.report.quality import quality
from stages.report.reproduction import Reproduction, reproduction
from stages.report.run_report import RunReport
from stages.report.scores import Scores, TradeOffs, scores, trade_offs
from stages.report.svg import STYLES

TEMPLATES: Final = Path(__file__).with_name("templates")
HTML: Final = "report.html"


@dataclass(frozen=True)
class Page:
    """What the template lays out, section by section; a section that is None or empty is left out."""

    model: str
    commit: str
    run: str
    status: str
    succeeded: bool
    choice: FirstScreen | None
    failures: tuple[Fact, ...]
    """The stages that failed, in a run without a decision."""
    scores: Scores | None
    trade_offs: TradeOffs | None
    speed: LoadSection | None
    quality: Table | None
    constraints: Table | None
    predicted: Table | None
    setup: tuple[Fact, ...]
    reproduction: Reproduction | None
    variants: Table | None
    stages: Table


def render(report: RunReport) -> str:
    """Render the page's HTML."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.jinja")
    return template.render(page=page_of(report), metrics=tuple(METRICS), styles=range(STYLES))


def page_of(report: RunReport) -> Page:
    decision = report.decision
    ranking = [candidate.variant for candidate in decision.candidates] if decision else []
    evaluations = sorted(report.evaluations, key=lambda evaluation: _rank(ranking, evaluation.variant))
    names = [
        *ranking,
        *(evaluation.variant for evaluation in evaluations),
        *(variant.variant for variant in report.variants),
    ]
    others = sorted({*names} - {REFERENCE})
    variants = Variants({REFERENCE: 0} | {name: 1 + number % (STYLES - 1) for number, name in enumerate(others)})
    failed = [] if decision else [outcome for outcome in report.outcomes if outcome.result == "failed"]
    return Page(
        model=report.model,
        commit=report.base.commit[:12] if report.base else "",
        run=report.run,
        status=report.status,
        succeeded=report.status == "Succeeded",
        choice=first_screen(decision) if decision else None,
        failures=tuple(Fact(stage_name(outcome), outcome.reason, rest=outcome.hint) for outcome in failed),
        scores=scores(decision, variants) if decision else None,
        trade_offs=trade_offs(decision, variants) if decision else None,
        speed=load_section(evaluations, variants) if evaluations else None,
        quality=quality(evaluations, decision, variants) if evaluations else None,
        constraints=constraints(decision, evaluations, variants) if decision else None,
        predicted=predicted(report.predictions, evaluations, variants),
        setup=tuple(setup(report.base, evaluations)),
        reproduction=reproduction(report, decision) if decision else None,
        variants=variants_made(report.variants, variants) if report.variants else None,
        stages=stages_run(report.outcomes),
    )


def _rank(ranking: Sequence[str], variant: str) -> tuple[int, bool, str]:
    """Sort by the ranking; variants outside of it come last, fp16 before the others."""
    return ranking.index(variant) if variant in ranking else len(ranking), variant != REFERENCE, variant
