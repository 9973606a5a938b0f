"""One release's server, kept up in a thread of its own: watched, and started again when it dies or hangs."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn
from urllib.parse import urlsplit

from stages.parts.base.errors import Interrupted, ServerFailed, SlipwayError
from stages.parts.base.settings import Serving
from stages.parts.endpoint.envoy_config import Backend
from stages.parts.endpoint.record import DRAIN_S, ServerState, api_key, say
from stages.parts.engine.client import healthy
from stages.parts.engine.server import POLL_S, Server, running

PREVIOUS: Final = ".previous.log"
LOG_BYTES: Final = 16 << 20
"""Of a server's log; vLLM tells its load in it every ten seconds."""


@dataclass(frozen=True)
class Patience:
    """How long trouble is borne with."""

    health_interval_s: float = 5.0
    unhealthy_checks: int = 3
    """In a row; then a server that still runs counts as hung."""
    crashes: int = 5
    """In a row; a server that was healthy for ``stable_s`` starts the count again."""
    stable_s: float = 120.0
    first_pause_s: float = 1.0
    """Before the first restart; doubled for each further one."""
    longest_pause_s: float = 60.0


class KeptServer:
    """A server on *release*, from now until ``stop``. It listens on this machine only: clients go through the proxy.

    Args:
        name: what clients call the model.
        half: 0 or 1, of the machine's cores.
        log: its output; an earlier one is set aside.
        changed: set whenever ``state`` or ``backend`` has another value.
    """

    def __init__(
        self,
        release: Path,
        name: str,
        serving: Serving,
        *,
        half: int,
        log: Path,
        patience: Patience,
        changed: threading.Event,
    ) -> None:
        self.half = half
        self.release, self.state = release, ServerState(release=release.name, state="starting")
        self.backend: Backend | None = None
        """Where it listens, while it is up."""
        self.error: SlipwayError | None = None
        """Why it failed for good."""
        self._name, self._serving, self._log, self._patience, self._changed = name, serving, log, patience, changed
        self._stop = threading.Event()
        log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            log.replace(log.with_suffix(PREVIOUS))
        self._thread = threading.Thread(target=self._keep, name=release.name)
        self._thread.start()

    def stop(self) -> None:
        """Ask it to end; return at once."""
        self._stop.set()

    def ended(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait until nothing of it is left."""
        self._thread.join()

    def _keep(self) -> None:
        try:
            self._serve_again_and_again()
        except Interrupted:
            pass
        except SlipwayError as error:
            self._fail(error)
        except Exception as error:
            traceback.print_exc()  # nobody is above a thread
            self._fail(ServerFailed(f"{self.release.name}: {type(error).__name__}: {error}", hint=f"see {self._log}"))

    def _serve_again_and_again(self) -> NoReturn:
        """Raises: SlipwayError: it did not come up the first time (a second try would end alike), or failed too often
        in a row. Interrupted: it was asked to stop."""
        crashes, ready_at = 0, None
        while True:
            try:
                with self._running() as server:
                    ready_at = time.monotonic()
                    self._up(server)
                    self._watch(server)
            except ServerFailed as error:
                if ready_at is None and crashes == 0:
                    raise
                stable = ready_at is not None and time.monotonic() - ready_at > self._patience.stable_s
                crashes, ready_at = 1 if stable else crashes + 1, None
                if crashes > self._patience.crashes:
                    raise ServerFailed(
                        f"vLLM failed {crashes} times in a row, the last time so: {error}", hint=error.hint
                    ) from error
                pause_s = min(self._patience.longest_pause_s, self._patience.first_pause_s * 2 ** (crashes - 1))
                self._tell("down", str(error), error.hint)
                say(f"{self.release.name}: {error}; starting it again in {pause_s:g} s (failure {crashes} in a row)")
                self._pause(pause_s)

    def _running(self) -> contextlib.AbstractContextManager[Server]:
        return running(
            self.release,
            self._name,
            self._serving,
            log=self._log,
            api_key=api_key(),
            drain_s=DRAIN_S,
            log_requests=False,
            half=self.half,
            cancelled=self._stop,
        )

    def _watch(self, server: Server) -> NoReturn:
        """Look after a server for as long as it is well.

        Raises:
            ServerFailed: it ended, or hangs.
            Interrupted: it was asked to stop.
        """
        unhealthy = 0
        while True:
            due = time.monotonic() + self._patience.health_interval_s
            while time.monotonic() < due:
                server.check_alive()
                self._pause(POLL_S)
            with contextlib.suppress(OSError):  # a log is no reason to stop serving
                bound(self._log)
            unhealthy = 0 if healthy(server.url) else unhealthy + 1
            if unhealthy >= self._patience.unhealthy_checks:
                server.check_alive()
                raise ServerFailed(
                    f"vLLM runs but failed {unhealthy} health checks in a row", hint=f"see {server.log.path}"
                )

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise Interrupted("asked to stop")

    def _up(self, server: Server) -> None:
        say(f"{self.release.name} is up, ready in {server.ready_s:.0f} s")
        self.backend = Backend(self.release.name, urlsplit(server.url).hostname or "", server.port)
        self.state = ServerState(release=self.release.name, state="up", url=server.url, pid=server.process.pid)
        self._changed.set()

    def _fail(self, error: SlipwayError) -> None:
        self.error = error
        self._tell("failed", str(error), error.hint)

    def _tell(self, state: Literal["down", "failed"], message: str, hint: str) -> None:
        self.backend = None
        self.state = ServerState(release=self.release.name, state=state, message=message, hint=hint)
        self._changed.set()


def bound(log: Path, limit: int = LOG_BYTES) -> None:
    """Set what a log holds aside once it is longer than *limit* bytes, and begin it anew: who writes to it appends."""
    if log.stat().st_size > limit:
        shutil.copyfile(log, log.with_suffix(PREVIOUS))
        os.truncate(log, 0)
