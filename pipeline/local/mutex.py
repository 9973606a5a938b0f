"""``synchronization.mutexes`` on one machine: locks on files, shared by every engine with the same state folder.

The kernel releases them when the engine ends, however it ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from stages.errors import Busy
from stages.store import exclusive


def hold(locks: contextlib.ExitStack, folder: Path, names: Iterable[str]) -> str | None:
    """Hold all mutexes until *locks* is closed, or none: then the name of one that is held elsewhere. Never waits."""
    for name in names:
        try:
            locks.enter_context(exclusive(folder / quote(name, safe=""), f"mutex {name}", wait=False))
        except Busy:
            locks.close()
            return name
    return None
