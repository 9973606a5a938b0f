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
from scoring.names import PRODUCTION

FRONT: Final = 4
"""Of more variants, the best so many, and the reference, are started a second time before the others: their noise may
show that the others can't be the best."""
LEAST_BLOCKS: Final = 2
"""Blocks that are measured whatever the budget: a single start of every server shows no noise."""
MORE_ITEMS_FROM: Final = 0.5
"""The share of a lead's variance that comes from the sampling of items above which more of them are asked: they cost
seconds beside another start of every server."""
SCALE_BLOCKS: Final = 2
"""Blocks in which a reference is measured that cannot be chosen itself and only sets the scale."""


@dataclass(frozen=True)
class TimeBudget:
    """The times are in seconds: assumed, or the means of those measured so far."""

    budget_s: float
    """Time for the whole measurement of a model."""
    start_s: float
    """Until a server answers."""
    load_s: float
    """Time of the load after a start."""
    side_by_side: int = 1
    """The number of servers that run at the same time: one per GPU."""
    start_together: bool = False
    """Whether all servers of a block start at the same time, even if they are loaded one after another."""

    def block_s(self, variants: int) -> float:
        turns = math.ceil(variants / self.side_by_side)
        return (1 if self.start_together else turns) * self.start_s + turns * self.load_s


@dataclass(frozen=True)
class ScheduleState:
    spent_s: float
    able: tuple[str, ...]
    """The variants that passed the gates."""
    running: tuple[str, ...]
    """Those that further blocks measure: able and unclear ones that are not beaten, and at first the reference."""
    front: tuple[str, ...] = ()
    """Those of them that the next block measures; empty if all."""
    unclear: Mapping[str, float] = field(default_factory=dict)
    """The variants that may pass the gates with more items, and how many times the present ones these are."""
    times: tuple[float, ...] = ()
    """When each look was, one per block (``scoring.sequential.spent``): the number of budgets that had ended, and the
    used share of the present one; 0 while the noise was not known. A larger budget leaves them as they were."""

    @property
    def next(self) -> tuple[str, ...]:
        """List those that the next block measures."""
        return tuple(name for name in self.running if name in self.front) or self.running

    @property
    def beaten(self) -> tuple[str, ...]:
        return tuple(name for name in (*self.able, *self.unclear) if name not in self.running)


@dataclass(frozen=True)
class Judged:
    """What a look at the choice gave."""

    progress: ScheduleState
    verdict: Verdict
    goes_on: bool
    """Whether another block is to be measured: the choice is not settled, or it is not known whether the first may take
    the place of what is in production; and the budget suffices."""
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
    """Choose how many more items to ask of each task: at most twice as many for the gates that are unclear, and then,
    twice as many at a time, those by which a second tells most.

    Args:
        tasks: by name.
        seconds: the time for what no gate wants, of one variant.
    """
    further = {
        name: min(task.left, task.items, math.ceil(min(task.wanted - 1, 1.0) * task.items))
        for name, task in tasks.items()
        if task.wanted > 1 and task.left
    }
    while True:
        left_s = seconds - sum(count * tasks[name].seconds / tasks[name].items for name, count in further.items())
        gains = {}
        for name, task in tasks.items():
            items = task.items + further.get(name, 0)
            takes_s = task.seconds * items / task.items
            if 2 * items <= task.items + task.left and takes_s <= left_s:
                gains[name] = task.variance * task.items / items / max(takes_s, 1e-9)
        if not any(gains.values()):
            return further
        best = max(gains, key=lambda name: gains[name])
        further[best] = 2 * further.get(best, 0) + tasks[best].items


def next_block(plan: TimeBudget, progress: ScheduleState) -> tuple[str, ...]:
    """Return the variants of the next block in their order, which rotates so that each is first equally often; empty if
    the remaining budget is too small."""
    looks, names = len(progress.times), progress.next
    if not _suffices(plan, progress.spent_s, len(names), looks):
        return ()
    first = looks % len(names)
    return names[first:] + names[:first]


def look(
    plan: TimeBudget,
    progress: ScheduleState,
    evidence: Evidence,
    criteria: Criteria,
    missing: Sequence[str] = (),
    *,
    spent_s: float | None = None,
    again: bool = False,
) -> Judged:
    """Judge after a block of all running variants. Variants that are worse than the first are not measured any more.

    Args:
        spent_s: what was spent in all; by default what the plan charges for the block.
        again: nothing was measured since the last look, but the budget or the criteria may be others.
    """
    block_s = plan.block_s(len(progress.next))
    spent = progress.spent_s + block_s if spent_s is None else spent_s
    goes_on = _suffices(plan, spent, len(progress.next), len(progress.times) + (not again))
    end_s = max(plan.budget_s, spent + block_s) if goes_on else spent
    times = _times(progress, spent, end_s, known=evidence.speed.degrees > 0, again=again)
    verdict = judge(
        evidence,
        criteria,
        able=progress.able,
        unclear=progress.unclear,
        beaten=progress.beaten,
        times=times,
        last=not goes_on,
    )
    worse = {comparison.other for comparison in verdict.comparisons if comparison.relation == "better"}
    unclear = [name for name in progress.unclear if name in progress.running and name not in worse]
    # The gates are losses against the reference, so that it is asked what an unclear variant is asked.
    scale = evidence.anchor or criteria.reference
    scaling = [name for name in evidence.variants if name == scale and (unclear or len(times) < SCALE_BLOCKS)]
    open_ones = verdict.open_comparisons
    scaling += [pair.other for pair in open_ones if pair.other == PRODUCTION]
    useful = {*scaling, verdict.ranking[0], *unclear, *(name for name in progress.able if name in progress.running)}
    names = dict.fromkeys((*progress.running, *evidence.variants))
    running = tuple(name for name in names if name in useful and (name in scaling or name not in worse))
    unshown = verdict.standing in open_ones and evidence.standing[verdict.chosen] == "unclear"
    wants_items = bool(unclear) or unshown or any(pair.share_by_items > MORE_ITEMS_FROM for pair in open_ones)
    front = (*scaling, *verdict.ranking[:FRONT]) if len(times) == 1 and len(running) > FRONT + len(scaling) else ()
    progress = replace(progress, spent_s=spent, running=running, front=front, times=times)
    return Judged(progress, lacking(verdict, missing), goes_on and bool(open_ones), wants_items)


def _times(progress: ScheduleState, spent_s: float, end_s: float, *, known: bool, again: bool) -> tuple[float, ...]:
    """Compute the times of all looks, this one last: they run evenly to the next whole number at the end of the budget.

    Args:
        end_s: where the budget ends; ``spent_s`` if no block follows.
        known: whether there is an estimate of the noise. Without one nothing can be decided, and so no error made.
    """
    last, goes_on = progress.times[-1] if progress.times else 0.0, end_s > spent_s
    if again:
        return (*progress.times[:-1], last if goes_on else max(1.0, math.ceil(last)))
    following = math.floor(last) + 1.0
    if not goes_on:
        return (*progress.times, following)
    since_s = progress.spent_s if last else 0.0
    share = (spent_s - since_s) / (end_s - since_s) if known else 0.0
    return (*progress.times, last + (following - last) * share)


def _suffices(plan: TimeBudget, spent_s: float, variants: int, looks: int) -> bool:
    """Return whether another block fits, or is measured in any case."""
    return looks < LEAST_BLOCKS or spent_s + plan.block_s(variants) <= plan.budget_s
