"""How often the choice is right, by simulation with known truth through the functions that choose.

    make bench-choice

Every simulated run is one model with its variants, measured by the default settings in blocks within their budget.
Each block is charged the start of its servers and their load, the search for the capacity included, and each variant
its quality. What is drawn is what a schedule measures: the times of the same requests to every variant, the rates of
rounds, the answers to the same items.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import fmean
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks import capacity
from benchmarks.truths import (
    ASKED,
    AT_MARGIN,
    CLUSTERED,
    CRITERIA,
    IDENTICAL,
    LEADS,
    LOST,
    MEMORY,
    MORE_FLIPS,
    NATS_PER_BYTE,
    NOISES,
    NOISY,
    ONE_TASK,
    REVISIONS,
    SLOW,
    TASKS,
    TWELVE,
    UNTIDY,
    Case,
    SimulatedTask,
    StartNoise,
    lossy,
    rivals,
)
from pipeline.settings.config import load
from scoring.arrays import Floats
from scoring.choice import Verdict
from scoring.estimate import Estimate, Evidence, Shown
from scoring.items import Items
from scoring.losses import Quality, TaskLoss, mean_quality, task_losses, task_quality
from scoring.names import PRODUCTION, REFERENCE
from scoring.schedule import AskedTask, Judged, ScheduleState, TimeBudget, further_items, look, next_block
from scoring.starts import Effects, comparable, log_means

WORKLOAD: Final = load().workload
BUDGET_S: Final = 60 * WORKLOAD.budget_minutes
START_S: Final = 60.0
QUALITY_S: Final = 270.0
"""For one variant on a GPU."""
LOAD_S: Final = (205.0, 123.0)
"""After the first start of a server and after later ones: the mean search for the capacity by ``benchmarks.capacity``,
and 48 s for the round."""
RATE_PER_S: Final = 5.0
REQUESTS: Final = round(RATE_PER_S * WORKLOAD.steady_s)
"""Requests of a round."""
DOCUMENTS: Final = 40
BYTES: Final = 4000.0
SLOWER: Final = 0.15
"""The logarithm by which a slow start is slower."""
CORRELATION: Final = 0.2
"""Between the differences of two variants in items with a common text."""
STATED: Final = (0.5, 0.65, 0.75, 0.85, 0.95, 1.001)
"""Limits of the stated probabilities that are counted together."""
Asked = tuple[tuple[str | int, ...], ...]
"""Variants, each with the number of items asked of each task."""


@dataclass(frozen=True)
class SimulatedRun:
    """A simulated measurement and what was chosen."""

    verdict: Verdict
    able: tuple[str, ...]
    unclear: tuple[str, ...]
    """Those for which the gates were still unclear in the end."""
    minutes: float
    in_full: float
    """Minutes, if every variant were asked and measured in every block."""


class Bench:
    """Draws what a schedule would measure of a case."""

    def __init__(self, case: Case, noise: StartNoise, seed: Sequence[int]) -> None:
        self.case, self.noise = case, noise
        self.random = np.random.default_rng(seed)
        self.names = tuple(case.variants)
        self.blocks: list[Floats] = []
        self.load_s: list[float] = []
        self.asked = {name: {task: each.items for task, each in TASKS.items()} for name in self.names}
        self.wanted: dict[str, int] = {}
        self.missing: list[str] = []
        self.answers = {task: self.draw_answers(number, each) for number, (task, each) in enumerate(TASKS.items())}
        self.texts = self.perplexity()
        self._tasks: dict[Asked, dict[str, Quality]] = {}
        self._losses: dict[Asked, dict[str, TaskLoss]] = {}

    def run(self) -> SimulatedRun:
        """Measure as the stage does, until the choice is settled or the budget is spent."""
        asked = {self.weights(name) for name in self.names}
        progress = self.gated(ScheduleState(QUALITY_S * len(asked), (), self.names))
        while order := next_block(self.plan, progress):
            asked_s = self.ask(order)
            spent_s = progress.spent_s + asked_s + self.measure(order)
            seen = look(self.plan, self.gated(progress), self.evidence(), CRITERIA, self.missing, spent_s=spent_s)
            progress, verdict = seen.progress, seen.verdict
            if not seen.goes_on:
                break
            self.wanted = self.further(seen) if seen.wants_items else {}
        each_s = QUALITY_S + START_S + LOAD_S[0] + (len(self.blocks) - 1) * (START_S + LOAD_S[1])
        unclear, full_s = tuple(progress.unclear), each_s * len(self.names)
        return SimulatedRun(verdict, progress.able, unclear, progress.spent_s / 60, full_s / 60)

    def weights(self, name: str) -> str:
        """Name the variant that gives the same answers and is asked in its place, maybe itself."""
        variant = self.case.variants[name]
        return name if variant.flips or any(variant.losses) or not variant.like else self.weights(variant.like)

    def gated(self, progress: ScheduleState) -> ScheduleState:
        """With what the gates show by the items asked so far; those that fail are not measured any more."""
        losses = {name: self.losses(name) for name in self.names[1:]}
        failed = {name for name, each in losses.items() if any(loss.verdict == "fail" for loss in each.values())}
        unclear = {
            name: max(loss.more_items for loss in each.values())
            for name, each in losses.items()
            if name not in failed and any(loss.verdict == "unclear" for loss in each.values())
        }
        out = {PRODUCTION, *failed, *self.missing, *([REFERENCE] if self.case.asked else [])}
        able = tuple(name for name in self.names if name not in out and name not in unclear)
        unclear = {name: times for name, times in unclear.items() if name not in out}
        running = tuple(name for name in progress.running if name == PRODUCTION or name not in out)
        return replace(progress, able=able, unclear=unclear, running=running)

    def further(self, seen: Judged) -> dict[str, int]:
        """Return how many further items of each task the next block asks."""
        first = seen.verdict.ranking[0]
        other = min(seen.verdict.open_comparisons, key=lambda each: each.lead).other
        unclear = [name for name in seen.progress.unclear if name in seen.progress.running]
        wanted: dict[str, float] = {}
        for name in unclear:
            for task, loss in self.losses(name).items():
                if loss.verdict == "unclear":
                    wanted[task] = max(wanted.get(task, 1.0), loss.more_items)
        for task, loss in self.losses(first, PRODUCTION).items() if other == PRODUCTION else ():
            if loss.verdict == "unclear":
                wanted[task] = max(wanted.get(task, 1.0), loss.more_items)
        tasks = self.tasks((first, other))
        asked = {
            task: AskedTask(
                self.asked[first][task],
                0 if self.case.asked else each.most - self.asked[first][task],
                each.seconds * self.asked[first][task] / each.items,
                tasks[task].difference_variance(0, 1),
                wanted.get(task, 1.0),
            )
            for task, each in TASKS.items()
        }
        return further_items(asked, (START_S + LOAD_S[1]) / 2)

    def ask(self, order: Sequence[str]) -> float:
        """Ask the further items that are wanted, within what there are; return the seconds."""
        seconds = 0.0
        for name in order:
            for task, count in self.wanted.items():
                more = min(count, TASKS[task].most - self.asked[name][task])
                self.asked[name][task] += more
                seconds += more * TASKS[task].seconds / TASKS[task].items
        return seconds

    @property
    def plan(self) -> TimeBudget:
        """With the mean times measured so far."""
        return TimeBudget(BUDGET_S * self.case.budgets, START_S, fmean(self.load_s) if self.load_s else 0.0)

    def evidence(self) -> Evidence:
        """Return what is known of all variants that were started beside the reference."""
        blocks = np.array(self.blocks)
        asked = (REFERENCE,) if self.case.asked else ()
        places = comparable(blocks, len(asked))
        names = tuple(self.names[place] for place in places)
        quality = mean_quality(list(self.tasks((*names, *asked)).values()))
        memory = np.array([MEMORY * self.case.variants[name].memory for name in names])
        standing = {name: self.standing(name) for name in names if PRODUCTION in names}
        return Evidence(names, quality, Effects(blocks[:, places]), memory, asked="".join(asked), standing=standing)

    def standing(self, name: str) -> Shown:
        """Return whether a variant passes the gates against what is in production, as the product judges it."""
        verdicts = {loss.verdict for loss in self.losses(name, PRODUCTION).values()}
        return "fail" if "fail" in verdicts else "unclear" if "unclear" in verdicts else "pass"

    def losses(self, name: str, reference: str = REFERENCE) -> dict[str, TaskLoss]:
        """Return what a variant loses on each task, by the items asked so far."""
        by = self._asked((reference, name))
        if by not in self._losses:
            self._losses[by] = task_losses(self.tasks((reference, name)), 1, 0, CRITERIA.task_loss)
        return self._losses[by]

    def tasks(self, names: Sequence[str]) -> dict[str, Quality]:
        """Return the quality of these variants on each task, by the items asked so far."""
        by = self._asked(names)
        if by not in self._tasks:
            found = {task: task_quality([self._items(name, task) for name in names]) for task in TASKS}
            self._tasks[by] = {**found, "perplexity": self.texts.of([self.names.index(name) for name in names])}
        return self._tasks[by]

    def _asked(self, names: Sequence[str]) -> Asked:
        """By what the quality of these variants is computed, which seldom changes from one look to the next."""
        return tuple((name, *self.asked[name].values()) for name in names)

    def _items(self, name: str, task: str) -> Items:
        count, size = self.asked[name][task], self.case.cluster
        return Items(
            self.answers[task][name][:count].astype(float), clusters=clusters(count, size) if size > 1 else None
        )

    def draw_answers(self, number: int, task: SimulatedTask) -> dict[str, npt.NDArray[np.bool_]]:
        """Draw the answers of all variants to all items that there are."""
        random, size = self.random, self.case.cluster
        # With a probability whose square is the correlation, an item is like the first of its cluster.
        like_first = (random.random(task.most) < math.sqrt(CORRELATION)) & (size > 1)
        places = np.where(like_first, np.arange(task.most) // size * size, np.arange(task.most))
        answers = {REFERENCE: (random.random(task.most) < task.accuracy)[places]}
        for name, variant in list(self.case.variants.items())[1:]:
            assert variant.like  # noqa: S101 - only the reference is like no other
            model = answers[variant.like]
            lost = (variant.flips / 2 + variant.losses[number] * task.accuracy) / task.accuracy
            gained = variant.flips / 2 / (1 - task.accuracy)
            chance = random.random(task.most)[places]
            answers[name] = model ^ (chance < np.where(model, lost, gained))
        return answers

    def perplexity(self) -> Quality:
        sizes = np.full(DOCUMENTS, BYTES)
        nats = {REFERENCE: -NATS_PER_BYTE * (1 + 0.3 * self.random.standard_normal(DOCUMENTS))}
        for name, variant in list(self.case.variants.items())[1:]:
            assert variant.like  # noqa: S101
            apart = math.sqrt(variant.flips) * 0.05 * self.random.standard_normal(DOCUMENTS)
            nats[name] = nats[variant.like] + math.log1p(-variant.losses[-1]) + apart
        return task_quality([Items(nats[name] * sizes, sizes=sizes) for name in self.names])

    def measure(self, running: Sequence[str]) -> float:
        """Measure a block: the running variants in their order, on a machine that drifts.

        Returns:
            Its seconds.
        """
        noise, random = self.noise, self.random
        drift = noise.machine * random.standard_normal()
        prompts = 0.5 * random.standard_normal(REQUESTS)
        logs, times = np.full((len(self.names), 2), np.nan), np.empty((len(running), REQUESTS))
        places = [self.names.index(name) for name in running]
        for row, name in enumerate(running):
            drift += noise.machine / 5 * random.standard_normal()
            variant = self.case.variants[name]
            slower = drift + variant.noise * noise.starts * random.standard_normal() - math.log(variant.speed)
            slower += SLOWER * (random.random() < noise.slow)
            slower += noise.rounds * random.standard_normal()
            times[row] = 1000 * np.exp(slower + prompts + noise.requests * random.standard_normal(REQUESTS))
            logs[places[row], 1] = math.log(500) - slower
        logs[places, 0] = log_means(times)
        lost = [name for name in running if name != REFERENCE and random.random() < self.case.lost]
        logs[[self.names.index(name) for name in lost]] = np.nan
        self.missing += [] if self.blocks else lost
        load_s = LOAD_S[1 if self.blocks else 0]
        self.load_s += [load_s] * len(running)
        self.blocks.append(logs)
        return len(running) * (START_S + load_s)


@cache
def clusters(count: int, size: int) -> tuple[str, ...]:
    """Return the cluster of each of *count* items, of which each cluster has *size*."""
    return tuple(str(place // size) for place in range(count))


@dataclass(frozen=True)
class OutcomeShares:
    """Shares of the runs of a case."""

    right: float
    """Decided for a variant that is right."""
    equivalent: float
    unresolved: float
    wrong: float
    """Decided for another, or between equal ones."""
    served: float
    """A right variant was chosen, whatever the outcome."""
    excluded: float
    """A variant did not pass the gates."""
    minutes: float
    in_full: float


def tally(case: Case, noise: StartNoise, runs: int) -> OutcomeShares:
    made = [Bench(case, noise, [number, *case.name.encode()]).run() for number in range(runs)]
    right = case.right()
    counts = Counter(each.verdict.outcome for each in made)
    decided = [each.verdict.chosen for each in made if each.verdict.outcome == "decided"]
    good = 0 if case.equal else sum(name in right for name in decided)
    return OutcomeShares(
        right=good / runs,
        equivalent=counts["equivalent"] / runs,
        unresolved=counts["unresolved"] / runs,
        wrong=(len(decided) - good) / runs,
        served=sum(each.verdict.chosen in right for each in made) / runs,
        excluded=sum(len(each.able) < len(case.variants) - case.asked for each in made) / runs,
        minutes=sum(each.minutes for each in made) / runs,
        in_full=sum(each.in_full for each in made) / runs,
    )


def stated(runs: int, noises: Sequence[StartNoise] = NOISES[:-1]) -> list[tuple[float, bool]]:
    """For random truths, the stated probability of the first of the ranking to be the best, and whether it is.

    The second variant's speed is up to a fifth higher or lower, and one of the two loses up to 1.5 % of quality. At the
    highest level of noise, the estimates would be further apart than these truths can be.
    """
    found = []
    for number in range(runs):
        random = np.random.default_rng([number, *b"truth"])
        speed, loss = math.exp(random.uniform(-0.2, 0.2)), random.uniform(0, 0.015)
        case = rivals("random", speed=speed, losses=lossy(loss))
        run = Bench(case, noises[number % len(noises)], [number, *b"stated"]).run()
        first, chances = run.verdict.ranking[0], run.verdict.chances
        if len(run.able) == len(case.variants) and chances:
            found.append((chances[first], first == case.best(run.able)))
    return found


def replicated(found: Sequence[tuple[float, bool]], low: float, high: float) -> tuple[int, float, float]:
    """Count the statements of a probability between *low* and *high*, with their mean and the share that is true."""
    within = [each for each in found if low <= each[0] < high]
    if not within:
        return 0, math.nan, math.nan
    return len(within), float(np.mean([each[0] for each in within])), float(np.mean([each[1] for each in within]))


def reversals(cases: int) -> int:
    """In how many random cases a third variant, measured beside two, changes the order of these two.

    Quality, speed and memory of the three are drawn around the reference's, in three blocks. Some metrics are equal,
    and in a tenth of the cases all of them.
    """
    random, names, found = np.random.default_rng([0, *b"reversals"]), (REFERENCE, "a", "b", "c"), 0
    for _ in range(cases):
        quality = math.log(0.7) + np.append(0, 0.03 * random.standard_normal(3))
        memory = MEMORY * np.exp(np.append(0, 0.5 * random.standard_normal(3)))
        speed = np.concatenate([np.zeros((1, 2)), 0.4 * random.standard_normal((3, 2))])
        same = random.random(4) < random.choice([0.2, 1.0], p=[0.9, 0.1])
        for each, values in zip(same, (quality, memory, speed[:, 0], speed[:, 1]), strict=True):
            values[2] = values[1] if each else values[2]
        logs = speed + 0.02 * random.standard_normal((3, 4, 2)) * ~same[2:]
        orders = []
        for size in (3, 4):
            covariance = 0.01**2 * np.eye(size)
            measured = Evidence(
                names[:size], Quality(quality[:size], covariance), Effects(logs[:, :size]), memory[:size]
            )
            orders.append(Estimate(measured, CRITERIA).order(names[1:size]))
        found += [name for name in orders[1] if name in orders[0]] != orders[0]
    return found


def main() -> None:
    arguments = _arguments()
    began = time.monotonic()
    for line in table(arguments.runs, arguments.only):
        print(line, flush=True)
    for line in standings(arguments.runs, arguments.only):
        print(line, flush=True)
    if arguments.only:
        return
    print()
    for line in calibration(arguments.runs * 15):
        print(line, flush=True)
    cases = arguments.runs * 500
    print("", *capacity.table(), sep="\n")
    print(f"\na third variant changed the order of two in {reversals(cases)} of {cases:,} random cases")
    print(f"\n{arguments.runs} runs a row, {(time.monotonic() - began) / 60:.0f} minutes")


def table(runs: int, only: str = "") -> Iterator[str]:
    """Yield the rows of a Markdown table; identical variants get five times the runs, because their errors are rare.

    Args:
        only: a part of the names of the truths.
    """
    columns = ("right", "equivalent", "unresolved", "wrong", "right served", "excluded", "minutes", "in full")
    yield f"| truth | noise of a start | {' | '.join(columns)} |"
    yield "| --- " * (2 + len(columns)) + "|"
    tidy = [(case, noise) for case in (*IDENTICAL, *LEADS, *MORE_FLIPS, ONE_TASK, AT_MARGIN) for noise in NOISES]
    slow = [(IDENTICAL[-1], SLOW), (LEADS[1], SLOW)]
    untidy = [(case, noise) for case in (NOISY, CLUSTERED, LOST) for noise in UNTIDY]
    untidy += [(case, noise) for case in ASKED for noise in (NOISES[0], NOISES[2])]
    untidy += [(case, noise) for case in TWELVE for noise in (NOISES[0], NOISES[2], NOISES[3], SLOW)]
    for case, noise in [each for each in (*tidy, *slow, *untidy) if only in each[0].name]:
        found = tally(case, noise, runs * 5 if case in (*IDENTICAL, NOISY, CLUSTERED, ASKED[0]) else runs)
        shares = (found.right, found.equivalent, found.unresolved, found.wrong, found.served, found.excluded)
        minutes = f"{found.minutes:.0f} | {found.in_full:.0f}"
        yield f"| {case.name} | {noise.name} | {' | '.join(map(_percent, shares))} | {minutes} |"


def standings(runs: int, only: str = "") -> Iterator[str]:
    """Yield the rows of a table that says how often a new revision takes the place of what is in production."""
    columns = ("promoted", "equivalent", "kept: worse", "kept: too few data", "minutes")
    yield f"| the new revision is | noise of a start | {' | '.join(columns)} |"
    yield "| --- " * (2 + len(columns)) + "|"
    for case, noise in [(case, noise) for case in REVISIONS for noise in NOISES[:3] if only in case.name]:
        made = [Bench(case, noise, [number, *case.name.encode()]).run() for number in range(runs)]
        relations = Counter(each.verdict.standing.relation for each in made if each.verdict.standing)
        shares = [_percent(relations[name] / runs) for name in ("better", "equivalent", "worse", "open")]
        minutes = sum(each.minutes for each in made) / runs
        yield f"| {case.name} | {noise.name} | {' | '.join(shares)} | {minutes:.0f} |"


def calibration(runs: int) -> Iterator[str]:
    yield "| stated | statements | mean | true |"
    yield "| --- " * 4 + "|"
    found = stated(runs)
    for low, high in pairwise(STATED):
        count, mean, true = replicated(found, low, high)
        yield f"| {low:.2f}–{high:.2f} | {count} | {mean:.3f} | {true:.3f} |"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share else "–"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.choice", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200, help="simulated runs a row (default: %(default)s)")
    parser.add_argument("--only", default="", help="only the rows of truths with this in their name")
    return parser.parse_args()


if __name__ == "__main__":
    main()
