"""Removes from a store what nothing refers to any more: old releases, old runs, and what other settings made."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pipeline.upkeep.contents import has_ended
from stages.parts.base.errors import Busy, ConfigError
from stages.parts.base.files import exclusive
from stages.parts.base.store import ModelStore, Record
from stages.parts.endpoint.endpoint import WANTED, Wanted
from stages.parts.records.rollout import LOCK, under_way
from stages.parts.releases.listing import bytes_of, catalogue
from stages.parts.releases.release import CANDIDATE_METRICS, METRICS, Split, before, candidate, current_release

STAGES: Final = {"optimized": "optimize", "evaluations": "evaluate"}
"""The stage that holds the lock of what lies in each folder."""
PRUNED: Final = "pruned-"


class Pruned(Record):
    """What was removed of a model, or would be, and how much space that freed."""

    model: str
    removed: tuple[str, ...]
    """Releases."""
    runs: tuple[str, ...] = ()
    others: bool = False
    """Whether anything of other configurations was removed."""
    unfinished: tuple[str, ...] = ()
    """What killed processes left behind."""
    kept: tuple[str, ...]
    removed_bytes: int
    """The size of all files in the removed directories."""
    freed_bytes: int
    """The size of those files that no other directory links to; the others stay on the disk."""


def prune(
    store: ModelStore,
    keep: int,
    split: Split,
    *,
    older: datetime | None = None,
    others: bool = False,
    dry_run: bool = False,
) -> Pruned:
    """Remove all but the newest *keep* releases and, with *others*, the variants and evaluations of other
    configurations, which were put aside. With *older*, only what was made before that time, and then also what killed
    processes left unfinished, and runs that ended, but for those that decided for a release that stays.

    A release is never removed if it is in production, was there before, may be the next one, or is being served. What
    another process holds the lock of stays. Raises ConfigError if *keep* is less than one, Busy if a rollout is
    running, which may need any release.
    """
    if keep < 1:
        hint = "the newest release must stay so that its number is not used again"
        raise ConfigError("--keep must be at least 1", hint=hint)
    with contextlib.ExitStack() as held:
        held.enter_context(exclusive(store.lock(LOCK), f"the rollout of {store.model}", wait=False))
        made_at = {row.name: row.made_at for row in catalogue(store, split)}
        needed = {*list(made_at)[:keep], *_needed(store, split)}
        removed = [
            name for name, at in made_at.items() if name not in needed and (older is None or at.astimezone() < older)
        ]
        kept = [name for name in made_at if name not in removed]
        runs = [*_old_runs(store, kept, older)] if older else []
        aside = [*_unheld(store, held, store.aside.glob("*/*"), older)] if others else []
        unfinished = [*_unheld(store, held, (store.path / ".building").glob("*"), older)]
        folders = [*(store.releases / name for name in removed), *runs, *aside, *unfinished]
        total, freed = bytes_of(folders)
        for folder in [] if dry_run else folders:  # atomically for other processes: each is first renamed
            work = store.path / ".building" / f"{PRUNED}{uuid.uuid4().hex}"
            work.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder, work)
            shutil.rmtree(work)
    return Pruned(
        model=store.model,
        removed=tuple(removed),
        runs=tuple(path.name for path in runs),
        others=bool(aside),
        unfinished=tuple(path.name for path in unfinished),
        kept=tuple(kept),
        removed_bytes=total,
        freed_bytes=freed,
    )


def _needed(store: ModelStore, split: Split) -> set[str | None]:
    """Name the releases that anything refers to."""
    current, journal = current_release(store), under_way(store)
    needed = {current, candidate(store), split.stable, split.canary, split.standby}
    if current:
        needed.add(before(store, current))
    if journal:
        needed |= {journal.release, journal.stable, journal.before}
    if wanted := Wanted.read(store.path / WANTED):  # which an endpoint that is started again serves
        needed |= {*wanted.releases(), wanted.replaced}
    return needed


def _old_runs(store: ModelStore, kept: Iterable[str], older: datetime) -> Iterator[Path]:
    """Yield the runs that ended before a time, but for those whose decision one of the *kept* releases has."""
    records = [*(store.releases / name / METRICS for name in kept)]
    deciding = set()
    for path in [*records, store.production_metrics, store.path / CANDIDATE_METRICS]:
        with contextlib.suppress(FileNotFoundError):
            deciding.add(json.loads(path.read_text(encoding="utf-8")).get("run"))
    for run in sorted(store.runs.glob("*")):
        if run.name not in deciding and has_ended(run) and _changed_at(run) < older:
            yield run


def _unheld(
    store: ModelStore, held: contextlib.ExitStack, folders: Iterable[Path], older: datetime | None
) -> Iterator[Path]:
    """Yield those of the *folders* that nobody works on, and hold their locks: set aside, or unfinished, which without
    *older* are only the remains of a removal."""
    for folder in sorted(folders):
        stage, name = STAGES.get(folder.parent.name), folder.name.removesuffix(".json").removesuffix(".refused")
        if name.startswith(PRUNED):
            yield folder
        elif stage or older:
            with contextlib.suppress(Busy):
                held.enter_context(exclusive(store.lock(f"{stage}-{name}" if stage else name), name, wait=False))
                if older is None or _changed_at(folder) < older:
                    yield folder


def _changed_at(folder: Path) -> datetime:
    """Find when anything in a folder last changed."""
    return datetime.fromtimestamp(max(path.lstat().st_mtime for path in [folder, *folder.rglob("*")]), UTC)
