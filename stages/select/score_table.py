"""A decision as a Markdown table, which is an output of select and shown by Argo's UI."""

from __future__ import annotations

from typing import Final

from scoring.metrics import odds, shown
from stages.parts.records.production import Candidate, Production

HEADINGS: Final = {"quality": "Quality", "latency": "Latency", "throughput": "Throughput", "memory": "Weights"}


def markdown(decision: Production) -> str:
    """Write the outcome, and one row per variant by score, with the winner in bold; excluded variants have their
    reason."""
    metrics = [f"{heading} {decision.weights[name]:.0%}" for name, heading in HEADINGS.items()]
    head = ["Variant", "Score", "Best with", *metrics]
    rows = [
        head,
        ["---", *["---:"] * (len(head) - 1)],
        *(_row(candidate, decision) for candidate in decision.candidates),
    ]
    return "\n".join([f"{decision.headline}\n", *(f"| {' | '.join(cells)} |" for cells in rows)])


def _row(candidate: Candidate, decision: Production) -> list[str]:
    name = f"**{candidate.variant}**" if candidate.variant == decision.winner else candidate.variant
    if candidate.excluded:
        return [name, f"excluded: {_cell(candidate.excluded)}", "–", *["–"] * len(HEADINGS)]
    chance = odds(candidate.chance) if candidate.chance is not None else "–"
    values = [f"{shown(metric, candidate.raw[metric])} → {candidate.normalized[metric]:z.2f}" for metric in HEADINGS]
    score = f"{candidate.score:.3f}"
    if candidate.score_low is not None and candidate.score_high is not None:
        score += f" ({candidate.score_low:.2f}–{candidate.score_high:.2f})"
    return [name, score, chance, *values]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
