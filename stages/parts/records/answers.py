"""``answers/<key>.json``: a reference's answers to the quality questions, which say what the other variants lose.

They are kept beside its evaluations, and can be carried to a machine on which the reference does not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from stages.parts.base.files import digest_of
from stages.parts.base.store import KEY_CHARACTERS, ModelStore, Record
from stages.parts.machine.hardware import Hardware
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Engine, TaskScore

QUESTIONS: Final = (
    *("quality_tasks", "tasks_digest", "questions_digest"),
    *("divergence_documents", "divergence_tokens", "divergence_digest", "adapters"),
)
"""The fields of an evaluation's workload that say what was asked; how much is not among them."""


class KeptAnswers(Record):
    """``answers/<key>.json``. The items and distributions are beside it, in a file as that of an evaluation."""

    model: str
    commit: str
    base_digest: str
    variant: str
    questions: dict[str, Any]
    """The fields ``QUESTIONS`` of the workload."""
    quality: tuple[TaskScore, ...]
    not_asked: dict[str, str]
    engine: Engine
    hardware: Hardware
    tool_versions: dict[str, str]
    samples_sha256: str
    asked_at: datetime

    @property
    def key(self) -> str:
        return answers_key(self.base_digest, self.variant, self.questions)

    @property
    def origin(self) -> str:
        """Say where and when they were given."""
        hardware = ", ".join(self.hardware.gpus) or f"{self.hardware.cores} × {self.hardware.cpu}"
        return f"{self.engine.name} {self.engine.version} on {hardware}, {self.asked_at:%Y-%m-%d}"


def answers_key(base_digest: str, variant: str, workload: Mapping[str, Any]) -> str:
    """Compute what answers are found by: the digests of the weights and of the questions."""
    return digest_of([base_digest, variant, {name: workload.get(name) for name in QUESTIONS}])


def answers_paths(store: ModelStore, key: str) -> tuple[Path, Path]:
    """Return the paths of the record and of its samples."""
    record = store.path / "answers" / f"{key[:KEY_CHARACTERS]}.json"
    return record, record.with_suffix(SAMPLES_SUFFIX)


def all_answers(store: ModelStore) -> Iterator[KeptAnswers]:
    """Read all answers that are kept of a model, without damaged ones."""
    for path in sorted((store.path / "answers").glob("*.json")):
        if answers := KeptAnswers.read_if_intact(path, "it does not count"):
            yield answers


def are_kept(store: ModelStore, variant: str, commit: str | None, tasks: Sequence[str]) -> bool:
    """Whether answers to these tasks are kept of a model at *commit*, or at any. The rest of the questions, and the
    weights, are compared later."""
    return any(
        (answers.variant, answers.questions.get("quality_tasks")) == (variant, list(tasks))
        for answers in all_answers(store)
        if commit in (None, answers.commit)
    )
