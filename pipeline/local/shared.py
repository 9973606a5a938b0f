"""What all runs of a store share: mutexes, and the outputs of tasks that are memoized.

Mutexes are locks on files. The kernel releases them when the engine ends, however it ends.

Memoized outputs are one small JSON file for each key. A hit does not restore files that the task wrote: memoize only
tasks that compute values.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.parts.base.errors import Busy, ConfigError
from stages.parts.base.store import exclusive, write_json

LOCKS, MEMO = "locks", "memo"
"""Their folders."""
KEY: Final = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9]*")
"""Argo's rule for keys (workflow/controller/cache)."""


def hold(stack: contextlib.ExitStack, folder: Path, mutexes: Iterable[str]) -> str | None:
    """Hold *mutexes* until *stack* is closed. If one is held elsewhere, hold none and return its title. Never waits."""
    for title, file in ((f"mutex {name}", quote(name, safe="")) for name in mutexes):
        try:
            stack.enter_context(exclusive(folder / file, title, wait=False))
        except Busy:
            stack.close()
            return title
    return None


class MemoEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    template: str
    run: str
    """The run that computed it."""
    created_at: datetime
    outputs: dict[str, str]


def memo_path(folder: Path, cache: str, key: str) -> Path:
    if not KEY.fullmatch(key):
        raise ConfigError(
            f"memoize.key {key!r} must be letters, digits and '-'", hint="pass a sha256 as hex instead of the text"
        )
    return folder / cache / f"{key}.json"


def remembered(path: Path, max_age_s: float | None) -> MemoEntry | None:
    """Read the entry; None if there is none, it was created more than *max_age_s* ago, or it is damaged."""
    try:
        entry = MemoEntry.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    age_s = (datetime.now(UTC) - entry.created_at).total_seconds()
    return entry if max_age_s is None or age_s <= max_age_s else None


def remember(path: Path, *, template: str, run: str, outputs: dict[str, str]) -> None:
    write_json(path, MemoEntry(template=template, run=run, created_at=datetime.now(UTC), outputs=outputs))
