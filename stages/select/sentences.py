"""A decision in words: sentences that agree with its numbers, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from scoring.criteria import MARGIN_OF, Criteria
from scoring.metrics import METRICS, TITLES, odds, shown
from scoring.names import REFERENCE
from scoring.results import Change
from stages.parts.records.evaluation import grouped
from stages.parts.records.production import Production

if TYPE_CHECKING:
    from scoring.choice import Verdict


def reason_of(
    verdict: Verdict,
    criteria: Criteria,
    starts: int,
    change: Mapping[str, Change],
    missing: Sequence[str],
    excluded: Mapping[str, str],
    anchor: str = "",
) -> str:
    """Say the outcome, and why the winner was chosen.

    *starts* are those of each server, *change* the winner's metrics compared with the reference's, *missing* the
    variants because of which the decision is incomplete, and *excluded* says why, by variant. *anchor* is the variant
    with whose speed and memory the others are compared, if the reference was asked only.
    """
    unclear = [comparison.other for comparison in verdict.comparisons if comparison.other not in verdict.ranking]
    text = _settled(verdict, criteria, starts)
    if missing:
        text = f"Incomplete: {_listed(missing)} could not be made or measured. Of the others, {text}"
    if change:
        against = dict.fromkeys(METRICS, criteria.reference_variant or "the profile's values")
        if anchor:
            against |= {name: anchor for name in METRICS if name != "quality"}
        for reference, names in grouped(against).items():
            if not anchor or reference != verdict.chosen:
                text += f" Against {reference}: {', '.join(_change(name, change.get(name)) for name in names)}."
    for heading, names in (
        ("Not shown to pass the gates", unclear),
        ("Excluded", [name for name in excluded if name not in unclear]),
    ):
        if names:
            text += f" {heading}: {'; '.join(f'{name}: {excluded[name]}' for name in names)}."
    return text


def unknown_loss(criteria: Criteria, published: str) -> str:
    """Say that nothing is compared with the model as it was *published*; empty if the variants are."""
    if criteria.reference == published:
        return ""
    unknown = "16 bit" if published == REFERENCE else f"the published {published}"
    compared = criteria.reference_variant or "fixed values"
    return f"The loss against {unknown} is not known: {compared} took the place of {published}. "


def _settled(verdict: Verdict, criteria: Criteria, starts: int) -> str:
    """Say what is known of the variants that can be chosen, whether or not others are missing."""
    by_relation = {
        relation: [comparison for comparison in verdict.comparisons if comparison.relation == relation]
        for relation in ("better", "equivalent", "open")
    }
    chosen, first = verdict.chosen, verdict.ranking[0]
    if by_relation["open"]:
        rivals = _listed([pair.other for pair in by_relation["open"]])
        chance = f" with a probability of {odds(verdict.chances[first])}" if verdict.chances else ""
        return (
            f"{first} ranks first, but there are too few data to tell whether it is better than {rivals}: "
            f"it is the best{chance or ' by what was measured'}, and is chosen until more is known. "
            f"{_more(verdict, starts)}"
        )
    if by_relation["equivalent"]:
        counting = dict.fromkeys(MARGIN_OF[name] for name, share in criteria.weights.shares().items() if share)
        margins = _listed([f"{100 * getattr(criteria.margins, name):.3g}% in {name}" for name in counting])
        equal = _listed([first, *(pair.other for pair in by_relation["equivalent"])])
        worse = " Every other is worse." if by_relation["better"] else ""
        return (
            f"{equal} are equivalent: they differ by less than {margins}.{worse} "
            f"{chosen} is chosen as the cheapest to run, by memory, then by speed."
        )
    if by_relation["better"]:
        sure = odds(min(pair.confidence for pair in by_relation["better"]))
        return (
            f"{chosen} is better than {_listed([pair.other for pair in by_relation['better']])}, "
            f"with a confidence of {sure}."
        )
    alone = len(verdict.chances) < 2
    return f"{chosen} is the only variant that can be chosen." if alone else f"{chosen} is better than every other."


def _more(verdict: Verdict, starts: int) -> str:
    if verdict.more:
        wishes = [f"{verdict.more.starts} more starts of each server"] if verdict.more.starts else []
        wishes += [f"{verdict.more.items} times as many items of the quality tasks"] if verdict.more.items > 1 else []
        return f"{_listed(wishes)} would settle it."
    if starts < 2:
        return "Each server was started only once, so it is not known how much a restart changes."
    return "No reasonable amount of measuring would settle it."


def _change(metric: str, change: Change | None) -> str:
    if change is None:
        return f"{metric} not comparable"
    text = f"{metric} {change.value:+z.1%}"
    if change.low is None or change.high is None:
        return text
    return text + (" (within noise)" if change.value and change.low <= 0 <= change.high else "")


def markdown(decision: Production) -> str:
    """Write the outcome, and a row per variant by score, the winner in bold; excluded variants have their reason. It is
    an output of select and shown by Argo's UI."""
    metrics = [f"{heading} {decision.weights[name]:.0%}" for name, heading in TITLES.items()]
    rows = [["Variant", "Score", "Best with", *metrics], ["---", "---:", "---:", *["---:"] * len(metrics)]]
    for candidate in decision.candidates:
        name = f"**{candidate.variant}**" if candidate.variant == decision.winner else candidate.variant
        if candidate.excluded:
            reason = " ".join(candidate.excluded.split()).replace("|", "\\|")
            rows.append([name, f"excluded: {reason}", "–", *["–"] * len(metrics)])
        else:
            raw, counts = candidate.raw, candidate.normalized
            values = [f"{shown(metric, raw[metric])} → {counts[metric]:z.2f}" for metric in TITLES]
            rows.append([name, candidate.score_text, candidate.chance_text, *values])
    return "\n".join([f"{decision.headline}\n", *(f"| {' | '.join(cells)} |" for cells in rows)])


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
