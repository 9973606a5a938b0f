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
    title: str
    """Its name in messages: ``mutex gpu``."""
    files: tuple[str, ...]
    """Whoever holds one of them has the lock."""


def locks_of(synchronization: Synchronization, gpus: int, lookup: Callable[[str], str]) -> tuple[Lock, ...]:
    """Return the locks of a template or workflow."""
    mutexes = [substitute(mutex.name, lookup) for mutex in synchronization.mutexes]
    locks = [Lock(f"mutex {name}", (quote(name, safe=""),)) for name in mutexes]
    for semaphore in synchronization.semaphores:
        entry = semaphore.config_map_key_ref
        name = f"{substitute(entry.name, lookup)}/{substitute(entry.key, lookup)}"
        places = range(max(1, gpus))
        locks.append(Lock(f"semaphore {name}", tuple(f"semaphore,{quote(name, safe='')},{n}" for n in places)))
    return tuple(locks)


def hold(stack: contextlib.ExitStack, folder: Path, locks: Iterable[Lock]) -> str | None:
    """Hold all locks until *stack* is closed. If one is held elsewhere, hold none and return its name. Never waits."""
    for lock in locks:
        for file in lock.files:
            with contextlib.suppress(Busy):
                stack.enter_context(exclusive(folder / file, lock.title, wait=False))
                break
        else:
            stack.close()
            return lock.title
    return None
