"""The measurement of a model's variants within a budget of time: blocks of load, until the choice is settled.

After each block the choice is looked at, and what was measured is kept. The variants have the machine to themselves.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Final, Literal

from scoring.choice import Verdict
from scoring.names import PRODUCTION
from scoring.profile import Profile
from scoring.schedule import AskedTask, ScheduleState, TimeBudget, further_items, look, next_block
from stages.evaluate.apart import ask_elsewhere, keep_answers
from stages.evaluate.block import Block, Subjects
from stages.evaluate.load import check_lengths
from stages.evaluate.quality import check_tasks
from stages.evaluate.results import (
    MINUTE,
    UNCOMPARED,
    Conditions,
    Found,
    Result,
    choice_digest,
    existing,
    keep,
    keep_refusal,
    restore,
)
from stages.evaluate.subject import Lane, Session, Subject, lanes
from stages.evaluate.trace import load_trace
from stages.parts.base.errors import MeasurementFailed, SlipwayError
from stages.parts.base.log import say
from stages.parts.base.program import RUN_VARIABLE
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Workload
from stages.parts.endpoint.endpoint import serving_here
from stages.parts.machine.lock import alone
from stages.parts.records.evaluation import Evaluation, Schedule
from stages.parts.samples.evidence import Measured, evidence_of, gates_of_choice, losses_of, qualities

QUESTION_S: Final = 0.05
"""Seconds for an item, where they were not measured by this process."""
Ended = Literal["settled", "budget", ""]


class Blocks:
    """Measures *subjects*, the reference among them if there is one. ``run`` is called once."""

    def __init__(
        self, session: Session, subjects: Sequence[Subject], earlier: Evaluation | None, asked: Measured | None = None
    ) -> None:
        """Args: earlier: an evaluation with all looks, if the subjects were measured together before; asked: the
        answers of a reference that is not among them, because it does not fit."""
        self._session, self._subjects = session, Subjects(session, subjects, asked)
        self._number = max(subject.blocks for subject in subjects)
        self._lanes: list[Lane] = []
        self._further: dict[str, int] = {}
        """How many items the next block asks in all, of the quality tasks of which it asks more."""
        self._beside = False
        """Whether the servers of the last block stood at the same time."""
        self._began = time.monotonic()
        self._spent_before_s = 0.0
        times: tuple[float, ...] = ()
        if earlier and earlier.schedule:
            self._spent_before_s, times = earlier.schedule.spent_s, earlier.looks
        reference_first = sorted(subjects, key=lambda subject: subject is not self._subjects.reference)
        names = tuple(subject.name for subject in reference_first)
        self._progress = ScheduleState(self._spent_before_s, names, names, times=times)

    def run(self) -> None:
        """Measure until the choice is settled or the budget is spent."""
        if self._progress.times:
            # What was measured before is judged by this run's profile and budget.
            for subject in self._subjects:
                subject.refused = "" if subject is self._subjects.reference else self._subjects.refusal(subject)
            if not self._look(again=True):
                return
        with contextlib.ExitStack() as standing:
            widest = max(self._subjects, key=lambda subject: subject.session.gpu_share)
            self._lanes = lanes(standing, widest.session.serving, len(self._subjects.by_name), self._session.logs)
            for subject in self._subjects:
                standing.callback(subject.stop)
            while order := next_block(self._plan, self._progress):
                block = Block(self._subjects, self._lanes, self._number, self._further)
                self._beside = block.measure([self._subjects.by_name[name] for name in order])
                self._number += 1
                if self._subjects.lost or not self._look():
                    return

    @property
    def _spent_s(self) -> float:
        return self._spent_before_s + time.monotonic() - self._began

    @property
    def _plan(self) -> TimeBudget:
        """With the mean times measured so far; zeros before the first block, which is measured in any case."""
        ready = [seconds for subject in self._subjects for seconds in subject.ready_s]
        load = [seconds for subject in self._subjects for seconds in subject.load_s]
        return TimeBudget(
            budget_s=MINUTE * self._session.workload.budget_minutes,
            start_s=fmean(ready) if ready else 0.0,
            load_s=fmean(load) if load else 0.0,
            side_by_side=max(1, len(self._lanes)),
            start_together=self._beside,
        )

    def _look(self, *, again: bool = False) -> bool:
        """Judge, keep what was measured, and say whether another block is to be measured. *again*: nothing was measured
        since the last look."""
        loaded = {subject.name: subject for subject in self._subjects if subject.going and subject.data.samples.rounds}
        if not loaded:
            return False
        measured = {name: subject.measured() for name, subject in loaded.items()} | self._subjects.asked
        profile = self._session.profile
        gates = gates_of_choice(measured, profile)
        evidence = evidence_of(measured, profile.reference_variant, profile)
        names = [name for name in evidence.variants if name != PRODUCTION]
        able = tuple(name for name in names if gates[name].verdict == "pass")
        unclear = {name: gates[name].more_items for name in names if gates[name].verdict == "unclear"}
        if not able:
            self._keep(loaded, "settled", "no variant is within the profile's limits", self._spent_s)
            return False
        running = tuple(name for name in self._progress.running if name in loaded)
        failed = [subject.name for subject in self._subjects if subject.failure]
        progress = replace(self._progress, able=able, unclear=unclear, running=running)
        judged = look(self._plan, progress, evidence, profile, failed, spent_s=self._spent_s, again=again)
        self._progress, verdict = judged.progress, judged.verdict
        self._further = self._further_items(verdict, measured) if judged.goes_on and judged.wants_items else {}
        for name in running:
            loaded[name].looks = len(self._progress.times)
        sentence, spent_s = in_words(verdict), self._spent_s
        ended: Ended = "" if judged.goes_on else "budget" if verdict.open_comparisons else "settled"
        # Kept before it is printed: an interruption then loses nothing.
        self._keep(loaded, ended, sentence, spent_s)
        minutes = f"{spent_s / MINUTE:.1f} of {self._session.workload.budget_minutes:g} minutes"
        say(f"after block {self._number}, {minutes}: {sentence}")
        return judged.goes_on

    def _further_items(self, verdict: Verdict, measured: Mapping[str, Measured]) -> dict[str, int]:
        """How many items the next block asks in all, of the tasks of which more tell most about the closest lead that
        is open, or are wanted by gates that are unclear."""
        profile, plan = self._session.profile, self._plan
        closest = min(verdict.open_comparisons, key=lambda comparison: abs(comparison.lead))
        names = (verdict.ranking[0], closest.other)
        first = self._subjects.by_name[names[0]]
        samples = {name: results.samples for name, results in measured.items()}
        losses = losses_of(samples, profile.reference_variant, profile.task_loss)
        judged = [losses.get(name, {}) for name in self._progress.unclear]
        if closest is verdict.standing:
            judged.append(losses_of(samples, PRODUCTION, profile.task_loss)[verdict.chosen])
        gate_factors: dict[str, float] = {}
        for task, loss in (each for by_task in judged for each in by_task.items()):
            if loss.verdict == "unclear":
                gate_factors[task] = max(gate_factors.get(task, 0.0), loss.more_items)
        # Tasks whose items count by the numbers that were asked can't be asked in parts.
        exhausted = {item.task for results in samples.values() for item in results.items if item.weight != 1}
        for results in self._subjects.asked.values():
            exhausted |= {item.task for item in results.samples.items}
        for name in self._progress.running:
            exhausted |= self._subjects.by_name[name].exhausted
        counts = {score.task: score.items for score in first.data.quality}
        tasks = {
            task: AskedTask(
                items=counts[task],
                left=0 if task in exhausted or not self._session.workload.quality_limit else counts[task],
                seconds=counts[task] * first.question_s.get(task, QUESTION_S),
                variance=quality.difference_variance(0, 1),
                wanted=gate_factors.get(task, 1.0),
            )
            for task, quality in qualities({name: samples[name] for name in names}).items()
        }
        extra = further_items(tasks, (plan.start_s + plan.load_s) / 2)
        return {task: counts[task] + count for task, count in extra.items()}

    def _keep(self, loaded: Mapping[str, Subject], ended: Ended, sentence: str, spent_s: float) -> None:
        if not any(subject.measured_now for subject in loaded.values()):
            return  # nothing was measured since it was kept
        schedule = Schedule(
            variants=tuple(loaded),
            profile=choice_digest(self._session.profile),
            budget_s=self._plan.budget_s,
            spent_s=round(spent_s, 3),
            ended=ended,
            said=sentence,
        )
        for subject in loaded.values():
            keep(subject, self._progress.times[: subject.looks], schedule)
        if self._subjects.reference and not self._session.profile.requalifies:
            keep_answers(self._subjects.reference)


def in_words(verdict: Verdict) -> str:
    """Say in one sentence how a look ended."""
    first, *rivals = verdict.ranking
    if verdict.outcome == "equivalent":
        return f"equivalent within the margins; {verdict.chosen} takes the least"
    if not (open_ones := [comparison for comparison in verdict.comparisons if comparison.relation == "open"]):
        return f"{first} is better than {', '.join(rivals)}" if rivals else f"only {first} can be chosen"
    closest = min(open_ones, key=lambda comparison: comparison.lead)
    if closest.low is None or closest.high is None:
        return f"{first} is first; one start of each server does not show how much chance there is in it"
    return (
        f"{first} leads {closest.other} by {closest.lead:.3f}, which may be chance ({closest.low:+.3f} to "
        f"{closest.high:+.3f})"
    )


def measure(
    store: ModelStore, conditions: Mapping[str, Conditions], workload: Workload, serving: Serving, profile: Profile
) -> dict[str, Found]:
    """Measure the variants, continuing what the store holds of them under the same conditions. Raise ConfigError if the
    workload cannot be measured; this is found before anything is started."""
    include_defaults = check_tasks(workload)
    first = store.optimized(next(iter(conditions)))
    trace = load_trace(workload.trace, first, workload.seed) if workload.trace else None
    check_lengths(first, workload, serving, trace)
    with alone(f"evaluate {', '.join(conditions)} of {store.model}"):
        run_id = os.environ.get(RUN_VARIABLE)
        # Outside a run, a folder that stays after a failure.
        logs = store.run(run_id) / "logs" if run_id else Path(tempfile.mkdtemp(prefix="slipway-evaluate-"))
        logs.mkdir(parents=True, exist_ok=True)
        beside = tuple(endpoint.model for endpoint in serving_here(store.root))
        for model in beside:
            say(f"note: {model} is being served on this machine and shares it with this measurement")
        session = Session(store, workload, serving, profile, trace, include_defaults, beside, logs)
        subjects = [
            Subject(name, store.optimized(name), conditions[name], session.of_candidate(name)) for name in conditions
        ]
        earlier, asked = restore(store, subjects), ask_elsewhere(session) if serving.reference else None
        Blocks(session, subjects, earlier, asked).run()
    if not run_id and not any(subject.failure for subject in subjects):
        shutil.rmtree(logs)
    return {subject.name: (result(subject), subject.measured_now) for subject in subjects}


def result(subject: Subject) -> Result | SlipwayError:
    """Return what became of a variant, and write it down if it was refused."""
    if subject.failure:
        return subject.failure
    if subject.refused:
        return keep_refusal(subject)
    evaluation = existing(subject.session.store, subject.name, subject.conditions.key)
    return evaluation or MeasurementFailed(UNCOMPARED)
