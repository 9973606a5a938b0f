"""Measure variants on their servers: first the load, in rounds, on servers that have served nothing else, then quality.

If servers run side by side, only one is loaded at a time while the others wait: A B C, C B A, … The speed of the
machine is probed before and after the load.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stages.evaluate import generator, harness
from stages.evaluate.conditions import Conditions
from stages.evaluate.drift import change, probe
from stages.evaluate.load import PlannedRun, check_lengths, planned_rounds, planned_sweep
from stages.evaluate.preloaded import Preloaded
from stages.evaluate.quality import check_tasks
from stages.evaluate.room import no_room
from stages.evaluate.subject import Subject
from stages.evaluate.trace import Trace, load_trace
from stages.parts.base.errors import SlipwayError
from stages.parts.base.program import RUN_VARIABLE
from stages.parts.base.settings import Serving, Workload
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.record import serving_here
from stages.parts.machine.lock import alone
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Evaluation
from stages.parts.samples.lines import LoadSamples, write_samples

Measured = dict[str, Evaluation | SlipwayError]
T = TypeVar("T")


@dataclass(frozen=True)
class Session:
    """Everything that is the same for every variant."""

    store: ModelStore
    workload: Workload
    serving: Serving
    trace: Trace | None
    include_defaults: bool
    """Whether lm-eval's own tasks are needed."""
    beside: tuple[str, ...]
    generator: Preloaded
    harness: Preloaded


def measure(store: ModelStore, wanted: Mapping[str, Conditions], workload: Workload, serving: Serving) -> Measured:
    """Measure each variant, and write each evaluation as soon as it is complete.

    Returns:
        By variant its evaluation, or the error that ended it (then nothing was written for it).

    Raises:
        ConfigError: the workload cannot be measured; this is found before anything is started.
    """
    include_defaults = check_tasks(workload)
    directories = {name: store.optimized(name) for name in wanted}
    first = next(iter(directories.values()))
    trace = load_trace(workload.trace, first, workload.seed) if workload.trace else None
    check_lengths(first, workload, serving, trace)
    if trace and len(trace.requests) < workload.rounds * workload.requests:
        say(f"note: the trace has {len(trace.requests)} requests and is repeated: repeated prompts may be cached")
    with contextlib.ExitStack() as stack:
        stack.enter_context(alone(f"evaluate {', '.join(wanted)} of {store.model}"))
        folder = logs_folder(store)
        preloaded = (
            stack.enter_context(Preloaded(each.MODULE, folder / f"evaluate.{name}.log", each.VARIABLES))
            for name, each in (("generator", generator), ("harness", harness))
        )
        subjects = [Subject(name, directories[name], wanted[name], folder) for name in wanted]
        beside = tuple(each.model for each in serving_here(store.root))
        for model in beside:
            say(f"note: {model} is being served on this machine and shares it with this measurement")
        session = Session(store, workload, serving, trace, include_defaults, beside, *preloaded)
        measured = measure_all(session, subjects)
    if not os.environ.get(RUN_VARIABLE) and not any(each.failure for each in subjects):
        shutil.rmtree(folder)
    return measured


def measure_all(session: Session, subjects: Sequence[Subject]) -> Measured:
    """Measure at every start of every server. The groups take turns too: the order is reversed at the next start."""
    groups, restarts = grouped(session, subjects), session.workload.restarts
    found: Measured = {}
    starts = [(restart, group) for restart in range(restarts) for group in in_turn(groups, restart)]
    with contextlib.ExitStack() as standing:
        for each in subjects:
            standing.callback(each.stop)
        for (restart, group), (_, following) in itertools.zip_longest(starts, starts[1:], fillvalue=(0, [])):
            if going := [each for each in group if each.failure is None]:
                one_start(session, going, restart, following)
            if restart + 1 == restarts:
                found |= {each.name: each.failure or finish(session, each, group) for each in group}
    return found


def grouped(session: Session, subjects: Sequence[Subject]) -> list[list[Subject]]:
    """The variants whose servers run side by side: all in one group, or each alone."""
    if len(subjects) > 1 and session.workload.interleave:
        if not (why := no_room([each.conditions.variant for each in subjects], session.serving)):
            return [list(subjects)]
        say(f"note: the servers cannot run side by side ({why}); measuring one variant after the other")
    return [[each] for each in subjects]


def in_turn(each: Sequence[T], number: int) -> list[T]:
    """A B C, then C B A, so that a steady drift affects all variants equally."""
    return list(each if number % 2 == 0 else reversed(each))


def one_start(
    session: Session, group: Sequence[Subject], restart: int, following: Sequence[Subject], *, again: bool = False
) -> None:
    """Start the servers unless they stand already, measure, stop them. Those of *following* start while the quality
    tasks are asked, whose result does not depend on the machine's speed.

    If the machine drifts beyond the workload's limit, everything is repeated once on new servers, which have not cached
    the same prompts. With GPUs nothing is repeated, because only the CPU is probed.
    """
    workload, gpus = session.workload, group[0].conditions.hardware.gpus
    limit = None if gpus else workload.drift_limit
    with contextlib.ExitStack() as standing:
        for each in group:
            standing.callback(each.stop)
            stand(session, each)
        before = probe()
        rounds = in_turns(session, group, planned_rounds(workload, restart))
        after = probe()
        moved = change(before, after)
        drifted = limit is not None and moved > limit
        if drifted:
            say(f"note: the machine's speed changed by {moved:.0%} while the load was measured")
        if again or not drifted:
            sweep = in_turns(session, group, planned_sweep(workload) if restart == 0 else [])
            for each in group:
                each.rounds += rounds[each.name]
                each.sweep += sweep[each.name]
                each.speeds.append((before, after))
                each.measured_again += again
            with ahead(session, group, following):
                for each in group:
                    ask(session, each, restart)
            return
    if going := [each for each in group if each.failure is None]:
        say("measuring the load once more")
        one_start(session, going, restart, following, again=True)


def stand(session: Session, subject: Subject, cancelled: threading.Event | None = None) -> None:
    """Start the server of *subject* if it does not stand."""
    if not subject.standing and subject.failure is None:
        with subject.turn():
            ready_s = subject.start(session.workload, session.serving, session.trace, cancelled)
            say(f"serving {subject.name}: ready in {ready_s:.0f} s")


@contextlib.contextmanager
def ahead(session: Session, group: Sequence[Subject], following: Sequence[Subject]) -> Iterator[None]:
    """Start the servers of *following* during the block if they have room beside those of *group*. A GPU has none: vLLM
    counts on what it finds free."""
    others = [each for each in following if each not in group]
    if group[0].conditions.hardware.gpus or no_room(
        [each.conditions.variant for each in (*group, *others)], session.serving
    ):
        others = []
    cancelled = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        starting = [pool.submit(stand, session, each, cancelled) for each in others]
        try:
            yield
            for each in starting:
                each.result()
        except BaseException:
            cancelled.set()
            raise


def in_turns(session: Session, group: Sequence[Subject], plan: Sequence[PlannedRun]) -> dict[str, list[LoadSamples]]:
    """Measure each planned run for every variant, loading one server at a time."""
    samples: dict[str, list[LoadSamples]] = {each.name: [] for each in group}
    for number, planned in enumerate(plan):
        for each in in_turn(group, number):
            if each.failure is None:
                with each.turn():
                    found = each.load(session.generator, session.workload, planned, session.trace)
                    samples[each.name].append(found)
                    is_round = planned.phase == "round"
                    what = f"round {planned.number + 1}" if is_round else f"{planned.concurrency} at a time"
                    rate = found.output_tokens_per_s
                    say(f"load of {each.name}: {what}, {len(found.requests)} requests, {rate:.0f} tokens/s")
    return samples


def ask(session: Session, subject: Subject, restart: int) -> None:
    if subject.failure is not None:
        return
    with subject.turn(), tempfile.TemporaryDirectory(prefix="slipway-quality-") as work:
        scores = subject.measure_quality(
            session.harness, session.workload, restart, Path(work), include_defaults=session.include_defaults
        )
        for score in scores:
            say(f"quality of {subject.name}: {score.task} {score.value:.3f} ({score.low:.3f} to {score.high:.3f})")


def finish(session: Session, subject: Subject, group: Sequence[Subject]) -> Evaluation:
    """Write the samples, and only then the evaluation computed from them."""
    path = session.store.evaluation(subject.name)
    sha256 = write_samples(path.with_suffix(SAMPLES_SUFFIX), subject.conditions.key, subject.samples())
    others = tuple(each.name for each in group if each is not subject)
    evaluation = subject.evaluation(session.workload, sha256, beside=session.beside, interleaved_with=others)
    evaluation.write(path)
    return evaluation


def logs_folder(store: ModelStore) -> Path:
    """The folder for logs: in the run's folder, or outside a run a temporary folder that stays after a failure."""
    if run_id := os.environ.get(RUN_VARIABLE):
        folder = store.run(run_id) / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    return Path(tempfile.mkdtemp(prefix="slipway-evaluate-"))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
