"""The choice between variants, with one of four outcomes:

decided     the first of the ranking is better than every other, beyond chance
equivalent  the others are worse, or differ from the first by less than the margins in every metric that counts; of the
            equal ones the cheapest to run is chosen, by memory, then by speed
unresolved  there are too few data to tell; the first of the ranking is chosen
incomplete  a variant that was asked for could not be made or measured

Two variants are compared by the difference of their anchored scores (``scoring.anchored``, ``scoring.estimate``). The
tests keep to the error rate although the data are looked at after every block (``scoring.sequential``).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

from scoring.anchored import DIGITS
from scoring.criteria import Criteria
from scoring.estimate import SPEED, Estimate, Evidence, Lead, chances
from scoring.names import Outcome
from scoring.sequential import limits

Relation = Literal["better", "equivalent", "open"]
MORE_STARTS: Final = (*range(2, 13), 16, 24, 32, 48, 64)
MORE_ITEMS: Final = (1, 2, 4, 8, 16, 32)
"""The starts in all and the multiples of items that ``More`` can suggest."""


@dataclass(frozen=True)
class Comparison:
    """The first of the ranking compared with another variant."""

    other: str
    relation: Relation
    lead: float
    """The difference of their scores; where these are equal, of the sums without clipping."""
    low: float
    high: float
    """95 % interval, infinite after a single start."""
    confidence: float
    """The probability that the first is truly the better, 0.5–1."""
    share_by_items: float = 0.0
    """The share of the lead's variance that comes from the sampling of items, 0–1."""


@dataclass(frozen=True)
class More:
    """How much more measuring would settle a choice if the estimates stayed as they are."""

    starts: int
    """How often every variant's server must have started."""
    items: int
    """How many times the present items of the quality tasks; 1: these are enough."""


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    chosen: str
    ranking: tuple[str, ...]
    """The variants that can still be chosen, the best score first."""
    scores: dict[str, float]
    chances: dict[str, float]
    """The probability of each variant to be truly the best; empty after a single start."""
    comparisons: tuple[Comparison, ...]
    """The first with each other variant of the ranking, and with those that may pass the gates."""
    more: More | None = None
    """If unresolved at the last look; None if the noise is not known yet, or no reasonable amount would do."""


def judge(
    evidence: Evidence,
    criteria: Criteria,
    *,
    able: Collection[str] | None = None,
    unclear: Mapping[str, float] = MappingProxyType({}),
    beaten: Collection[str] = (),
    times: tuple[float, ...] = (1.0,),
    last: bool = True,
) -> Verdict:
    """Choose from what was measured until now.

    Args:
        able: the variants that passed the gates, by default all. The others, such as a reference, only set the scale.
        unclear: the variants that may pass the gates with more items, and how many times the present ones these are.
            They are not chosen, but nothing is settled as long as one of them may be better.
        beaten: those that an earlier look found worse than the first; they stay worse.
        times: of each look as in ``scoring.sequential.spent``, this one last; one per block.
        last: no block follows, so an unresolved choice comes with what would settle it.

    Raises:
        ValueError: no variant can be chosen, or the reference was not measured.
    """
    able = evidence.variants if able is None else able
    estimate = Estimate(evidence, criteria)
    # Those that were worse remain where the one that beat them does not pass the gates after all.
    ranking = estimate.order([name for name in able if name not in beaten]) or estimate.order(able)
    if not ranking:
        raise ValueError("no variant can be chosen")
    first = estimate.place(ranking[0])
    others = [*ranking[1:], *(name for name in sorted(unclear) if name not in beaten)]
    pairs = [_compared(estimate, first, estimate.place(name), times) for name in others]
    rivals = [ranking[0], *(pair.other for pair in pairs if pair.relation == "open")]
    equal = [name for name in _equal_to_all(estimate, rivals, times) if name in able]
    if len(rivals) > 1 and equal:
        pairs = [replace(pair, relation="equivalent") if pair.relation == "open" else pair for pair in pairs]
    outcome: Outcome = "decided" if len(rivals) == 1 else "equivalent" if equal else "unresolved"
    unsettled = rivals[1:] if outcome == "unresolved" and last else []
    return Verdict(
        outcome=outcome,
        chosen=_cheapest(estimate, equal) if outcome == "equivalent" else ranking[0],
        ranking=tuple(ranking),
        scores={name: float(estimate.scores[estimate.place(name)]) for name in ranking},
        chances=chances(estimate, sorted({*able, *unclear})),
        comparisons=tuple(pairs),
        more=_more(estimate, first, {name: unclear.get(name, 1.0) for name in unsettled}, times),
    )


def lacking(verdict: Verdict, missing: Collection[str]) -> Verdict:
    """The verdict without the variants that were asked for and could not be made or measured."""
    return replace(verdict, outcome="incomplete") if missing else verdict


def _compared(estimate: Estimate, first: int, other: int, times: tuple[float, ...]) -> Comparison:
    lead, name = estimate.lead(first, other), estimate.evidence.variants[other]
    chance, reach = lead.below(0.0), lead.reach(0.025)
    better = chance <= limits(estimate.criteria.error_rate / 2, times)[-1]
    relation: Relation = "better" if better and not _within_margins(estimate, first, other, times) else "open"
    return Comparison(
        name, relation, lead.value, lead.value - reach, lead.value + reach, max(0.5, 1 - chance), lead.share_by_items
    )


def _equal_to_all(estimate: Estimate, names: Sequence[str], times: tuple[float, ...]) -> list[str]:
    """The variants that are equivalent to each of the others: if one of them is chosen, no other is better by more than
    the margins."""
    places = [estimate.place(name) for name in names]
    return [
        estimate.evidence.variants[place]
        for place in places
        if all(_within_margins(estimate, place, other, times) for other in places if other != place)
    ]


def _within_margins(estimate: Estimate, first: int, second: int, times: tuple[float, ...]) -> bool:
    error_rate = estimate.criteria.error_rate
    return _equivalent(estimate.differences(first, second), error_rate, limits(error_rate, times)[-1])


def _equivalent(differences: Sequence[tuple[float, Lead]], error_rate: float, by_look: float) -> bool:
    """Whether every difference is shown to lie within its margin, by two one-sided tests each (Schuirmann 1987). The
    items of the quality tasks are asked once, so there is one look at them.

    Args:
        by_look: the limit for what further starts can show.
    """
    return all(
        max(each.below(-margin), 1 - each.below(margin)) <= (by_look if each.by_starts else error_rate)
        for margin, each in differences
    )


def _cheapest(estimate: Estimate, names: Sequence[str]) -> str:
    def cost(name: str) -> tuple[float, float, str]:
        place = estimate.place(name)
        return float(estimate.evidence.memory[place]), -float(estimate.ratios[place, SPEED].sum().round(DIGITS)), name

    return min(names, key=cost)


def _more(estimate: Estimate, first: int, others: Mapping[str, float], times: tuple[float, ...]) -> More | None:
    """What would settle every open comparison: within a larger budget, or for more items measured anew.

    Args:
        others: the variants, and how many times the items each needs to pass the gates.
    """
    blocks = estimate.evidence.speed.blocks
    if not others or estimate.evidence.speed.degrees < 1:
        return None

    def settled(total: int, items: int) -> bool:
        def limit(alpha: float) -> float:
            return limits(alpha, *(((*times, ended + 1.0), total - blocks) if items == 1 else ((1.0,),)))[-1]

        # One that passes the gates may turn out to be better: it is compared with the first like any other.
        return all(_settled(estimate, first, estimate.place(name), total / blocks, items, limit) for name in others)

    ended = math.ceil(times[-1])
    for items in [each for each in MORE_ITEMS if each >= max(others.values())]:
        totals = [
            each for each in (blocks, *(each for each in MORE_STARTS if each > blocks)) if each > blocks or items > 1
        ]
        if totals and settled(totals[-1], items):
            enough = bisect_left(totals, True, key=lambda total: settled(total, items))
            return More(totals[enough] - blocks, items)
    return None


def _settled(
    estimate: Estimate, first: int, other: int, starts: float, items: float, limit: Callable[[float], float]
) -> bool:
    rate, degrees = estimate.criteria.error_rate, estimate.evidence.speed.degrees * starts
    lead = estimate.lead(first, other).with_more(starts, items, degrees)
    if min(lead.below(0.0), 1 - lead.below(0.0)) <= limit(rate / 2):
        return True
    further = [(margin, each.with_more(starts, items, degrees)) for margin, each in estimate.differences(first, other)]
    return _equivalent(further, rate, limit(rate))
