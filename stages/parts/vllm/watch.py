"""Notices that vLLM's engine is dead although its API process lives: such a server may neither answer nor end.

vLLM's log names the engine's processes, such as ``(EngineCore pid=6523)``; vLLM restarts none of them.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

NAMED: Final = re.compile(rb"^\(([\w-]+) pid=(\d+)\) ", re.MULTILINE)
DEAD: Final = re.compile(rb"EngineDeadError|EngineCore (?:failed to start|encountered a fatal error)")


@dataclass(frozen=True)
class Lost:
    """A process of the engine that has ended."""

    name: str
    """As vLLM's log names it, such as ``EngineCore`` or ``Worker_TP0``."""
    signal: signal.Signals | None
    """What ended it, if that could be seen before its parent took note of the end."""


class EngineWatch:
    """The processes that vLLM's log names from byte *start* on. A check reads only what the log gained since."""

    def __init__(self, log: Path, start: int) -> None:
        self.lost: Lost | None = None
        """The first that ended."""
        self._log, self._read = log, start
        self._processes: dict[int, tuple[str, psutil.Process]] = {}
        self._dead = False

    def dead(self) -> bool:
        """Whether a process of the engine has ended, or the log says that the engine has failed."""
        self._read_log()
        if self.lost is None:
            # A child that ended together with its parent ended first.
            self.lost = next(filter(None, (_lost(*process) for process in reversed(self._processes.values()))), None)
        return self._dead or self.lost is not None

    def _read_log(self) -> None:
        """Read the complete lines that were added."""
        try:
            with self._log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                start = file.seek(self._read if self._read <= end else 0)  # it may have been truncated
                added = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return
        self._read = start + len(added)
        self._dead = self._dead or bool(DEAD.search(added))
        for name, digits in NAMED.findall(added):
            self._note(name.decode(), int(digits))

    def _note(self, name: str, pid: int) -> None:
        try:
            process = self._processes.get(pid)
            self._processes[pid] = name, process[1] if process else psutil.Process(pid)
        except psutil.NoSuchProcess:
            self.lost = self.lost or Lost(name, None)


def _lost(name: str, process: psutil.Process) -> Lost | None:
    try:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return None
    except psutil.NoSuchProcess:
        return Lost(name, None)
    return Lost(name, _signal_of_zombie(process.pid))


def _signal_of_zombie(pid: int) -> signal.Signals | None:
    """Find the signal that ended a process whose parent has not taken note of it yet: the last field of its stat(5)."""
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text().split()[-1])
        return signal.Signals(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else None
    except (OSError, ValueError):
        return None
