"""Run vLLM's commands without repeating vLLM's imports, which take longer than most rounds of load.

    python -m stages.evaluate.generator

imports the ``vllm`` command once. For each line of JSON that it reads, ``{"arguments", "log", "status"}``, it forks:
the child runs the command with its output in ``log``, and the exit status is written to the file ``status``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

from stages.parts.base.store import write_text
from stages.parts.engine.arguments import VLLM
from stages.parts.engine.client import beside_server
from stages.parts.engine.server import POLL_S, Server
from stages.parts.machine.process import Contained

# The threads that OpenMP starts at import do not survive a fork, and a client does not need them.
VARIABLES: Final = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class Generator:
    """Runs ``vllm bench`` repeatedly in one process, which starts with the first call and ends with ``stop``."""

    def __init__(self) -> None:
        self._process: Contained | None = None
        self._asks: IO[str] | None = None

    def call(self, server: Server, arguments: Sequence[str], log: Path) -> int:
        """Run ``vllm`` with *arguments* against *server*, and return its exit status.

        Raises:
            ServerFailed, ServerKilled: the server ended first; the call is ended too.
        """
        try:
            with tempfile.TemporaryDirectory(prefix="slipway-load-") as folder:
                status = Path(folder) / "status"
                process = self._process or self._start(log)
                print(json.dumps({"arguments": arguments, "log": str(log), "status": str(status)}), file=self._asks)
                while not status.exists():
                    server.check_alive()
                    if (ended := process.poll()) is not None:
                        self.stop()
                        return ended
                    time.sleep(POLL_S)
                server.check_alive()
                return int(status.read_text())
        except BaseException:
            self.stop()
            raise

    def _start(self, log: Path) -> Contained:
        reads, writes = os.pipe()
        self._asks = os.fdopen(writes, "w", buffering=1)
        command = [sys.executable, "-m", "stages.evaluate.generator"]
        try:
            with log.open("wb") as output:
                self._process = Contained(command, stdin=reads, output=output, environment=beside_server(VARIABLES))
        finally:
            os.close(reads)
        return self._process

    def stop(self) -> None:
        """End the process and the current call. It is safe to call this again."""
        if self._process:
            self._process.stop()
        if self._asks:
            with contextlib.suppress(BrokenPipeError):
                self._asks.close()
        self._process = self._asks = None

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def main() -> None:
    run_vllm(["--version"])  # imports what every command needs
    for line in sys.stdin:
        answer(json.loads(line))


def answer(asked: dict[str, Any]) -> None:
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        write_text(Path(asked["status"]), str(os.waitstatus_to_exitcode(status)))
        return
    output = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    status = run_vllm(asked["arguments"])
    sys.stdout.flush()
    os._exit(status)


def run_vllm(arguments: Sequence[str]) -> int:
    """The exit status of the ``vllm`` command, run in this process."""
    from importlib import import_module

    sys.argv = ["vllm", *arguments]
    try:
        import_module(VLLM[-1]).main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
