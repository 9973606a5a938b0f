"""What is measured apart from the blocks: the answers of a reference that does not fit as the variants are served, by
which their losses are judged and which are kept for later; and the variant that leads, once more on fewer GPUs, since
all variants are measured on as many as fp16 needs, and a quantized one often fits on fewer.

The latter is started and loaded as in the blocks, with the same requests, after these have ended and on the same GPUs.
What fails there is recorded, and fails nothing else.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from stages.evaluate.load import described
from stages.evaluate.quality import FIRST
from stages.evaluate.results import conditions_of
from stages.evaluate.subject import Lane, Session, Subject, lanes
from stages.parts.base.errors import ConfigError
from stages.parts.base.log import say
from stages.parts.records.acquired import ACQUIRED, Acquired
from stages.parts.records.answers import QUESTIONS, KeptAnswers, answers_key, answers_paths
from stages.parts.records.evaluation import Smaller
from stages.parts.records.variant import read_variant
from stages.parts.samples.evidence import Measured
from stages.parts.samples.lines import LoadSamples, Samples, StartLoad, read_answers, write_samples
from stages.parts.vllm.arguments import gpu_groups
from stages.parts.vllm.parsers import parser_arguments

MINUTE: Final = 60
SHARE: Final = 1 / 3
"""Of the budget, for the questions to a reference whose weights are read from the host's memory again and again."""
STARTS: Final = 2
"""With those on more GPUs they show how much a start changes; what is to be seen is a difference of a third or more."""


def ask_elsewhere(session: Session) -> Measured:
    """Return what the reference answers that does not fit as the variants are served: as it was kept, or asked now.

    Raises:
        ConfigError: what was kept answers other questions.
        DamagedModel: the reference is not in the store.
        The errors of ``Subject``: it can't be served or asked.
    """
    store, name, serving = session.store, session.profile.reference_variant, session.serving
    session = replace(session, serving=serving.of_reference())
    parsers = parser_arguments(session.serving, store.optimized(name))
    conditions = conditions_of(read_variant(store.optimized(name)), session.workload, session.serving, parsers)
    key = answers_key(conditions.variant.base_digest, name, conditions.workload)
    record, samples = answers_paths(store, key)
    if answers := KeptAnswers.read_if_intact(record, "asking again"):
        say(f"{name} is not served: its answers are those of {answers.origin}")
        return Measured(read_answers(samples, key), 0)
    if serving.reference and serving.reference.kept:
        raise ConfigError(
            f"the answers of {name} that were kept are to other questions, or of other weights",
            hint="ask it where it fits, with this version of Slipway, and bring its answers: slipway samples export",
        )
    subject = Subject(name, store.optimized(name), conditions, session)
    with contextlib.ExitStack() as standing:
        lane = replace(lanes(standing, session.serving, 1, session.logs)[0], gpus=gpu_groups(session.serving)[0])
        standing.callback(subject.stop)
        with subject.turn():
            subject.start(lane)
            say(f"serving {name} for the questions only: ready in {subject.ready_s[-1]:.0f} s")
            subject.check()
            subject.ask()
            _ask_the_rest(subject)
    if subject.failure:
        raise subject.failure
    keep_answers(subject)
    return Measured(subject.data.samples, 0)


def _ask_the_rest(subject: Subject) -> None:
    """Ask as many items as its share of the budget allows after the first slice."""
    if subject.asked:
        return
    workload, data = subject.session.workload, subject.data
    left_s = SHARE * MINUTE * workload.budget_minutes - sum(
        score.items * subject.question_s.get(score.task, 0.0) for score in data.quality
    )
    more = int(max(0.0, left_s) / max(sum(subject.question_s.values()), 1e-9))
    if more >= (workload.quality_limit or FIRST) or any(item.weight != 1 for item in data.samples.items):
        subject.ask()
    elif more:
        subject.ask_further({score.task: score.items + more for score in data.quality})


def keep_answers(subject: Subject) -> None:
    """Keep the answers of the reference, unless as many are kept."""
    session, data, conditions = subject.session, subject.data, subject.conditions
    acquired, variant = Acquired.read(session.store.base / ACQUIRED), conditions.variant
    key = answers_key(variant.base_digest, subject.name, conditions.workload)
    record, samples = answers_paths(session.store, key)
    kept = KeptAnswers.read_if_intact(record)
    if acquired is None or data.engine is None or (kept and kept.quality == data.quality):
        return
    answered = Samples(items=data.samples.items, held_out=data.samples.held_out)
    KeptAnswers(
        model=session.store.model,
        commit=acquired.commit,
        base_digest=variant.base_digest,
        variant=subject.name,
        questions={name: conditions.workload.get(name) for name in QUESTIONS},
        quality=data.quality,
        not_asked=data.not_asked,
        engine=data.engine,
        hardware=conditions.hardware,
        tool_versions=conditions.tool_versions,
        samples_sha256=write_samples(samples, key, answered),
        asked_at=datetime.now(UTC),
    ).write(record)


def measure_smaller(subject: Subject, size: int, leading: StartLoad, *, left_s: float, running: Sequence[Lane]) -> None:
    """Measure *subject* on *size* GPUs: one start, and another one if *left_s* seconds suffice for it.

    Args:
        leading: the load of the variant that fixed the rate for all.
        running: lanes whose clients run already; if there are none, others are started.
    """
    larger = subject.session.serving
    serving = larger.model_copy(update={"tensor_parallel_size": size})
    session = replace(subject.session, serving=serving)
    smaller = Subject(f"{subject.name}-tp{size}", subject.directory, subject.conditions, session)
    title = f"{subject.name} on {size} instead of {larger.tensor_parallel_size} GPUs"
    began = time.monotonic()
    with contextlib.ExitStack() as standing:
        lane = replace((running or lanes(standing, serving, 1, session.logs))[0], gpus=gpu_groups(serving)[0])
        standing.callback(smaller.stop)
        for number in range(STARTS):
            with smaller.turn():
                smaller.start(lane)
                list(smaller.search(number, leading))
                list(smaller.measure(smaller.loading.pace))
                say(f"load of {title}: {described(smaller.loading.found)}")
            smaller.stop()
            if smaller.failure or (time.monotonic() - began) * (number + 2) / (number + 1) > left_s:
                break
    if smaller.failure:
        say(f"{title}: {smaller.failure}")
    data = smaller.data
    subject.data.smaller = Smaller(
        tensor_parallel_size=size,
        instead_of=larger.tensor_parallel_size,
        failure=str(smaller.failure or ""),
        kv_cache_tokens=data.kv_cache_tokens,
        **data.figures(session.workload),
    )
    load = StartLoad(_labelled(data.samples.rounds, size), _labelled(data.samples.trials, size))
    subject.data.samples = replace(subject.data.samples, smaller=load)
    subject.measured_now = True


def _labelled(runs: Sequence[LoadSamples], gpus: int) -> tuple[LoadSamples, ...]:
    label = {"gpus": gpus}
    return tuple(
        LoadSamples(run.run.model_copy(update=label), tuple(one.model_copy(update=label) for one in run.requests))
        for run in runs
    )
