"""The history of a model's releases: every move between them, one JSON line each."""

from __future__ import annotations

import contextlib
import getpass
import os
from datetime import datetime
from typing import Any, Final, Literal

from pydantic import ValidationError

from stages.parts.base.record import Record
from stages.parts.base.store import ModelStore
from stages.parts.records.rollout import Act

HISTORY: Final = "rollouts.jsonl"
MoveKind = Literal["publish", "rollout", "rollback", "settings"]
"""publish: select moved the link while nothing was served. settings: the same release, served with other settings."""


class OneMove(Record):
    """How traffic moved, or did not move, from one release to another."""

    kind: MoveKind
    release: str
    """The release that traffic moved to, or was to move to."""
    before: str | None
    """What was in production."""
    result: Literal["promoted", "rolled back"]
    reason: str
    run: str | None = None
    decision: str = ""
    """The outcome by which the release was chosen, as it was then (``Production.headline``)."""
    started_at: datetime
    acts: tuple[Act, ...] = ()
    """Who began it, approved it or gave it up."""


class Move(OneMove):
    """One line of ``rollouts.jsonl``."""

    id: str
    """The rollout's id; a move is never written twice."""
    ended_at: datetime
    analyses: tuple[dict[str, Any], ...] = ()
    """The last analysis of each step."""


def user() -> str:
    """Name the user of the operating system."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return f"uid {os.getuid()}"


def history(store: ModelStore) -> list[Move]:
    """Read all moves, the oldest first. A line that a crash truncated is left out."""
    moves = []
    with contextlib.suppress(FileNotFoundError):
        for line in (store.path / HISTORY).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValidationError):
                moves.append(Move.model_validate_json(line))
    return moves


def remember(store: ModelStore, move: Move) -> None:
    """Append a move durably; a move that is already there is not written again."""
    if any(former.id == move.id for former in history(store)):
        return
    path = store.path / HISTORY
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
        torn = size > 0 and file.read(1) != b"\n"
        file.write((b"\n" if torn else b"") + move.model_dump_json().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
