"""A decision as a Markdown table, which is an output of select and shown by Argo's UI."""

from __future__ import annotations

from scoring.metrics import TITLES, odds, shown
from stages.parts.records.production import Candidate, Production


def markdown(decision: Production) -> str:
    """Write the outcome, and a row per variant by score, the winner in bold; excluded variants have their reason."""
    metrics = [f"{heading} {decision.weights[name]:.0%}" for name, heading in TITLES.items()]
    head = ["Variant", "Score", "Best with", *metrics]
    line = ["---", *["---:"] * (len(head) - 1)]
    rows = [head, line, *(_row(candidate, decision) for candidate in decision.candidates)]
    return "\n".join([f"{decision.headline}\n", *(f"| {' | '.join(cells)} |" for cells in rows)])


def _row(candidate: Candidate, decision: Production) -> list[str]:
    name = f"**{candidate.variant}**" if candidate.variant == decision.winner else candidate.variant
    if candidate.excluded:
        reason = " ".join(candidate.excluded.split()).replace("|", "\\|")
        return [name, f"excluded: {reason}", "–", *["–"] * len(TITLES)]
    chance = odds(candidate.chance) if candidate.chance is not None else "–"
    values = [f"{shown(metric, candidate.raw[metric])} → {candidate.normalized[metric]:z.2f}" for metric in TITLES]
    score = f"{candidate.score:.3f}"
    if candidate.score_low is not None and candidate.score_high is not None:
        score += f" ({candidate.score_low:.2f}–{candidate.score_high:.2f})"
    return [name, score, chance, *values]
