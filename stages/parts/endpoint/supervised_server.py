"""Keeps one server of a release up in a thread of its own: it is watched, and restarted when it dies or hangs."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

from stages.parts.base.errors import Interrupted, ServerFailed, ServerKilled, SlipwayError
from stages.parts.base.log import say
from stages.parts.endpoint.endpoint import ServerState, State
from stages.parts.endpoint.metering import Meter
from stages.parts.endpoint.routing import Backend
from stages.parts.releases.signing import check_trust
from stages.parts.vllm.arguments import check_replicas, gpus_of
from stages.parts.vllm.client import healthy, socket_of
from stages.parts.vllm.server import POLL_S, Server, ServerSpec, running

PREVIOUS: Final = ".previous.log"
LOG_BYTES: Final = 16 << 20
"""The length at which a server's log is rotated; vLLM writes its load to it every ten seconds."""
HEALTH_INTERVAL_S: Final = 5.0
UNHEALTHY_CHECKS: Final = 3
"""After this many failed checks in a row, a server that still runs counts as hung."""
CRASHES: Final = 5
"""The most failures in a row. A server that was healthy for ``STABLE_S`` starts the count again."""
STABLE_S: Final = 120.0
FIRST_PAUSE_S: Final = 1.0
"""Before the first restart; doubled for each further one."""
LONGEST_PAUSE_S: Final = 60.0


def pause_before_s(failures: int) -> float:
    """Compute how long to wait with a restart after that many failures in a row."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (failures - 1))


class SupervisedServer:
    """A server of a release, from now until ``stop``. Only the proxy and this user reach it, through a Unix socket. A
    log of that name is set aside first. *changed* is set whenever ``state`` or ``backend`` changes."""

    def __init__(self, spec: ServerSpec, changed: threading.Event) -> None:
        self.release, self._replica, self.half = spec.directory.name, spec.replica, spec.half
        self._name = self.release
        if (count := spec.settings.replicas) > 1:
            self._name += f" (server {spec.replica + 1} of {count})"
        self.state = ServerState(release=self.release, replica=self._replica, state="starting")
        self.started = False
        """Whether it has been up."""
        self.error: SlipwayError | None = None
        """Why it failed for good."""
        self._spec, self._changed = spec, changed
        self._stop = threading.Event()
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            spec.log.replace(spec.log.with_suffix(PREVIOUS))
        self._thread = threading.Thread(target=self._supervise, name=self._name)
        self._thread.start()

    @property
    def backend(self) -> Backend | None:
        """Where it listens while it is up."""
        state = self.state
        return Backend(self.release, socket_of(state.url), self._replica) if state.state == "up" else None

    def stop(self) -> None:
        """Ask the server to end; return at once."""
        self._stop.set()

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def _supervise(self) -> None:
        try:
            self._serve_and_restart()
        except Interrupted:
            pass
        except SlipwayError as error:
            self._fail(error)
        except Exception as error:
            traceback.print_exc()  # nothing above a thread would report it
            self._fail(ServerFailed(f"{self._name}: {type(error).__name__}: {error}", hint=f"see {self._spec.log}"))

    def _serve_and_restart(self) -> NoReturn:
        """Serve, and restart the server after each failure, unless it failed before it was up the first time (a second
        try would end alike), or too often in a row."""
        check_replicas(self._spec.settings)
        self._spec = replace(self._spec, gpus=gpus_of(self._spec.settings, self._replica))
        failures, ready_at = 0, None
        while True:
            try:
                check_trust(self._spec.directory, self._spec.settings)
                with running(self._spec, self._stop) as server:
                    ready_at = time.monotonic()
                    meter = Meter(self._spec.log.parent, self._spec.name, self.release, server.url)
                    meter.read()
                    say(f"{self._name} is up, ready in {server.ready_s:.0f} s")
                    self.started = True
                    self._enter("up", url=server.url, pid=server.process.pid)
                    try:
                        self._watch(server, meter)
                    finally:
                        meter.read()
            except (ServerFailed, ServerKilled) as error:
                if ready_at is None and failures == 0 and isinstance(error, ServerFailed):
                    raise
                stable = ready_at is not None and time.monotonic() - ready_at > STABLE_S
                failures, ready_at = 1 if stable else failures + 1, None
                if failures > CRASHES:
                    text = f"vLLM failed {failures} times in a row; the last failure: {error}"
                    raise ServerFailed(text, hint=error.hint) from error
                pause_s = pause_before_s(failures)
                self._enter("down", message=str(error), hint=error.hint)
                say(f"{self._name}: {error}; restarting it in {pause_s:g} s (failure {failures} in a row)")
                self._pause(pause_s)

    def _watch(self, server: Server, meter: Meter) -> NoReturn:
        """Check the server's health, and read what it has counted, as long as it is well."""
        unhealthy = 0
        while True:
            due = time.monotonic() + HEALTH_INTERVAL_S
            while time.monotonic() < due:
                server.check_alive()
                self._pause(POLL_S)
            with contextlib.suppress(OSError):  # a log is no reason to stop serving
                rotate_log(self._spec.log)
            meter.read()
            unhealthy = 0 if healthy(server.url) else unhealthy + 1
            if unhealthy >= UNHEALTHY_CHECKS:
                server.check_alive()
                hint = f"see {server.log.path}"
                raise ServerFailed(f"vLLM runs but failed {unhealthy} health checks in a row", hint=hint)

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise Interrupted("asked to stop")

    def _fail(self, error: SlipwayError) -> None:
        self.error = error
        self._enter("failed", message=str(error), hint=error.hint)

    def _enter(self, state: State, **fields: Any) -> None:
        self.state = ServerState(release=self.release, replica=self._replica, state=state, **fields)
        self._changed.set()


def failure_of(servers: Sequence[SupervisedServer]) -> SlipwayError | None:
    """Why a release failed for good: one of its servers never started, or all failed later."""
    errors = [server.error for server in servers if server.error]
    over = len(errors) == len(servers) or not all(server.started for server in servers)
    return errors[0] if errors and over else None


def rotate_log(log: Path, limit: int = LOG_BYTES) -> None:
    """Copy a log that is longer than *limit* bytes aside and truncate it: its writer has it open to append."""
    if log.stat().st_size > limit:
        shutil.copyfile(log, log.with_suffix(PREVIOUS))
        os.truncate(log, 0)
