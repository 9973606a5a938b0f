"""Memoization: the outputs of a succeeded task, kept for other runs in one small JSON file for each key.

A hit does not restore files that the task wrote: memoize only tasks that compute values.
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
"""Argo's rule for keys (workflow/controller/cache)."""


class Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str
    run: str
    """The run that computed it."""
    created_at: datetime
    outputs: dict[str, str]


def path_of(folder: Path, cache: str, key: str) -> Path:
    if not KEY.fullmatch(key):
        raise ConfigError(
            f"memoize.key {key!r} must be letters, digits and '-'", hint="pass a sha256 as hex instead of the text"
        )
    return folder / cache / f"{key}.json"


def load(path: Path, max_age_s: float | None) -> Entry | None:
    """Read the entry; None if there is none, it was created more than *max_age_s* ago, or it is damaged."""
    try:
        entry = Entry.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    age_s = (datetime.now(UTC) - entry.created_at).total_seconds()
    return entry if max_age_s is None or age_s <= max_age_s else None


def save(path: Path, *, template: str, run: str, outputs: dict[str, str]) -> None:
    write_json(path, Entry(template=template, run=run, created_at=datetime.now(UTC), outputs=outputs))
