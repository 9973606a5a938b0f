"""The releases of a model as they are listed for a person."""

from __future__ import annotations

import contextlib
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel

from stages.parts.base.files import files_in
from stages.parts.base.store import ModelStore, Record
from stages.parts.model.adapter import adapters_in
from stages.parts.records.rollout import under_way
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.releases import release as releases
from stages.parts.releases.signing import signer_of

ReleaseState = Literal["production", "canary", "candidate", "standby", "rolled back", "kept", "earlier"]
"""kept: no client got it yet, because it was not shown to be better than what is in production."""


class MoveSummary(releases.OneMove):
    """One move between releases, as it is listed."""

    seconds: float
    percent: int
    """The largest share of new requests that the release got."""
    analysis: dict[str, Any] | None
    """The last comparison of the two releases; None if they were not compared."""


class _Scored(BaseModel):
    variant: str
    score: float | None = None


class _Engine(BaseModel):
    name: str = ""
    version: str = ""


class _Decided(BaseModel):
    """What is shown of a release's decision. Another version may have written other fields beside it."""

    winner: str = ""
    candidates: tuple[_Scored, ...] = ()
    engine: _Engine = _Engine()
    reason: str = ""
    decided_at: AwareDatetime | None = None


class ReleaseSummary(Record):
    """One directory under ``releases/``."""

    number: int
    name: str
    variant: str
    digest: str | None
    """The digest of the variant's files; None if its manifest is damaged."""
    engine: str
    """The engine that it was measured on, and its version; empty if that is not known."""
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
    signer: str
    """The key or certificate that it says it is signed with (``signer_of``); empty if it is not."""
    state: ReleaseState
    moves: tuple[MoveSummary, ...]
    """The moves to it, the newest first."""


def catalogue(store: ModelStore, split: releases.Split | None = None) -> list[ReleaseSummary]:
    """List all releases, the newest first; *split* is what the platform serves, if anything."""
    moves = summarized_moves(store)
    last = {move.release: move.result for move in reversed(moves)}
    split, journal = split or releases.Split(stable=None), under_way(store)

    def state(name: str) -> ReleaseState:
        if name == releases.current_release(store):
            return "production"
        if name == split.canary or (journal and name == journal.release):
            return "canary"
        if name == releases.candidate(store):
            return "candidate"
        if name == split.standby:
            return "standby"
        if name not in last and name > (releases.current_release(store) or name):
            return "kept"
        return "rolled back" if last.get(name) == "rolled back" else "earlier"

    return [
        _release(store, number, name, state(name), tuple(move for move in moves if move.release == name))
        for number, name in sorted(releases.numbered(store).items(), reverse=True)
    ]


def summarized_moves(store: ModelStore) -> list[MoveSummary]:
    """List all moves, the newest first, including those of releases that were removed."""
    moves = []
    for move in reversed(releases.history(store)):
        last = move.analyses[-1] if move.analyses else None
        summary = MoveSummary(
            **{name: getattr(move, name) for name in releases.OneMove.model_fields},
            seconds=round((move.ended_at - move.started_at).total_seconds(), 1),
            percent=100 if move.result == "promoted" else int(last["percent"]) if last else 0,
            analysis=last,
        )
        moves.append(summary)
    return moves


def _release(
    store: ModelStore, number: int, name: str, state: ReleaseState, moves: tuple[MoveSummary, ...]
) -> ReleaseSummary:
    folder = store.releases / name
    decision = _Decided()
    with contextlib.suppress(OSError, ValueError):
        decision = _Decided.model_validate_json((folder / releases.METRICS).read_bytes())
    variant = Variant.read_if_intact(folder / VARIANT)
    scores = {each.variant: each.score for each in decision.candidates}
    return ReleaseSummary(
        number=number,
        name=name,
        variant=name.split("-", 1)[1].rpartition("-")[0],
        digest=variant.digest if variant else None,
        engine=" ".join(filter(None, (decision.engine.name, decision.engine.version))),
        adapters=tuple(adapters_in(folder)),
        score=scores.get(decision.winner),
        outcome=releases.headline(store, name),
        reason=decision.reason,
        made_at=decision.decided_at or datetime.fromtimestamp(folder.stat().st_mtime, UTC),
        size_bytes=bytes_of([folder])[0],
        signer=signer_of(folder),
        state=state,
        moves=moves,
    )


def bytes_of(folders: list[Path]) -> tuple[int, int]:
    """Add up the sizes of all files, and of those without a link outside these folders."""
    files = [((status.st_dev, status.st_ino), status) for _, status in files_in(*folders)]
    links = Counter(inode for inode, _ in files)
    alone = {inode: status.st_size for inode, status in files if links[inode] == status.st_nlink}
    return sum(status.st_size for _, status in files), sum(alone.values())
