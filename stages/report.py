"""report: what a person reads after a run, ended well or not. Runs as the workflow's exit handler.

Writes ``runs/<id>/report.json`` and ``report.html``: one self-contained file without JavaScript, because
Argo's UI blocks it. Reads only what the other stages left, so that it works after any failure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from scoring.metrics import METRICS, odds, shown, si
from stages import program
from stages.errors import ConfigError, SlipwayError
from stages.hub import model_id
from stages.records import ACQUIRED, VARIANT, Acquired, Evaluation, Production, Record, Variant
from stages.store import ModelStore, store_root, write_text

TEMPLATE: Final = Path(__file__).with_name("report.html.jinja")
JSON: Final = "report.json"
HTML: Final = "report.html"
RecordT = TypeVar("RecordT", bound=Record)


class RunReport(Record):
    """``report.json``: the run as a whole. ``decision`` is None when the run did not come that far."""

    run: str
    model: str
    status: str
    outcomes: tuple[program.Outcome, ...]
    base: Acquired | None
    decision: Production | None
    variants: tuple[Variant, ...]
    evaluations: tuple[Evaluation, ...]
    written_at: datetime


def main() -> None:
    arguments = _arguments()
    store = ModelStore(store_root(), model_id(arguments.model))
    run_id = os.environ.get(program.RUN_VARIABLE)
    if not run_id:
        raise ConfigError(f"{program.RUN_VARIABLE} is not set", hint="the report is of one run: name it")
    report = collect(store, run_id, arguments.status)
    folder = store.run(run_id)
    report.write(folder / JSON)
    write_text(folder / HTML, render(report))
    print(folder / HTML)


def collect(store: ModelStore, run_id: str, status: str) -> RunReport:
    """Everything this run left; a part that is missing or damaged is left out rather than fatal."""
    outcomes = program.outcomes(store.run(run_id))
    selected = next((each for each in outcomes if each.stage == "select" and each.result != "failed"), None)
    decision = _readable(Production, store.production_metrics) if selected else None
    if decision and selected and decision.key != selected.key:
        decision = None  # production has moved on since
    names = [each.variant for each in outcomes if each.stage == "evaluate" and each.result != "failed"]
    variants = [_readable(Variant, store.optimized(name) / VARIANT) for name in names]
    evaluations = [_readable(Evaluation, store.evaluation(name)) for name in names]
    return RunReport(
        run=run_id,
        model=store.model,
        status=status,
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

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"si": si, "gib": lambda value: f"{value / 2**30:.2f} GiB"}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    ranking = [each.variant for each in report.decision.candidates] if report.decision else []
    evaluations = sorted(report.evaluations, key=lambda each: ranking.index(each.variant) if ranking else 0)
    return template.render(
        report=report, evaluations=evaluations, metrics=METRICS, shown=shown, odds=odds, config=_as_json
    )


def _as_json(value: Any) -> str:
    return json.dumps(value, indent=2)


def _readable(record: type[RecordT], path: Path) -> RecordT | None:
    try:
        return record.read(path)
    except (SlipwayError, ValidationError):
        return None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m stages.report",
        description="Write report.json and report.html of one run.",
        epilog="example: SLIPWAY_RUN=run-1 python -m stages.report --model org/name --status Succeeded",
    )
    parser.add_argument("--model", required=True, help="name on the Hub, or a local directory")
    parser.add_argument("--status", required=True, help="how the run ended, as Argo says it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(program.main(main))
