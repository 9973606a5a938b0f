"""The progress of a transfer: a bar on a terminal, a line every few seconds in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, Self

from scoring.units import readable
from stages.parts.base.log import say

LINE_EVERY_S: Final = 5.0
BAR_EVERY_S: Final = 0.2


class TransferProgress:
    """Shows on stderr, until the block ends, what *measure* returns: (complete files, bytes that are there)."""

    def __init__(self, verb: str, files: int, size_bytes: int, measure: Callable[[], tuple[int, int]]) -> None:
        self._verb, self._files, self._size, self._measure = verb, files, size_bytes, measure
        self._stop = threading.Event()
        show = self._bar if sys.stderr.isatty() else self._lines
        self._thread = threading.Thread(target=show, daemon=True)

    def __enter__(self) -> Self:
        self._start, (_, self._first) = time.monotonic(), self._measure()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _measured(self, every_s: float) -> Iterator[tuple[int, int]]:
        """Measure every so often, and a last time when the block has ended."""
        ended = False
        while not ended:
            ended = self._stop.wait(every_s)
            yield self._measure()

    def _lines(self) -> None:
        for files, transferred in self._measured(LINE_EVERY_S):
            seconds = time.monotonic() - self._start
            rate = f", {readable((transferred - self._first) / seconds)}/s" if seconds > 1 else ""
            amount = f"{readable(transferred)} of {readable(self._size)}"
            say(f"{self._verb}: {files}/{self._files} files, {amount}{rate}")

    def _bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as SpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), SpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task(self._verb, total=self._size, completed=self._first)
            for files, transferred in self._measured(BAR_EVERY_S):
                bar.update(task, completed=transferred, description=f"{self._verb} {files}/{self._files} files")
