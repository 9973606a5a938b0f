"""Memoization: the outputs of a succeeded task, kept under its key for other runs. One small JSON file per key.

A hit says nothing of the files that the task once wrote: memoize what is only a value.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.parts.base.errors import ConfigError
from stages.parts.base.store import write_json

KEY: Final = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9]*")
"""Argo's own rule (workflow/controller/cache)."""


class Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str
    run: str
    """Which run computed it."""
    created_at: datetime
    outputs: dict[str, str]


def path_of(folder: Path, cache: str, key: str) -> Path:
    """Raises: ConfigError: *key* is not one that Argo would take."""
    if not KEY.fullmatch(key):
        raise ConfigError(
            f"memoize.key {key!r} must be letters, digits and '-'", hint="pass a sha256 as hex instead of the text"
        )
    return folder / cache / f"{key}.json"


def load(path: Path, max_age_s: float | None) -> Entry | None:
    """The entry, unless there is none, it is older than *max_age_s* (counted from its creation), or damaged."""
    try:
        entry = Entry.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    age_s = (datetime.now(UTC) - entry.created_at).total_seconds()
    return entry if max_age_s is None or age_s <= max_age_s else None


def save(path: Path, *, template: str, run: str, outputs: dict[str, str]) -> None:
    """Raises: NotEnoughSpace."""
    write_json(path, Entry(template=template, run=run, created_at=datetime.now(UTC), outputs=outputs))
