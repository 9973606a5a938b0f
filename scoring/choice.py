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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Final

from scoring.anchored import DIGITS
from scoring.criteria import Criteria
from scoring.estimate import SPEED, Estimate, Evidence, Shown, chances
from scoring.lead import Lead
from scoring.names import PRODUCTION, Outcome
from scoring.results import Comparison, More, Relation
from scoring.sequential import limit

MORE_STARTS: Final = (*range(2, 13), 16, 24, 32, 48, 64)
MORE_ITEMS: Final = (1, 2, 4, 8, 16, 32)
"""The starts in all and the multiples of items that ``More`` can suggest."""


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    chosen: str
    ranking: tuple[str, ...]
    """The variants that can still be chosen, the best score first."""
    scores: dict[str, float]
    chances: dict[str, float]
    """The probability of each variant to be truly the best; there are none after a single start."""
    comparisons: tuple[Comparison, ...]
    """The first with each other variant of the ranking, and with those that may pass the gates."""
    more: More | None = None
    """What would settle it: at the last look, if it is unresolved, the noise known and the amount reasonable."""
    standing: Comparison | None = None
    """The chosen one with what is in production; None if that was not measured. better: it is worse in nothing by more
    than the margins, and its score is higher, beyond chance. not worse: the former alone, of another stack."""
    held: Mapping[str, Shown] = field(default_factory=dict)
    """Whether the chosen one is worse than what is in production by more than the margin, metric by metric."""

    @property
    def open_comparisons(self) -> list[Comparison]:
        """List the comparisons that further measuring may settle."""
        pairs = (*self.comparisons, *([self.standing] if self.standing else []))
        return [pair for pair in pairs if pair.relation == "open"]


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
    able = [name for name in (evidence.variants if able is None else able) if name != PRODUCTION]
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
        equivalent: dict[str, Relation] = {"relation": "equivalent"}
        pairs = [pair.model_copy(update=equivalent) if pair.relation == "open" else pair for pair in pairs]
    outcome: Outcome = "decided" if len(rivals) == 1 else "equivalent" if equal else "unresolved"
    unsettled = rivals[1:] if outcome == "unresolved" and last else []
    chosen = _cheapest(estimate, equal) if outcome == "equivalent" else ranking[0]
    held, standing = dict[str, Shown](), None
    if PRODUCTION in evidence.variants:
        held = _held(estimate, estimate.place(chosen), times)
        standing = _standing(estimate, estimate.place(chosen), {evidence.standing[chosen], *held.values()}, times)
    return Verdict(
        outcome=outcome,
        chosen=chosen,
        ranking=tuple(ranking),
        scores={name: float(estimate.scores[estimate.place(name)]) for name in ranking},
        chances=chances(estimate, sorted({*able, *unclear})),
        comparisons=tuple(pairs),
        more=_more(estimate, first, {name: unclear.get(name, 1.0) for name in unsettled}, times),
        standing=standing,
        held=held,
    )


def lacking(verdict: Verdict, missing: Collection[str]) -> Verdict:
    """Call the verdict incomplete if variants that were asked for could not be made or measured."""
    return replace(verdict, outcome="incomplete") if missing else verdict


def _held(estimate: Estimate, chosen: int, times: tuple[float, ...]) -> dict[str, Shown]:
    """Say of each metric that counts whether the chosen one is worse in it than what is in production."""
    error_rate, shown = estimate.criteria.error_rate, dict[str, Shown]()
    for name, (margin, lead) in estimate.differences(chosen, estimate.place(PRODUCTION)).items():
        allowed, below = limit(error_rate, times) if lead.by_starts else error_rate, lead.below(-margin)
        shown[name] = "pass" if below <= allowed else "fail" if 1 - below <= allowed else "unclear"
    return shown


def _standing(estimate: Estimate, chosen: int, shown: Collection[Shown], times: tuple[float, ...]) -> Comparison:
    """Compare the chosen one with what is in production, which stays unless all of it is shown (Berger 1982,
    Technometrics 24, 295–300)."""
    place = estimate.place(PRODUCTION)
    pair = _compared(estimate, chosen, place, times)
    relation = pair.relation
    if shown != {"pass"}:
        relation = "worse" if "fail" in shown else "open"
    elif relation == "open" and estimate.criteria.requalifies:
        relation = "not worse"
    elif relation == "open" and _within_margins(estimate, chosen, place, times):
        relation = "equivalent"
    return pair.model_copy(update={"relation": relation})


def _compared(estimate: Estimate, first: int, other: int, times: tuple[float, ...]) -> Comparison:
    lead = estimate.lead(first, other)
    chance, (low, high) = lead.below(0.0), lead.interval() or (None, None)
    better = chance <= limit(estimate.criteria.error_rate / 2, times)
    return Comparison(
        other=estimate.evidence.variants[other],
        relation="better" if better and not _within_margins(estimate, first, other, times) else "open",
        lead=lead.value,
        low=low,
        high=high,
        confidence=max(0.5, 1 - chance),
        share_by_items=lead.share_by_items,
    )


def _equal_to_all(estimate: Estimate, names: Sequence[str], times: tuple[float, ...]) -> list[str]:
    """Find the variants that are equivalent to each of the others: none is better by more than the margins."""
    places = {name: estimate.place(name) for name in names}
    return [
        name
        for name, place in places.items()
        if all(_within_margins(estimate, place, other, times) for other in places.values() if other != place)
    ]


def _within_margins(estimate: Estimate, first: int, second: int, times: tuple[float, ...]) -> bool:
    error_rate = estimate.criteria.error_rate
    return _equivalent(estimate.differences(first, second).values(), error_rate, limit(error_rate, times))


def _equivalent(differences: Iterable[tuple[float, Lead]], error_rate: float, by_look: float) -> bool:
    """Return whether every difference is shown to lie within its margin, by two one-sided tests each (Schuirmann 1987).
    The items of the quality tasks are asked once, so there is one look at them. *by_look*: the limit for what further
    starts can show."""
    return all(
        max(lead.below(-margin), 1 - lead.below(margin)) <= (by_look if lead.by_starts else error_rate)
        for margin, lead in differences
    )


def _cheapest(estimate: Estimate, names: Sequence[str]) -> str:
    def cost(name: str) -> tuple[float, float, str]:
        place = estimate.place(name)
        return float(estimate.evidence.memory[place]), -float(estimate.ratios[place, SPEED].sum().round(DIGITS)), name

    return min(names, key=cost)


def _more(estimate: Estimate, first: int, others: Mapping[str, float], times: tuple[float, ...]) -> More | None:
    """Find what would settle every open comparison: more starts within a larger budget, or all anew with more items.
    *others*: the variants, and how many times the items each needs to pass the gates."""
    speed, ended = estimate.evidence.speed, math.ceil(times[-1])
    if not others or speed.degrees < 1:
        return None

    def settled(starts: int, items: int) -> bool:
        """Return whether that many starts in all, and that many times the items, would settle every comparison."""

        # A larger budget is one more look at growing data; with other items, nothing was looked at before.
        looks, step = ((*times, ended + 1.0), starts - speed.blocks) if items == 1 else ((1.0,), 1)
        by_look = partial(limit, times=looks, step=step)
        # One that passes the gates may turn out to be better: it is compared with the first like any other.
        return all(_settled(estimate, (first, estimate.place(name)), starts, items, by_look) for name in others)

    for items in MORE_ITEMS:
        if items < max(others.values()):
            continue
        totals = [*([speed.blocks] if items > 1 else []), *(total for total in MORE_STARTS if total > speed.blocks)]
        if totals and settled(totals[-1], items):
            enough = bisect_left(totals, True, key=lambda total: settled(total, items))
            return More(starts=totals[enough] - speed.blocks, items=items)
    return None


def _settled(
    estimate: Estimate, pair: tuple[int, int], starts: int, items: int, by_look: Callable[[float], float]
) -> bool:
    """Return whether a pair would be decided or equivalent, if the estimates stayed as they are. *by_look*: the p-value
    at which a test with an error rate is decided."""
    speed, rate = estimate.evidence.speed, estimate.criteria.error_rate
    times = starts / speed.blocks

    def then(lead: Lead) -> Lead:
        by_starts, by_items = lead.by_starts / times, lead.by_items / items
        return replace(lead, by_starts=by_starts, by_items=by_items, degrees=speed.degrees * times)

    chance = then(estimate.lead(*pair)).below(0.0)
    if min(chance, 1 - chance) <= by_look(rate / 2):
        return True
    differences = estimate.differences(*pair).values()
    return _equivalent([(margin, then(lead)) for margin, lead in differences], rate, by_look(rate))
