"""What to measure next within a budget of time: blocks of one start per variant, until the choice is settled.

Pure functions: a schedule calls ``next_block``, measures it, and gives the evidence to ``look``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from scoring.choice import Verdict, judge
from scoring.criteria import Criteria
from scoring.estimate import Evidence

ROUNDS: Final = 2
"""Rounds of load per start: a second one shows whether the server had settled."""
LEAST_BLOCKS: Final = 2
"""Blocks that are measured whatever the budget: a single start of every server shows no noise."""
SCALE_BLOCKS: Final = 2
"""Blocks in which a reference is measured that cannot be chosen itself and only sets the scale."""


@dataclass(frozen=True)
class Plan:
    """The times are in seconds: assumed, or the means of those measured so far."""

    budget_s: float
    """Time for the whole measurement of a model."""
    start_s: float
    """Until a server answers."""
    round_s: float
    """Time of a round of load with its warm-up."""
    quality_s: float
    """Time to measure one variant's quality, which is done once."""
    side_by_side: int = 1
    """The number of servers that run at the same time: one per GPU."""
    start_together: bool = False
    """Whether all servers of a block start at the same time, even if they are loaded one after another."""
    rounds: int = ROUNDS

    def block_s(self, variants: int) -> float:
        turns = math.ceil(variants / self.side_by_side)
        return (1 if self.start_together else turns) * self.start_s + turns * self.rounds * self.round_s

    def gates_s(self, variants: int) -> float:
        """The quality of all variants."""
        return math.ceil(variants / self.side_by_side) * self.quality_s


@dataclass(frozen=True)
class Progress:
    spent_s: float
    able: tuple[str, ...]
    """The variants that passed the gates."""
    running: tuple[str, ...]
    """Those that the next block measures: of the able ones all that are not beaten, and at first the reference."""
    times: tuple[float, ...] = ()
    """When each look was, one per block (``scoring.sequential.spent``): the number of budgets that had ended, and the
    used share of the present one; 0 while the noise was not known. A larger budget leaves them as they were."""

    @property
    def beaten(self) -> tuple[str, ...]:
        return tuple(name for name in self.able if name not in self.running)


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
) -> tuple[Progress, Verdict, bool]:
    """Judge after a block of all running variants.

    Args:
        spent_s: what was spent in all; None: what the plan charges for the block.
        again: nothing was measured since the last look, but the budget or the criteria may be others.

    Returns:
        The progress, the verdict, and whether another block is to be measured: the choice is not settled, and the
        budget suffices. Variants that are worse than the first are not measured any more.
    """
    block_s = plan.block_s(len(progress.running))
    spent = progress.spent_s + block_s if spent_s is None else spent_s
    left = _suffices(plan, spent, len(progress.running), len(progress.times) + (not again))
    end_s = max(plan.budget_s, spent + block_s) if left else spent
    times = _times(progress, spent, end_s, known=evidence.speed.degrees > 0, again=again)
    verdict = judge(
        evidence, criteria, able=progress.able, beaten=progress.beaten, missing=missing, times=times, last=not left
    )
    worse = {each.other for each in verdict.comparisons if each.relation == "better"}
    scaling = len(times) < SCALE_BLOCKS
    running = tuple(name for name in progress.running if name not in worse and (scaling or name in progress.able))
    after = Progress(spent, progress.able, running, times)
    settled = all(each.relation != "open" for each in verdict.comparisons)
    return after, verdict, left and not settled


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
