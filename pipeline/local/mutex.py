"""``synchronization`` on one machine: locks on files, shared by all runs of a store.

A semaphore is a set of locks, of which a task holds one. On a cluster its limit is a number in a ConfigMap. One machine
has no ConfigMap: the limit is the number of GPUs, which is what our semaphores count, and at least 1.

The kernel releases the locks when the engine ends, however it ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from pipeline.local.manifest import Synchronization
from pipeline.local.references import substitute
from stages.parts.base.errors import Busy
from stages.parts.base.store import exclusive


@dataclass(frozen=True)
class Lock:
    said: str
    """Its name in messages: ``mutex gpu``."""
    files: tuple[str, ...]
    """Whoever holds one of them has the lock."""


def locks_of(asked: Synchronization, gpus: int, lookup: Callable[[str], str]) -> tuple[Lock, ...]:
    """The locks of a template or workflow.

    Raises:
        Unresolved: by *lookup*.
    """
    mutexes = [substitute(mutex.name, lookup) for mutex in asked.mutexes]
    found = [Lock(f"mutex {name}", (quote(name, safe=""),)) for name in mutexes]
    for semaphore in asked.semaphores:
        of = semaphore.config_map_key_ref
        name = f"{substitute(of.name, lookup)}/{substitute(of.key, lookup)}"
        places = range(max(1, gpus))
        found.append(Lock(f"semaphore {name}", tuple(f"semaphore,{quote(name, safe='')},{n}" for n in places)))
    return tuple(found)


def hold(locks: contextlib.ExitStack, folder: Path, wanted: Iterable[Lock]) -> str | None:
    """Hold all locks until *locks* is closed. If one is held elsewhere, hold none and return its name. Never waits."""
    for lock in wanted:
        if not any(_held(locks, folder / file, lock.said) for file in lock.files):
            locks.close()
            return lock.said
    return None


def _held(locks: contextlib.ExitStack, file: Path, said: str) -> bool:
    try:
        locks.enter_context(exclusive(file, said, wait=False))
    except Busy:
        return False
    return True
