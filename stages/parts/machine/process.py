"""Start programs that end when this process ends, however it ends. See guard.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Self, cast

GUARD: Final = Path(__file__).with_name("guard.py")
GRACE_S: Final = 15.0
"""Time between SIGTERM and SIGKILL: vLLM's workers need a few seconds to end."""


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
