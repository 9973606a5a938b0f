"""Keeps what other configurations made, so that two of them don't undo each other's work: one variant and one
evaluation of a name is in its place at a time; those with other keys are put aside, and brought back by their keys."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from stages.parts.base.store import ModelStore, swap

KEPT: Final = 3
"""So many of each name are kept aside, the last ones that were in use."""
KEY_CHARACTERS: Final = 16


def take_up(store: ModelStore, paths: Sequence[Path], there: str | None, wanted: str) -> None:
    """Put *paths*, which have the key *there*, aside if *wanted* is another one, and bring back those of *wanted*.

    The caller holds their lock. After a crash in between the store has neither, and they are made again.

    Args:
        paths: files or directories that belong together. The last one, which tells the key, is moved out first and
            in last.
        there: None: they are not there, or damaged.
    """
    if there == wanted:
        return
    kept = folder(store) / paths[-1].relative_to(store.path)
    if there:
        _put_aside(paths, kept, there)
    found = kept / wanted[:KEY_CHARACTERS]
    for path in paths:
        if (found / path.name).exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            swap(found / path.name, path)
    shutil.rmtree(found, ignore_errors=True)


def folder(store: ModelStore) -> Path:
    return store.path / ".aside"


def _put_aside(paths: Sequence[Path], kept: Path, key: str) -> None:
    work = kept / f".{uuid.uuid4().hex}"
    work.mkdir(parents=True)
    for path in reversed(paths):
        if path.exists():
            os.replace(path, work / path.name)
    swap(work, kept / key[:KEY_CHARACTERS])
    oldest_first = sorted(kept.iterdir(), key=lambda each: each.stat().st_mtime_ns)
    for each in oldest_first[:-KEPT]:
        shutil.rmtree(each)
