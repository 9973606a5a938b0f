"""What is asked apart from the blocks: a reference that does not fit as the variants are served. By its answers, which
are kept for later, their losses are judged."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from stages.evaluate.quality import FIRST
from stages.evaluate.results import MINUTE, conditions_of
from stages.evaluate.subject import Session, Subject, lanes
from stages.parts.base.errors import ConfigError
from stages.parts.base.log import say
from stages.parts.records.acquired import ACQUIRED, Acquired
from stages.parts.records.answers import QUESTIONS, KeptAnswers, answers_key, answers_paths
from stages.parts.records.variant import read_variant
from stages.parts.samples.evidence import Measured
from stages.parts.samples.lines import Samples, read_answers, write_samples
from stages.parts.vllm.arguments import gpu_groups
from stages.parts.vllm.parsers import parser_arguments

SHARE: Final = 1 / 3
"""Of the budget, for the questions to a reference whose weights are read from the host's memory again and again."""


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
