"""Start programs that end when this process ends, however it ends. See guard.py."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Self, cast

import psutil

from stages.parts.base.log import say
from stages.parts.machine.hardware import gpu_memory_used_bytes

GUARD: Final = Path(__file__).with_name("guard.py")
GRACE_S: Final = 15.0
"""Time between SIGTERM and SIGKILL: vLLM's workers need a few seconds to end."""
INTERVAL_S: Final = 0.2
GPU_INTERVAL_S: Final = 2.0
"""nvidia-smi takes most of a second, and vLLM allocates its GPU memory at the start and keeps it."""
LAST_LINES: Final = 200
"""What is kept of a command's output, to say why it failed."""


class Contained:
    """A running command and all processes that it started; as a context, it ends with the block for any reason.

    ``pid`` is that of the guard, the root of the process tree. Ctrl-C on the terminal does not reach the tree: the
    caller ends it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int = subprocess.DEVNULL,
        output: int | IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """*stdin* is the standard input of the command, *output* its standard output and standard error."""
        lifeline, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), str(lifeline), str(grace_s), *command],
                stdin=stdin,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                env=environment,
                cwd=directory,
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(lifeline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> IO[bytes]:
        """What the command prints, if *output* is ``subprocess.PIPE``."""
        return cast("IO[bytes]", self._process.stdout)

    def poll(self) -> int | None:
        """Return the exit status (128 + the signal that ended it), or None while it runs."""
        status = self._process.poll()
        return None if status is None else _shell_status(status)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end; return the exit status as ``poll`` does. Raises ``subprocess.TimeoutExpired``."""
        return _shell_status(self._process.wait(timeout_s))

    def terminate(self) -> None:
        """Ask the process tree to end; return at once."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """End the process tree and wait until no process is left. It can be called again."""
        self.terminate()
        status = self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return _shell_status(status)


def _shell_status(status: int) -> int:
    """subprocess reports a signal that ended the guard itself as a negative number."""
    return status if status >= 0 else 128 - status


def peak_resident_bytes() -> int:
    """Read the largest resident set of this process so far: VmHWM in proc_pid_status(5).

    getrusage(2) would be wrong: its value survives exec, so it may belong to the process that started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


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


def run_aloud(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    hidden: re.Pattern[str],
) -> tuple[int, list[str]]:
    """Run a command that ends when this process does; print on stderr what it prints, but for *hidden* lines. Returns
    its exit status, and its last lines."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    with (
        Contained(command, output=subprocess.PIPE, environment=environment, directory=directory) as process,
        io.TextIOWrapper(process.output, encoding="utf-8", errors="replace") as output,
    ):
        for line in map(str.rstrip, output):
            last.append(line)
            if line and not hidden.match(line):
                say(line)
        return process.wait(), [*last]
