"""Tables of runs, decisions and what checks find: rich tables on a terminal, plain text in a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final, Literal, NamedTuple

from rich.table import Table
from rich.text import Text

from pipeline.runs.engine import PipelineRun, plain_table
from pipeline.runs.progress import duration
from scoring.metrics import shown
from stages.parts.records.production import Production

METRIC_HEADINGS = {"quality": "Quality", "latency": "ms", "throughput": "tok/s", "memory": "Weights"}
METRIC_DIGITS = {"quality": 4, "latency": 1, "throughput": 1}
PHASE_STYLES = {"Succeeded": "green", "Failed": "red", "Error": "red", "Interrupted": "red", "Running": "cyan"}


def score_table(decision: Production) -> Table:
    """One row for each variant by score, the winner with a star. 80 columns wide."""
    title = f"profile {decision.profile['name']}: {decision.headline}"
    table = plain_table(title=title, title_justify="left")
    table.add_column("Variant", overflow="fold", max_width=24)  # the column that shrinks on a narrow terminal
    weights = [f"{heading}\n{decision.weights[name]:.0%}" for name, heading in METRIC_HEADINGS.items()]
    for heading in ("Score\n95 %", "Best\nwith", *weights):
        table.add_column(heading, justify="right", no_wrap=True)
    costs = next((candidate.cost for candidate in decision.candidates if candidate.cost), None)
    if costs:
        table.caption = f"{costs.currency} for a million output tokens at the {costs.basis}"
        table.caption_justify = "left"
        table.add_column(f"{costs.currency}\n1 M tok", justify="right", no_wrap=True)
    for candidate in decision.candidates:
        won = candidate.variant == decision.winner
        cells = [_raw(metric, candidate.raw[metric]) if metric in candidate.raw else "–" for metric in METRIC_HEADINGS]
        cells += [f"{candidate.cost.value:.3g}" if candidate.cost else "–"] if costs else []
        score = Text("out", style="red") if candidate.score is None else Text(candidate.score_text)
        name, style = ("★ " if won else "  ") + candidate.variant, "bold" if won else ""
        table.add_row(name, score, candidate.chance_text, *cells, style=style)
    return table


def _raw(metric: str, value: float) -> str:
    """Return a value without its unit, which is in the heading; thousands have no decimals."""
    if metric not in METRIC_DIGITS:
        return shown(metric, value)
    return f"{value:,.{METRIC_DIGITS[metric] if abs(value) < 1000 else 0}f}"


def runs_table(runs: Sequence[PipelineRun]) -> Table:
    table = plain_table("Run", "Model", "Phase", "Winner", "Outcome", "Started", "Took", right=("Took",))
    for run in runs:
        state = run.state
        phase = Text(state.phase, style=PHASE_STYLES.get(state.phase, ""))
        started = f"{state.started_at.astimezone():%Y-%m-%d %H:%M}" if state.started_at else "–"
        table.add_row(run.id, state.model, phase, run.winner or "–", run.outcome or "–", started, _took(state.seconds))
    return table


def tasks_table(run: PipelineRun) -> Table:
    """Return a table of a run's tasks: how each ended, and why."""
    table = plain_table("Task", "Phase", "Took", "Message", right=("Took",))
    for node in run.state.nodes:
        phase = Text("Cached" if node.cached else node.phase, style=PHASE_STYLES.get(node.phase, ""))
        lines = [run.state.message_of(node), f"hint: {node.hint}" if node.hint else ""]
        lines += [f"attempt {number} failed: {failure.message}" for number, failure in enumerate(node.retried, 1)]
        table.add_row(node.name, phase, _took(node.seconds), "\n".join(filter(None, lines)))
    return table


def _took(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds)


class Finding(NamedTuple):
    state: Literal["ok", "off", "warning", "missing"]
    """off: what the settings leave out, or what is not there and need not be."""
    found: str
    hint: str = ""
    """What to do about it."""


ok: Final = partial(Finding, "ok")
off: Final = partial(Finding, "off")
warning: Final = partial(Finding, "warning")
missing: Final = partial(Finding, "missing")
