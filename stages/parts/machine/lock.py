"""The lock of this machine: one measurement holds it alone, or several optimize tasks hold it together.

It applies to all runs and stores. The kernel releases it however the process ends. A pod has its own ``/tmp``, so pods
do not wait for each other here: on a cluster, resource requests and mutexes decide.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stages.parts.base.log import say

LOCK_VARIABLE: Final = "SLIPWAY_MACHINE_LOCK"
"""Path of another lock file, for runs that use separate parts of a machine (GPUs, cores)."""


def alone(task: str) -> contextlib.AbstractContextManager[None]:
    """Hold the machine for the measurement *task*: meanwhile nothing else is measured or optimized."""
    return _turn(task, fcntl.LOCK_EX)


def together(task: str) -> contextlib.AbstractContextManager[None]:
    """Hold the machine for *task*, together with other tasks, but never during a measurement."""
    return _turn(task, fcntl.LOCK_SH)


@contextlib.contextmanager
def _turn(task: str, mode: int) -> Iterator[None]:
    """Wait for the lock; meanwhile a line on stderr names its holders. A signal handler that raises ends the wait."""
    path = Path(os.environ.get(LOCK_VARIABLE) or f"/tmp/slipway-{os.getuid()}.lock")  # noqa: S108
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            # The living processes that took the lock since a measurement last held it.
            holders = [line.partition(" ") for line in path.read_text(encoding="utf-8").splitlines()]
            living = [f"{name} (process {pid})" for pid, _, name in holders if Path("/proc", pid).exists()]
            say(f"waiting for {', '.join(living) or 'another process'}, on this machine")
            fcntl.flock(file, mode)
        if mode == fcntl.LOCK_EX:
            file.truncate(0)  # no other process holds it
        file.write(f"{os.getpid()} {task}\n".encode())
        yield
