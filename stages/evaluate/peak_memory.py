"""How much memory a server needs, observed from outside while it works."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Final, Self

import psutil

from stages.parts.machine.hardware import gpu_memory_used_bytes

INTERVAL_S: Final = 0.2
GPU_INTERVAL_S: Final = 2.0
"""nvidia-smi takes most of a second, and vLLM allocates its GPU memory at the start and keeps it."""


class PeakMemory:
    """Samples the memory of a process tree in a separate thread while the block runs.

    Resident sets are summed. They are cheap to read, but a page that processes share counts once for each of them.
    (Proportional set sizes would be exact, but reading them walks the page tables and slows the server down.)
    """

    def __init__(self, pid: int, gpus: str = "") -> None:
        """Args: gpus: those of the process, as ``CUDA_VISIBLE_DEVICES``; if empty, those of this one."""
        self._gpus = gpus
        self.resident_bytes = 0
        self.gpu_bytes: int | None = None
        self._root = psutil.Process(pid)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        gpu_sample_due = 0.0
        while True:
            self.resident_bytes = max(self.resident_bytes, resident_bytes(self._root))
            if time.monotonic() >= gpu_sample_due:
                if (used := gpu_memory_used_bytes(self._gpus)) is not None:
                    self.gpu_bytes = max(self.gpu_bytes or 0, used)
                gpu_sample_due = time.monotonic() + GPU_INTERVAL_S
            if self._end.wait(INTERVAL_S):
                return


def resident_bytes(root: psutil.Process) -> int:
    """Sum up the resident sets of *root* and its descendants; a process that has ended counts as 0."""
    total = 0
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += int(process.memory_info().rss)
    return total
