"""The measurement of a model's variants within a budget of time: gates first, then blocks of load.

A block is one start of every server that is still of interest, each loaded with the same requests. The order rotates.
Servers run side by side where there is a lane for each, or where they have room in one, in which they then take turns;
otherwise one after another. What a variant has to pass is asked at its first start, before any load. After each block
the choice is looked at, and what was measured is kept.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final, Literal

from scoring.choice import Verdict
from scoring.schedule import AskedTask, ScheduleState, TimeBudget, further_items, look, next_block
from stages.evaluate.drift import probe
from stages.evaluate.gates import reference_of, refusal
from stages.evaluate.host_memory import no_room
from stages.evaluate.lanes import Lane, lanes
from stages.evaluate.load import described
from stages.evaluate.results import choice_digest, keep
from stages.evaluate.session import Session, say
from stages.evaluate.smaller import measure_smaller
from stages.evaluate.subject import Subject
from stages.parts.base.errors import TransientError
from stages.parts.records.evaluation import Evaluation, Schedule, Speed
from stages.parts.samples.evidence import Measured, evidence_of, gates_of, losses_of, qualities
from stages.parts.samples.lines import LoadSamples, Samples
from stages.parts.vllm.gpu_room import fewest_gpus

if TYPE_CHECKING:
    from scoring.losses import TaskLoss

MINUTE: Final = 60
QUESTION_S: Final = 0.05
"""Seconds for an item, where they were not measured by this process."""
Ended = Literal["settled", "budget", ""]


class Blocks:
    """Measures *subjects*, the reference among them if there is one. ``run`` is called once."""

    def __init__(self, session: Session, subjects: Sequence[Subject], before: Evaluation | None, logs: Path) -> None:
        """Args: before: an evaluation with all looks, if the subjects were measured together before."""
        self.session, self.subjects = session, {subject.name: subject for subject in subjects}
        self.reference = self.subjects.get(reference_of(session.profile))
        self.number = max(subject.blocks for subject in subjects)
        self.lanes: list[Lane] = []
        self.further: dict[str, int] = {}
        """How many items the next block asks in all, of the quality tasks of which it asks more."""
        self._beside = False
        self._logs = logs
        self._began = time.monotonic()
        self._spent_before_s = before.schedule.spent_s if before and before.schedule else 0.0
        self.progress = self._progress(before)

    def run(self) -> None:
        """Measure until the choice is settled or the budget is spent."""
        if self.progress.times and not self._goes_on():
            return
        with contextlib.ExitStack() as standing:
            self.lanes = lanes(standing, self.session.serving, len(self.subjects), self._logs)
            for subject in self.subjects.values():
                standing.callback(subject.stop)
            while order := next_block(self.plan, self.progress):
                self.measure([self.subjects[name] for name in order])
                if self.lost or not self.look():
                    return

    @property
    def lost(self) -> bool:
        """Whether the reference could not be measured, so that nothing can be compared with it."""
        return self.reference is not None and self.reference.failure is not None

    @property
    def spent_s(self) -> float:
        return self._spent_before_s + time.monotonic() - self._began

    @property
    def plan(self) -> TimeBudget:
        """With the mean times measured so far; zeros before the first block, which is measured in any case."""
        ready = [seconds for subject in self.subjects.values() for seconds in subject.ready_s]
        load = [seconds for subject in self.subjects.values() for seconds in subject.load_s]
        return TimeBudget(
            budget_s=MINUTE * self.session.workload.budget_minutes,
            start_s=fmean(ready) if ready else 0.0,
            load_s=fmean(load) if load else 0.0,
            quality_s=0.0,
            side_by_side=max(1, len(self.lanes)),
            start_together=self._beside,
        )

    def measure(self, order: Sequence[Subject]) -> None:
        """Measure a block. A variant whose server was lost for a reason that may pass is tried once more."""
        self._beside = beside = self.have_room(order)
        speeds, size = [], len(order) if beside else len(self.lanes)
        for start in range(0, len(order), size):
            group = order[start : start + size]
            speeds += self.wave(group)
            if again := [each for each in group if isinstance(each.failure, TransientError)]:
                for each in again:
                    say(f"block {self.number + 1}: {each.name} is tried once more: {each.failure}")
                    each.failure = None
                speeds += self.wave([each for each in group if each.going and each.blocks <= self.number])
            if self.lost:
                break
        if speeds:
            after = probe()
            for each in order:
                if each.blocks > self.number:
                    each.speeds.append((speeds[0], after))
        self.number += 1

    def have_room(self, subjects: Sequence[Subject]) -> bool:
        """Whether their servers can stand at the same time. A GPU has no such room: vLLM counts on what it finds
        free."""
        variants = [subject.conditions.variant for subject in subjects]
        return not subjects[0].conditions.hardware.gpus and not no_room(variants, self.session.serving)

    def wave(self, group: Sequence[Subject]) -> list[Speed]:
        """Start the servers, which stand side by side, ask what was not asked before, and load those that pass.

        Returns:
            The speed of the machine before the load.
        """
        with contextlib.ExitStack() as standing:
            for each in group:
                standing.callback(each.stop)
            if all(each.asked for each in group):
                self.together(group, self.stand)
                self.ask_further(group)
            else:
                self.stand_and_ask(group)
            if self.lost or not (going := [each for each in group if each.going]):
                return []
            speed = probe()
            self.load(going)
            return [speed]

    def stand_and_ask(self, group: Sequence[Subject]) -> None:
        """Ask as many at a time as there are lanes; where servers share one, the next start meanwhile."""
        size = len(self.lanes)
        parts = [group[start : start + size] for start in range(0, len(group), size)]
        for part, following in itertools.zip_longest(parts, parts[1:], fillvalue=()):
            self.together(part, self.stand)
            if new := [each for each in part if each.going and not each.asked]:
                with self.ahead(following):
                    self.ask(new)
            if self.lost:
                return

    def ask(self, new: Sequence[Subject]) -> None:
        """The gates: what takes seconds and a slice of the quality items first, then the rest of the items."""
        self.together(new, self.check)
        self.refuse(new)
        self.together([each for each in new if each.going and not each.asked], self.ask_all)
        self.refuse(new)

    def ask_further(self, group: Sequence[Subject]) -> None:
        """Ask more items, as the last look wanted."""
        if not self.further:
            return
        size = len(self.lanes)
        for start in range(0, len(group), size):
            self.together([each for each in group[start : start + size] if each.going], self._ask_further)
        self.refuse(group)

    def _ask_further(self, subject: Subject, _: int) -> None:
        with subject.turn():
            subject.ask_further(self.further, self.session.workload, include_defaults=self.session.include_defaults)
            counts = [f"{each.items} items of {each.task}" for each in subject.quality if each.task in self.further]
            say(f"quality of {subject.name}: {', '.join(counts)} asked in all")

    def refuse(self, subjects: Sequence[Subject]) -> None:
        """End the variants that fail a gate, against what is known of the reference."""
        for subject in subjects:
            if subject is self.reference or not subject.going or self.lost:
                continue
            subject.refused = self._refusal(subject)
            if subject.refused:
                subject.stop()
                say(f"{subject.name} is not loaded: {subject.refused}")

    def _refusal(self, subject: Subject) -> str:
        workload = self.session.workload
        reference = self.reference.measured(workload) if self.reference else None
        return refusal(subject.measured(workload), reference, self.session.profile, whole=subject.asked)

    def stand(self, subject: Subject, number: int) -> None:
        """Start the server of *subject* in the lane with this number, or its share of the only one, if it does not
        stand."""
        if not subject.standing and subject.going:
            session = self.session
            with subject.turn():
                ready_s = subject.start(
                    self.lanes[number % len(self.lanes)],
                    session.workload,
                    session.serving,
                    session.trace,
                    session.cancelled,
                )
                say(f"serving {subject.name}: ready in {ready_s:.0f} s")

    def check(self, subject: Subject, _: int) -> None:
        if subject.going:
            with subject.turn():
                subject.check(self.session.workload)
                self._ask(subject)

    def ask_all(self, subject: Subject, _: int) -> None:
        with subject.turn():
            self._ask(subject)

    def _ask(self, subject: Subject) -> None:
        subject.ask(self.session.workload, include_defaults=self.session.include_defaults)
        for score in subject.quality if subject.asked else ():
            say(f"quality of {subject.name}: {score.task} {score.value:.3f} ({score.low:.3f} to {score.high:.3f})")

    def load(self, group: Sequence[Subject]) -> None:
        """Find how much each can serve, which fixes the pace of all at first, and measure them at it."""
        session, leading = self.session, self.leading
        self.in_turns(group, lambda each: each.search(session.workload, self.number, session.trace, leading.loaded))
        if self.lost or not (found := [each for each in group if each.going]):
            return
        pace = (self.leading if self.leading in found else found[0]).loading.pace
        self.in_turns(found, lambda each: each.measure(pace))
        for each in found:
            if each.going:
                say(f"load of {each.name}: block {self.number + 1}, {described(each.loading.found)}")
        trace = session.trace
        if trace and len(trace.requests) < pace.requests:
            say(f"note: the trace's {len(trace.requests)} requests were repeated: prompts may be cached")

    def in_turns(self, group: Sequence[Subject], phase: Callable[[Subject], Iterator[LoadSamples]]) -> None:
        """Run by run in turns, so that what slows the machine for a while slows all of them; at the same time in lanes
        of their own."""
        if len(self.lanes) > 1:
            self.together(group, lambda each, _: self._turns([(each, phase(each))]))
        else:
            self._turns([(each, phase(each)) for each in group])

    def _turns(self, runs: Sequence[tuple[Subject, Iterator[LoadSamples]]]) -> None:
        while runs:
            runs = [run for run in runs if self._run(*run)][::-1]

    def _run(self, subject: Subject, runs: Iterator[LoadSamples]) -> bool:
        """Whether there was another run."""
        with subject.turn():
            return next(runs, None) is not None
        return False

    @property
    def leading(self) -> Subject:
        """The variant whose capacity fixes the rate for all: the reference, or without one the first that is loaded."""
        rest = (subject for subject in self.subjects.values() if subject.going)
        return (
            self.reference
            or next((subject for subject in self.subjects.values() if subject.rounds), None)
            or next(rest)
        )

    def together(self, group: Sequence[Subject], act: Callable[[Subject, int], None]) -> None:
        """Do something with each, side by side if there are several; *act* also gets the number of the lane."""
        if len(group) < 2:
            for each in group:
                act(each, 0)
            return
        with ThreadPoolExecutor(len(group)) as pool:
            self._wait(pool.submit(act, each, number) for number, each in enumerate(group))

    @contextlib.contextmanager
    def ahead(self, following: Sequence[Subject]) -> Iterator[None]:
        """Start the servers of *following* during the block."""
        with ThreadPoolExecutor(1) as pool:
            starting: list[Future[None]] = []
            try:
                starting += [pool.submit(self.stand, each, 0) for each in following if each.going]
                yield
            except BaseException:
                self.session.cancelled.set()
                raise
            self._wait(starting)

    def _wait(self, running: Iterable[Future[None]]) -> None:
        """Until all have ended. An interruption reaches only this thread, so it ends what the others wait for."""
        try:
            for each in list(running):
                each.result()
        except BaseException:
            self.session.cancelled.set()
            for subject in self.subjects.values():
                subject.stop()
            raise

    def look(self, *, again: bool = False) -> bool:
        """Judge, keep what was measured, and say whether another block is to be measured.

        Args:
            again: nothing was measured since the last look.
        """
        gone = {name: each for name, each in self.subjects.items() if each.going and each.rounds}
        measured = {name: each.measured(self.session.workload) for name, each in gone.items()}
        profile = self.session.profile
        gates = gates_of(measured, profile, profile.constraints)
        evidence = evidence_of(measured, reference_of(profile))
        able = tuple(name for name in evidence.variants if gates[name].verdict == "pass")
        unclear = {name: gates[name].more_items for name in evidence.variants if gates[name].verdict == "unclear"}
        if not able:
            self._keep(gone, "settled", "no variant is within the profile's limits", self.spent_s)
            return False
        running = tuple(name for name in self.progress.running if name in gone)
        missing = [name for name, each in self.subjects.items() if each.failure]
        progress = replace(self.progress, able=able, unclear=unclear, running=running)
        seen = look(self.plan, progress, evidence, profile, missing, spent_s=self.spent_s, again=again)
        self.progress, verdict, goes_on = seen.progress, seen.verdict, seen.goes_on
        self.further = self._further(verdict, measured) if goes_on and seen.wants_items else {}
        for name in running:
            gone[name].looks = len(self.progress.times)
        said, spent_s, chosen = told(verdict), self.spent_s, gone[verdict.chosen]
        settled = all(comparison.relation != "open" for comparison in verdict.comparisons)
        ended: Ended = "" if goes_on else "settled" if settled else "budget"
        fewer = None if goes_on or chosen.smaller else fewest_gpus(chosen.directory, self.session.serving)
        # Kept before it is said, and before more is measured: an interruption after that loses nothing of it.
        self._keep(gone, "" if fewer else ended, said, spent_s)
        say(f"after block {self.number}, {spent_s / MINUTE:.1f} of {self.plan.budget_s / MINUTE:g} minutes: {said}")
        if fewer:
            left_s, load = self.plan.budget_s - self.spent_s, self.leading.loaded
            measure_smaller(self.session, chosen, fewer, load, left_s=left_s, given=self.lanes, logs=self._logs)
            self._keep(gone, ended, said, spent_s)
        return goes_on

    def _further(self, verdict: Verdict, measured: Mapping[str, Measured]) -> dict[str, int]:
        """How many items the next block asks in all, of the tasks of which more tell most about the closest lead that
        is open, or are wanted by gates that are unclear."""
        profile, plan = self.session.profile, self.plan
        running = [self.subjects[name] for name in self.progress.running]
        open_ones = [comparison for comparison in verdict.comparisons if comparison.relation == "open"]
        closest = min(open_ones, key=lambda each: abs(each.lead))
        names = (verdict.ranking[0], closest.other)
        tasks = qualities({name: measured[name].samples for name in names})
        samples = {name: each.samples for name, each in measured.items()}
        losses = losses_of(samples, reference_of(profile), profile.task_loss)
        exhausted = set[str]().union(*(each.exhausted for each in running), self._divided(samples))
        counts = {each.task: each.items for each in self.subjects[names[0]].quality}
        asked = {
            task: AskedTask(
                items=counts[task],
                left=0 if task in exhausted or not self.session.workload.quality_limit else counts[task],
                seconds=counts[task] * self.subjects[names[0]].question_s.get(task, QUESTION_S),
                variance=quality.difference_variance(0, 1),
                wanted=max(
                    (losses[name][task].more_items for name in self.progress.unclear if _unclear(losses, name, task)),
                    default=1.0,
                ),
            )
            for task, quality in tasks.items()
        }
        more = further_items(asked, (plan.start_s + plan.load_s) / 2)
        return {task: counts[task] + count for task, count in more.items()}

    def _divided(self, samples: Mapping[str, Samples]) -> set[str]:
        """The tasks whose items count by numbers that were asked: they can't be asked in parts."""
        return {item.task for sample in samples.values() for item in sample.items if item.weight != 1}

    def _keep(self, gone: Mapping[str, Subject], ended: Ended, said: str, spent_s: float) -> None:
        plan = self.plan
        schedule = Schedule(
            variants=tuple(gone),
            profile=choice_digest(self.session.profile),
            budget_s=plan.budget_s,
            spent_s=round(spent_s, 3),
            ended=ended,
            said=said,
        )
        # Otherwise nothing was measured since it was kept.
        for each in gone.values() if any(each.measured_now for each in gone.values()) else ():
            keep(self.session, each, self.progress.times[: each.looks], schedule)

    def _progress(self, before: Evaluation | None) -> ScheduleState:
        names = tuple(sorted(self.subjects, key=lambda name: self.subjects[name] is not self.reference))
        if before is None or before.schedule is None:
            return ScheduleState(0.0, names, names)
        return ScheduleState(before.schedule.spent_s, names, names, times=before.looks)

    def _goes_on(self) -> bool:
        """Look at what was measured before, by this run's profile and budget."""
        for subject in self.subjects.values():
            subject.refused = "" if subject is self.reference else self._refusal(subject)
        return self.look(again=True)


def _unclear(losses: Mapping[str, Mapping[str, TaskLoss]], name: str, task: str) -> bool:
    return task in losses.get(name, {}) and losses[name][task].verdict == "unclear"


def told(verdict: Verdict) -> str:
    """The outcome of a look, in one sentence."""
    first, *others = verdict.ranking
    if verdict.outcome == "equivalent":
        return f"equivalent within the margins; {verdict.chosen} takes the least"
    if not (open_ones := [comparison for comparison in verdict.comparisons if comparison.relation == "open"]):
        return f"{first} is better than {', '.join(others)}" if others else f"only {first} can be chosen"
    closest = min(open_ones, key=lambda each: each.lead)
    if closest.low == -math.inf:
        return f"{first} is first; one start of each server does not show how much chance there is in it"
    return (
        f"{first} leads {closest.other} by {closest.lead:.3f}, which may be chance ({closest.low:+.3f} to "
        f"{closest.high:+.3f})"
    )
