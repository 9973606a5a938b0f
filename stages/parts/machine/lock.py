"""Who may work on this machine: one measurement alone, or optimize tasks together, of whichever run and store.

The kernel releases the lock when the process ends, however it ends. In a pod ``/tmp`` is the pod's own, so that nobody
waits for another pod: there the cluster's resources and mutexes decide.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

LOCK_VARIABLE: Final = "SLIPWAY_MACHINE_LOCK"
"""Another file than the user's own in ``/tmp``: for runs that have parts of a machine (GPUs, cores) to themselves."""


def alone(what: str) -> contextlib.AbstractContextManager[None]:
    """Hold this machine for a measurement, *what*: nothing else of ours is measured or optimized meanwhile."""
    return _turn(what, fcntl.LOCK_EX)


def together(what: str) -> contextlib.AbstractContextManager[None]:
    """Hold this machine for *what*, beside others that do so, but never beside a measurement."""
    return _turn(what, fcntl.LOCK_SH)


@contextlib.contextmanager
def _turn(what: str, mode: int) -> Iterator[None]:
    """Who has to wait is told so on stderr, and for whom. A signal that raises ends the wait."""
    path = Path(os.environ.get(LOCK_VARIABLE) or f"/tmp/slipway-{os.getuid()}.lock")  # noqa: S108
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for {_holders(path)}, on this machine", file=sys.stderr, flush=True)
            fcntl.flock(file, mode)
        if mode == fcntl.LOCK_EX:
            file.truncate(0)  # nobody else holds it
        file.write(f"{os.getpid()} {what}\n".encode())
        yield


def _holders(path: Path) -> str:
    """Everyone who took the lock since a measurement last had it, and still lives."""
    lines = [line.partition(" ") for line in path.read_text(encoding="utf-8").splitlines()]
    living = [f"{what} (process {pid})" for pid, _, what in lines if Path("/proc", pid).exists()]
    return ", ".join(living) or "another process"
