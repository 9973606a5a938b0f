"""Prints lines for people, and keeps a stage's output in the run's folder too: on a cluster, a pod's log goes with
the pod."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

LOG_VARIABLE: Final = "SLIPWAY_LOG"
"""The file. Not set on one machine, where the engine keeps the logs."""
LAST_LINES_S: Final = 5.0
"""How long the end of a stage waits for its last lines to be written."""


def say(line: str) -> None:
    """Print a line to stderr at once: results alone go to stdout."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Copy what the block and the processes it starts print to the file that ``SLIPWAY_LOG`` names.

    A further attempt continues the file. If it can't be written, the block runs without.
    """
    name = os.environ.pop(LOG_VARIABLE, None)  # programs that the block starts print to the same
    copier = _copier(Path(name)) if name else None
    if copier is None or copier.stdin is None:
        yield
        return
    originals = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        for descriptor in (1, 2):
            os.dup2(copier.stdin.fileno(), descriptor)
        copier.stdin.close()
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for descriptor, original in zip((1, 2), originals, strict=True):
            os.dup2(original, descriptor)
            os.close(original)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process that outlives the stage still prints
            copier.wait(LAST_LINES_S)


def _copier(path: Path) -> subprocess.Popen[bytes] | None:
    """Start a process that copies its input to its output and to *path*. A thread would stop with a stage that is
    killed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as log:
            if log.tell():
                log.write(f"\n--- another attempt, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC ---\n")
        # Signals are not meant for it: it ends with what it copies.
        command = ["sh", "-c", 'trap "" INT TERM; exec tee --append "$0"', str(path)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        say(f"the log can't be kept in {path}: {error}")
        return None
