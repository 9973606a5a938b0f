"""``acquired.json``: the files of the base model or of a LoRA adapter, and where they come from."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Final, Self

from pydantic import Field

from scoring.names import REFERENCE
from stages.parts.base.errors import DamagedModel
from stages.parts.base.files import digest_of, sha256_of
from stages.parts.base.store import ModelStore, Record

ACQUIRED: Final = "acquired.json"
WEIGHTS: Final = (".safetensors", ".safetensors.index.json")


class File(Record):
    """One file of a model directory. ``path`` is relative, with forward slashes."""

    path: str
    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, directory: Path, path: str) -> Self:
        """Make the record of *path* in *directory*; reads the file once."""
        return cls(path=path, size_bytes=(directory / path).stat().st_size, sha256=sha256_of(directory / path))


class Acquired(Record):
    """``base/acquired.json``, or ``adapters/<name>/acquired.json``."""

    model: str
    source: str
    """The Hub's endpoint, or ``local:`` and the directory."""
    revision: str
    commit: str
    license: str | None
    """The identifier from the model card, similar to SPDX; None if the publisher names no license."""
    architecture: str
    """Of an adapter, PEFT's type."""
    parameters: int
    """Count of weights over all tensors, as many as they were before they were packed."""
    format: str = Field(default=REFERENCE, exclude_if=lambda value: value == REFERENCE)
    """That in which the publisher stores it; fp16 for 16 or 32 bit. It is the name of the reference variant."""
    files: tuple[File, ...]
    digest: str
    """``files_digest(files)``: a part of the key of every variant."""
    acquired_at: datetime

    @property
    def carried(self) -> tuple[str, ...]:
        """The files that a variant has unchanged: tokenizer, templates, license, generation config."""
        names = (file.path for file in self.files)
        return tuple(name for name in names if name != "config.json" and not name.endswith(WEIGHTS))


def format_of_base(store: ModelStore) -> str:
    """Read the format in which the model in ``base/`` was published; fp16 if there is none yet."""
    record = Acquired.read_if_intact(store.base / ACQUIRED)
    return record.format if record else REFERENCE


def read_intact(directory: Path) -> Acquired:
    """Read the record of *directory*, whose files have the sizes that it says; DamagedModel if they do not."""
    record = Acquired.read(directory / ACQUIRED)
    wrong = difference(directory, record.files) if record else f"{ACQUIRED} is missing"
    if record is None or wrong:
        raise DamagedModel(f"{directory} is damaged: {wrong}", hint="run again: it is acquired anew")
    return record


def files_digest(files: tuple[File, ...]) -> str:
    """Compute one digest of a directory's content, which does not depend on the order or the times of the files."""
    return digest_of(sorted([file.path, file.size_bytes, file.sha256] for file in files))


def difference(directory: Path, files: Iterable[File]) -> str:
    """Name the first file that is missing or has another size; empty if there is none. Reads no content."""
    for file in files:
        try:
            size = (directory / file.path).stat().st_size
        except OSError:
            return f"{file.path} is missing"
        if size != file.size_bytes:
            return f"{file.path} has {size} bytes, {file.size_bytes} were recorded"
    return ""
