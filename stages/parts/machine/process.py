"""Start other programs so that none outlives its purpose, whatever happens to us. See guard.py."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

GUARD: Final = Path(__file__).with_name("guard.py")
GRACE_S: Final = 15.0
"""How long a program may take to end after SIGTERM before SIGKILL: vLLM's workers take a few seconds."""


class Contained:
    """A running command with everything it started.

    ``pid`` is the guard's, the root of the tree. Ctrl-C on the terminal doesn't reach it: the caller decides.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        asks: int = subprocess.DEVNULL,
        output: int | IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """*asks* is what the command reads as its standard input."""
        lifeline, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), str(lifeline), str(grace_s), *command],
                stdin=asks,
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

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status (128 + signal if one ended it), or None while it runs."""
        status = self._process.poll()
        return None if status is None else _shell_status(status)

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit status, as ``poll`` says it.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        return _shell_status(self._process.wait(timeout_s))

    def terminate(self) -> None:
        """Ask the tree to end; return at once."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        """End the tree and wait until nothing of it is left. Safe to call again."""
        self.terminate()
        status = self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return _shell_status(status)


def _shell_status(status: int) -> int:
    """subprocess tells a signal that ended the guard itself as a negative number."""
    return status if status >= 0 else 128 - status


@contextlib.contextmanager
def contained(
    command: Sequence[str],
    *,
    output: int | IO[bytes] | None = None,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    grace_s: float = GRACE_S,
) -> Iterator[Contained]:
    """A command that has ended, with everything it started, when the block is left in whatever way."""
    process = Contained(command, output=output, environment=environment, directory=directory, grace_s=grace_s)
    try:
        yield process
    finally:
        process.stop()
