"""The releases of a model as they are listed for a person, and which of them may be removed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from stages.parts.base.errors import ConfigError
from stages.parts.base.store import ModelStore, Record, exclusive
from stages.parts.model.adapter import adapters_in
from stages.parts.records.rollout import LOCK, under_way
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.releases.release import (
    METRICS,
    OneMove,
    Split,
    before,
    candidate,
    current_release,
    headline,
    history,
    numbered,
)

ReleaseState = Literal["production", "canary", "candidate", "standby", "rolled back", "kept", "earlier"]
"""kept: no client got it yet, because it was not shown to be better than what is in production."""


class MoveSummary(OneMove):
    """One move between releases, as it is listed."""

    seconds: float
    percent: int
    """The largest share of new requests that the release got."""
    analysis: dict[str, Any] | None
    """The last comparison of the two releases; None if they were not compared."""


class ReleaseSummary(Record):
    """One directory under ``releases/``."""

    number: int
    name: str
    variant: str
    digest: str | None
    """The digest of the variant's files; None if its manifest is damaged."""
    adapters: tuple[str, ...]
    """The names of its LoRA adapters."""
    score: float | None
    """The variant's score when it was chosen."""
    outcome: str
    """The outcome by which it was chosen (``Production.headline``); empty if that is not known."""
    reason: str
    """Why it was chosen."""
    made_at: datetime
    size_bytes: int
    state: ReleaseState
    moves: tuple[MoveSummary, ...]
    """The moves to it, the newest first."""


class Pruned(Record):
    """Which releases were removed, and how much space that freed."""

    removed: tuple[str, ...]
    others: bool = False
    """Whether anything of other configurations was removed."""
    kept: tuple[str, ...]
    removed_bytes: int
    """The size of all files in the removed directories."""
    freed_bytes: int
    """The size of those files that no other directory links to; the others stay on the disk."""


def catalogue(store: ModelStore, split: Split | None = None) -> list[ReleaseSummary]:
    """List all releases, the newest first; *split* is what the platform serves, if anything."""
    moves = summarized_moves(store)
    last = {move.release: move.result for move in reversed(moves)}
    split, journal = split or Split(stable=None), under_way(store)

    def state(name: str) -> ReleaseState:
        if name == current_release(store):
            return "production"
        if name == split.canary or (journal and name == journal.release):
            return "canary"
        if name == candidate(store):
            return "candidate"
        if name == split.standby:
            return "standby"
        if name not in last and name > (current_release(store) or name):
            return "kept"
        return "rolled back" if last.get(name) == "rolled back" else "earlier"

    return [
        _release(store, number, name, state(name), tuple(move for move in moves if move.release == name))
        for number, name in sorted(numbered(store).items(), reverse=True)
    ]


def summarized_moves(store: ModelStore) -> list[MoveSummary]:
    """List all moves, the newest first, including those of releases that were removed."""
    moves = []
    for move in reversed(history(store)):
        last = move.analyses[-1] if move.analyses else None
        summary = MoveSummary(
            **{name: getattr(move, name) for name in OneMove.model_fields},
            seconds=round((move.ended_at - move.started_at).total_seconds(), 1),
            percent=100 if move.result == "promoted" else int(last["percent"]) if last else 0,
            analysis=last,
        )
        moves.append(summary)
    return moves


def prune(store: ModelStore, keep: int, split: Split, *, others: bool = False) -> Pruned:
    """Remove all but the newest *keep* releases and, with *others*, the variants and evaluations of other
    configurations, which were put aside. A release is never removed if it is in production, was there before, may be
    the next one, or is being served. Raises ConfigError if *keep* is less than one, Busy if a rollout is running, which
    may need any of them."""
    if keep < 1:
        raise ConfigError(
            "--keep must be at least 1", hint="the newest release must stay so that its number is not used again"
        )
    with exclusive(store.lock(LOCK), f"the rollout of {store.model}", wait=False):
        names = [name for _, name in sorted(numbered(store).items(), reverse=True)]
        current, journal = current_release(store), under_way(store)
        needed = {*names[:keep], current, candidate(store), split.stable, split.canary, split.standby}
        if current:
            needed.add(before(store, current))
        if journal:
            needed |= {journal.release, journal.stable, journal.before}
        removed = [name for name in names if name not in needed]
        set_aside = [store.aside] if others and store.aside.exists() else []
        folders = [*(store.releases / name for name in removed), *set_aside]
        total, freed = _bytes_of(folders)
        for folder in folders:  # atomically for other processes: each is first renamed
            work = store.path / ".building" / f"pruned-{uuid.uuid4().hex}"
            work.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder, work)
            shutil.rmtree(work)
    return Pruned(
        removed=tuple(removed),
        others=bool(set_aside),
        kept=tuple(name for name in names if name in needed),
        removed_bytes=total,
        freed_bytes=freed,
    )


def _release(
    store: ModelStore, number: int, name: str, state: ReleaseState, moves: tuple[MoveSummary, ...]
) -> ReleaseSummary:
    folder = store.releases / name
    decision: dict[str, Any] = {}  # as plain data: another version may have written other fields
    with contextlib.suppress(OSError, ValueError):
        written = json.loads((folder / METRICS).read_text(encoding="utf-8"))
        decision = written if isinstance(written, dict) else {}
    variant = Variant.read_if_intact(folder / VARIANT)
    scores = {candidate.get("variant"): candidate.get("score") for candidate in decision.get("candidates", [])}
    decided = decision.get("decided_at")
    made = datetime.fromisoformat(decided) if decided else datetime.fromtimestamp(folder.stat().st_mtime, UTC)
    return ReleaseSummary(
        number=number,
        name=name,
        variant=name.split("-", 1)[1].rpartition("-")[0],
        digest=variant.digest if variant else None,
        adapters=tuple(adapters_in(folder)),
        score=scores.get(decision.get("winner")),
        outcome=headline(store, name),
        reason=str(decision.get("reason", "")),
        made_at=made,
        size_bytes=_bytes_of([folder])[0],
        state=state,
        moves=moves,
    )


def _bytes_of(folders: list[Path]) -> tuple[int, int]:
    """Add up the sizes of all files, and of those without a link outside these folders."""
    links: Counter[tuple[int, int]] = Counter()
    files: dict[tuple[int, int], os.stat_result] = {}
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                status = path.stat()
                key = (status.st_dev, status.st_ino)
                links[key] += 1
                files[key] = status
    total = sum(files[key].st_size * count for key, count in links.items())
    return total, sum(file.st_size for key, file in files.items() if links[key] == file.st_nlink)
