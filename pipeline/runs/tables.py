"""Tables of runs and decisions: rich tables on a terminal, plain text in a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.table import Table
from rich.text import Text

from pipeline.runs.progress import duration
from pipeline.runs.state import RunState
from scoring.metrics import odds, shown
from stages.parts.records.production import Candidate, Production


class Shown(Protocol):
    """A run of either engine."""

    @property
    def id(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def winner(self) -> str | None: ...

    @property
    def outcome(self) -> str | None: ...

    @property
    def state(self) -> RunState: ...


METRIC_HEADINGS = {"quality": "Quality", "latency": "ms", "throughput": "tok/s", "memory": "Weights"}
METRIC_DIGITS = {"quality": 4, "latency": 1, "throughput": 1}
PHASE_STYLES = {"Succeeded": "green", "Failed": "red", "Error": "red", "Interrupted": "red", "Running": "cyan"}


def score_table(decision: Production) -> Table:
    """One row for each variant by score, the winner with a star. 80 columns wide."""
    title = f"profile {decision.profile['name']}: {decision.headline}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    table.add_column("Variant", overflow="fold", max_width=24)  # the column that shrinks on a narrow terminal
    table.add_column("Score\n95 %", justify="right", no_wrap=True)
    table.add_column("Best\nwith", justify="right", no_wrap=True)
    for name, heading in METRIC_HEADINGS.items():
        table.add_column(f"{heading}\n{decision.weights[name]:.0%}", justify="right", no_wrap=True)
    costs = next((candidate.cost for candidate in decision.candidates if candidate.cost), None)
    if costs:
        table.caption = f"{costs.currency} for a million output tokens at the {costs.basis}"
        table.caption_justify = "left"
        table.add_column(f"{costs.currency}\n1 M tok", justify="right", no_wrap=True)
    for candidate in decision.candidates:
        won = candidate.variant == decision.winner
        cells = [_raw(metric, candidate.raw[metric]) if metric in candidate.raw else "–" for metric in METRIC_HEADINGS]
        cells += [f"{candidate.cost.value:.3g}" if candidate.cost else "–"] if costs else []
        chance = odds(candidate.chance) if candidate.chance is not None else "–"
        score = Text("out", style="red") if candidate.score is None else Text(_score(candidate))
        table.add_row(("★ " if won else "  ") + candidate.variant, score, chance, *cells, style="bold" if won else "")
    return table


def _raw(metric: str, value: float) -> str:
    """A value without its unit, which is in the heading; thousands have no decimals."""
    if metric not in METRIC_DIGITS:
        return shown(metric, value)
    return f"{value:,.{METRIC_DIGITS[metric] if abs(value) < 1000 else 0}f}"


def _score(candidate: Candidate) -> str:
    if candidate.score_low is None or candidate.score_high is None:
        return f"{candidate.score:.3f}"
    return f"{candidate.score:.3f} ({candidate.score_low:.2f}–{candidate.score_high:.2f})"


def runs_table(runs: Sequence[Shown]) -> Table:
    """A table of runs, in the given order."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("Run", "Model", "Phase", "Winner", "Outcome", "Started", "Took"):
        table.add_column(heading, justify="right" if heading == "Took" else "left")
    for run in runs:
        phase = Text(run.state.phase, style=PHASE_STYLES.get(run.state.phase, ""))
        started = f"{run.state.started_at.astimezone():%Y-%m-%d %H:%M}" if run.state.started_at else "–"
        table.add_row(
            run.id, run.model, phase, run.winner or "–", run.outcome or "–", started, _took(run.state.seconds)
        )
    return table


def tasks_table(run: Shown) -> Table:
    """A table of a run's tasks: how each ended, and why."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("Task", "Phase", "Took", "Message"):
        table.add_column(heading, justify="right" if heading == "Took" else "left", overflow="fold")
    for node in run.state.nodes:
        phase = Text("Cached" if node.cached else node.phase, style=PHASE_STYLES.get(node.phase, ""))
        said = run.state.said(node)
        message = f"{said}\nhint: {node.hint}" if node.hint else said
        table.add_row(node.name, phase, _took(node.seconds), message)
    return table


def _took(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds)
