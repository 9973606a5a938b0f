"""Programs that import their libraries once and run each call in a fork of themselves: vLLM's load generator and
lm-eval need longer for their imports than for most calls.

They start at once, so that they import while the first server starts.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Final

from stages.parts.base.files import write_text
from stages.parts.machine.process import Contained
from stages.parts.vllm.client import beside_server
from stages.parts.vllm.server import POLL_S, Server

# The threads that OpenMP starts at import do not survive a fork, and a client does not need them.
VARIABLES: Final = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
Call = dict[str, Any]


class Preloaded:
    """``python -m module``, whose ``main`` is ``answer_calls``. It ends with the block, and what it runs with it."""

    def __init__(self, module: str, log: Path, variables: Mapping[str, str] | None = None) -> None:
        """Args: log: gets what it prints before the first call."""
        self._module, self._log, self._variables = module, log, VARIABLES | dict(variables or {})
        self._process: Contained | None = None
        self._asks: IO[str] | None = None

    def call(self, server: Server, call: Call, log: Path) -> int:
        """Run *call* against *server*, and return its exit status. *log*: its output is appended; if the program itself
        has ended, what it printed. Raises: ServerFailed: the server ended first; the call is ended too."""
        try:
            with tempfile.TemporaryDirectory(prefix="slipway-call-") as folder:
                status = Path(folder) / "status"
                process = self._process or self._start()
                with contextlib.suppress(BrokenPipeError):  # it has ended, as is seen below
                    print(json.dumps({"call": call, "log": str(log), "status": str(status)}), file=self._asks)
                while not status.exists():
                    server.check_alive()
                    if (ended := process.poll()) is not None:
                        self.stop()
                        write_text(log, self._log.read_text(errors="replace"))
                        return ended
                    time.sleep(POLL_S)
                server.check_alive()
                return int(status.read_text())
        except BaseException:
            self.stop()
            raise

    def _start(self) -> Contained:
        reads, writes = os.pipe()
        self._asks = os.fdopen(writes, "w", buffering=1)
        command = [sys.executable, "-m", self._module]
        try:
            with self._log.open("wb") as log:
                self._process = Contained(command, stdin=reads, output=log, environment=beside_server(self._variables))
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

    def __enter__(self) -> Preloaded:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def answer_calls(prepare: Callable[[], object], run: Callable[[Call], int]) -> None:
    """Import with *prepare*; then fork for each call on stdin, and let the child *run* it to its exit status."""
    prepare()
    gc.collect()
    gc.freeze()  # a child would otherwise look through all that was imported, and copy the pages that hold it
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if not child:
            os._exit(_run_here(run, request["call"], request["log"]))
        _, status = os.waitpid(child, 0)
        write_text(Path(request["status"]), str(os.waitstatus_to_exitcode(status)))


def _run_here(run: Callable[[Call], int], call: Call, log: str) -> int:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    try:
        return run(call)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
