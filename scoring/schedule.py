"""What to measure next within a budget of time: blocks of one start per variant, until the choice is settled.

Pure functions: a schedule calls ``next_block``, measures it, and gives the evidence to ``look``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from scoring.choice import Verdict, judge, lacking
from scoring.criteria import Criteria
from scoring.estimate import Evidence

LEAST_BLOCKS: Final = 2
"""Blocks that are measured whatever the budget: a single start of every server shows no noise."""
MORE_ITEMS_FROM: Final = 0.5
"""The share of a lead's variance that comes from the sampling of items above which more of them are asked: they cost
seconds beside another start of every server."""
SCALE_BLOCKS: Final = 2
"""Blocks in which a reference is measured that cannot be chosen itself and only sets the scale."""


@dataclass(frozen=True)
class Plan:
    """The times are in seconds: assumed, or the means of those measured so far."""

    budget_s: float
    """Time for the whole measurement of a model."""
    start_s: float
    """Until a server answers."""
    load_s: float
    """Time of the load after a start."""
    quality_s: float
    """Time to measure one variant's quality, which is done once."""
    side_by_side: int = 1
    """The number of servers that run at the same time: one per GPU."""
    start_together: bool = False
    """Whether all servers of a block start at the same time, even if they are loaded one after another."""

    def block_s(self, variants: int) -> float:
        turns = math.ceil(variants / self.side_by_side)
        return (1 if self.start_together else turns) * self.start_s + turns * self.load_s

    def gates_s(self, variants: int) -> float:
        """The quality of all variants."""
        return math.ceil(variants / self.side_by_side) * self.quality_s


@dataclass(frozen=True)
class Progress:
    spent_s: float
    able: tuple[str, ...]
    """The variants that passed the gates."""
    running: tuple[str, ...]
    """Those that the next block measures: of the able and the unclear ones all that are not beaten, and at first the
    reference."""
    unclear: Mapping[str, float] = field(default_factory=dict)
    """The variants that may pass the gates with more items, and how many times the present ones these are."""
    times: tuple[float, ...] = ()
    """When each look was, one per block (``scoring.sequential.spent``): the number of budgets that had ended, and the
    used share of the present one; 0 while the noise was not known. A larger budget leaves them as they were."""

    @property
    def beaten(self) -> tuple[str, ...]:
        return tuple(name for name in (*self.able, *self.unclear) if name not in self.running)


@dataclass(frozen=True)
class Judged:
    """What a look at the choice gave."""

    progress: Progress
    verdict: Verdict
    goes_on: bool
    """Whether another block is to be measured: the choice is not settled, and the budget suffices."""
    wants_items: bool
    """Whether more items of the quality tasks would tell more than further starts."""


@dataclass(frozen=True)
class AskedTask:
    """What was asked of one quality task."""

    items: int
    left: int
    """Further items that there are."""
    seconds: float
    """Time for these items, of one variant."""
    variance: float
    """The variance of the difference in quality that is not settled, from these items."""
    wanted: float = 1.0
    """How many times these items would settle the gates that are unclear; infinite if no number would."""


def further_items(tasks: Mapping[str, AskedTask], seconds: float) -> dict[str, int]:
    """How many more items to ask of each task: at most twice as many for the gates that are unclear, and then, twice as
    many at a time, those by which a second tells most.

    Args:
        tasks: by name.
        seconds: the time for what no gate wants, of one variant.
    """
    more = {
        name: min(each.left, each.items, math.ceil(min(each.wanted - 1, 1.0) * each.items))
        for name, each in tasks.items()
        if each.wanted > 1 and each.left
    }
    while True:
        left_s = seconds - sum(more[name] * each.seconds / each.items for name, each in tasks.items() if name in more)
        gains = {}
        for name, each in tasks.items():
            asked = each.items + more.get(name, 0)
            takes_s = each.seconds * asked / each.items
            if 2 * asked <= each.items + each.left and takes_s <= left_s:
                gains[name] = each.variance * each.items / asked / max(takes_s, 1e-9)
        if not any(gains.values()):
            return more
        best = max(gains, key=lambda name: gains[name])
        more[best] = 2 * more.get(best, 0) + tasks[best].items


def next_block(plan: Plan, progress: Progress) -> tuple[str, ...]:
    """The variants of the next block in their order, which rotates so that each is first equally often; empty if the
    budget does not suffice for it."""
    looks = len(progress.times)
    if not _suffices(plan, progress.spent_s, len(progress.running), looks):
        return ()
    first = looks % len(progress.running)
    return progress.running[first:] + progress.running[:first]


def look(
    plan: Plan,
    progress: Progress,
    evidence: Evidence,
    criteria: Criteria,
    missing: Sequence[str] = (),
    *,
    spent_s: float | None = None,
    again: bool = False,
) -> Judged:
    """Judge after a block of all running variants. Variants that are worse than the first are not measured any more.

    Args:
        spent_s: what was spent in all; None: what the plan charges for the block.
        again: nothing was measured since the last look, but the budget or the criteria may be others.
    """
    block_s = plan.block_s(len(progress.running))
    spent = progress.spent_s + block_s if spent_s is None else spent_s
    left = _suffices(plan, spent, len(progress.running), len(progress.times) + (not again))
    end_s = max(plan.budget_s, spent + block_s) if left else spent
    times = _times(progress, spent, end_s, known=evidence.speed.degrees > 0, again=again)
    verdict = judge(
        evidence,
        criteria,
        able=progress.able,
        unclear=progress.unclear,
        beaten=progress.beaten,
        times=times,
        last=not left,
    )
    worse = {comparison.other for comparison in verdict.comparisons if comparison.relation == "better"}
    unclear = [name for name in progress.unclear if name in progress.running and name not in worse]
    # The gates are losses against the reference, so that it is asked what an unclear variant is asked.
    scaling = [
        name for name in evidence.variants if name == criteria.reference and (unclear or len(times) < SCALE_BLOCKS)
    ]
    kept = {*scaling, verdict.ranking[0], *unclear, *(name for name in progress.able if name in progress.running)}
    known = dict.fromkeys((*progress.running, *evidence.variants))
    running = tuple(name for name in known if name in kept and (name in scaling or name not in worse))
    open_ones = [comparison for comparison in verdict.comparisons if comparison.relation == "open"]
    wants_items = bool(unclear) or any(comparison.share_by_items > MORE_ITEMS_FROM for comparison in open_ones)
    after = replace(progress, spent_s=spent, running=running, times=times)
    return Judged(after, lacking(verdict, missing), left and bool(open_ones), wants_items)


def _times(progress: Progress, spent_s: float, end_s: float, *, known: bool, again: bool) -> tuple[float, ...]:
    """The times of all looks, this one last: they run evenly to the next whole number at the end of the budget.

    Args:
        end_s: where the budget ends; ``spent_s`` if no block follows.
        known: whether there is an estimate of the noise. Without one nothing can be decided, and so no error made.
    """
    before, left = progress.times[-1] if progress.times else 0.0, end_s > spent_s
    if again:
        return (*progress.times[:-1], before if left else max(1.0, math.ceil(before)))
    following = math.floor(before) + 1.0
    since_s = progress.spent_s if before else 0.0
    now = following if not left else before
    if left and known:
        now += (following - before) * (spent_s - since_s) / (end_s - since_s)
    return (*progress.times, now)


def _suffices(plan: Plan, spent_s: float, variants: int, looks: int) -> bool:
    """Whether another block fits, or is measured in any case."""
    return looks < LEAST_BLOCKS or spent_s + plan.block_s(variants) <= plan.budget_s
