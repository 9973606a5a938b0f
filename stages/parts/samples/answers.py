"""Carries a reference's answers from one store to another, as JSON lines: each record, then its samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from stages.parts.base.errors import ConfigError, DamagedModel
from stages.parts.base.store import ModelStore, write_text
from stages.parts.records.answers import KeptAnswers, all_answers, answers_paths
from stages.parts.samples.lines import read_answers


def export_answers(store: ModelStore) -> str:
    """Write all answers that are kept of a model. Raises DamagedModel if samples are not what was written."""
    texts = []
    for answers in all_answers(store):
        samples = answers_paths(store, answers.key)[1]
        read_answers(samples, answers.key)
        texts.append(f"{answers.model_dump_json()}\n{samples.read_text()}")
    return "".join(texts)


def import_answers(root: Path, text: str) -> list[KeptAnswers]:
    """Keep the answers that ``export_answers`` wrote in the store at *root*.

    Raises:
        ConfigError: the text is something else, or was changed; what precedes the mistake is kept.
    """
    imported = []
    for record, lines in _divided(text):
        try:
            answers = KeptAnswers.model_validate_json(record)
            if hashlib.sha256(lines.encode()).hexdigest() != answers.samples_sha256:
                raise ConfigError(f"the answers of {answers.variant} were changed since they were exported")
            path, samples = answers_paths(ModelStore(root, answers.model), answers.key)
            write_text(samples, lines)
            read_answers(samples, answers.key)
        except (ValidationError, DamagedModel) as error:
            raise ConfigError(
                "these are no answers of a reference", hint="write the file with: slipway samples export MODEL"
            ) from error
        answers.write(path)
        imported.append(answers)
    return imported


def _divided(text: str) -> Iterator[tuple[str, str]]:
    """Yield each record with the lines that follow it."""
    lines = text.splitlines(keepends=True) or [""]
    starts = [number for number, line in enumerate(lines) if line.startswith('{"model":')]
    if starts[:1] != [0]:
        starts.insert(0, 0)
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        yield lines[start], "".join(lines[start + 1 : end])
