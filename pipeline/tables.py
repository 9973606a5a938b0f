"""What the CLI prints about runs and decisions: rich tables on a terminal, the same as plain text when piped."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from pipeline.local.progress import duration
from pipeline.runs import Run
from scoring.metrics import odds, shown
from stages.records import Production

METRIC_HEADINGS = {"quality": "Quality", "latency": "p95 latency", "throughput": "Throughput", "memory": "Weights"}
PHASE_STYLES = {"Succeeded": "green", "Failed": "red", "Error": "red", "Interrupted": "red", "Running": "cyan"}


def score_table(decision: Production) -> Table:
    """One row per variant by score, the winner starred; a variant out of the running with its reason."""
    title = f"profile {decision.profile['name']}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    table.add_column("Variant")
    table.add_column("Score", justify="right")
    table.add_column("Wins again", justify="right")
    for name, heading in METRIC_HEADINGS.items():
        table.add_column(f"{heading} {decision.weights[name]:.0%}", justify="right")
    for each in decision.candidates:
        won = each.variant == decision.winner
        name = ("★ " if won else "  ") + each.variant
        if each.excluded:
            table.add_row(name, Text("out", style="red"))
            continue
        again = odds(each.win_probability) if each.win_probability is not None else "–"
        cells = [f"{shown(metric, each.raw[metric])} → {each.normalized[metric]:.2f}" for metric in METRIC_HEADINGS]
        table.add_row(name, f"{each.score:.3f}", again, *cells, style="bold" if won else "")
    return table


def runs_table(runs: list[Run]) -> Table:
    """The store's runs, the newest first."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("Run", "Model", "Phase", "Winner", "Started", "Took"):
        table.add_column(heading, justify="right" if heading == "Took" else "left")
    for run in runs:
        report = run.report()
        winner = report.decision.winner if report and report.decision else "–"
        phase = Text(run.state.phase, style=PHASE_STYLES.get(run.state.phase, ""))
        started = f"{run.state.started_at.astimezone():%Y-%m-%d %H:%M}" if run.state.started_at else "–"
        table.add_row(run.id, run.model, phase, winner, started, _took(run.state.seconds))
    return table


def tasks_table(run: Run) -> Table:
    """A run's tasks with how each ended and why."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("Task", "Phase", "Took", "Message"):
        table.add_column(heading, justify="right" if heading == "Took" else "left", overflow="fold")
    for node in run.state.nodes:
        phase = Text("Cached" if node.cached else node.phase, style=PHASE_STYLES.get(node.phase, ""))
        message = f"{node.message}\nhint: {node.hint}" if node.hint else node.message
        table.add_row(node.name, phase, _took(node.seconds), message)
    return table


def _took(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds)
