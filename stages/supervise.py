"""Keeps vLLM on one release: asks for its health, starts it again when it dies or hangs, stops it in the end."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NoReturn

from stages.endpoint import LOG, RECORD, Endpoint, api_key, published, supervising
from stages.errors import ServerFailed
from stages.server import POLL_S, Server, healthy, running
from stages.settings import Serving
from stages.store import ModelStore

DRAIN_S: Final = 10
"""Requests in flight may finish within this time when the endpoint stops."""


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


def serve_foreground(store: ModelStore, serving: Serving, patience: Patience = Patience()) -> None:
    """Serve the published release until interrupted.

    Raises:
        NothingToServe: no release is published.
        Busy: another supervisor serves this model.
        PortInUse, ServerFailed: see ``running``.
    """
    release = published(store)
    with supervising(store):
        try:
            supervise(store, release, serving, patience)
        finally:
            (store.path / RECORD).unlink(missing_ok=True)


def supervise(store: ModelStore, release: Path, asked: Serving, patience: Patience) -> NoReturn:
    """Keep a server on *release*.

    Raises:
        ServerFailed: it did not come up the first time (a second try would end alike), or crashed too often in a row.
    """
    port, crashes = asked.port, 0
    while True:
        ready_at: float | None = None
        try:
            with running(
                release,
                store.model,
                asked,
                log=store.path / LOG,
                host=asked.host,
                port=port,
                api_key=api_key(),
                drain_s=DRAIN_S,
            ) as server:
                ready_at, port = time.monotonic(), server.port  # clients know this one now
                write_record(store, release, asked, server)
                say(f"serving {release.name} as {store.model!r} on {server.url}/v1, ready in {server.ready_s:.0f} s")
                watch(server, patience)
        except ServerFailed as error:
            if ready_at is None and crashes == 0:
                raise
            stable = ready_at is not None and time.monotonic() - ready_at > patience.stable_s
            crashes = 1 if stable else crashes + 1
            if crashes > patience.crashes:
                raise ServerFailed(
                    f"vLLM failed {crashes} times in a row, the last time so: {error}", hint=error.hint
                ) from error
            pause_s = min(patience.longest_pause_s, patience.first_pause_s * 2 ** (crashes - 1))
            say(f"{error}; starting it again in {pause_s:g} s (failure {crashes} in a row)")
            time.sleep(pause_s)


def watch(server: Server, patience: Patience) -> NoReturn:
    """Look after a server for as long as it is well.

    Raises:
        ServerFailed: it ended, or hangs.
    """
    unhealthy = 0
    while True:
        due = time.monotonic() + patience.health_interval_s
        while time.monotonic() < due:
            server.check_alive()
            time.sleep(POLL_S)
        unhealthy = 0 if healthy(server.url) else unhealthy + 1
        if unhealthy >= patience.unhealthy_checks:
            server.check_alive()
            raise ServerFailed(
                f"vLLM runs but failed {unhealthy} health checks in a row", hint=f"see {server.log.path}"
            )


def write_record(store: ModelStore, release: Path, asked: Serving, server: Server) -> None:
    Endpoint(
        pid=os.getpid(),
        url=server.url,
        model=server.name,
        release=release.name,
        log=str(store.path / LOG),
        serving=asked.model_dump(mode="json"),
        protected=bool(server.api_key),
        started_at=datetime.now(UTC),
    ).write(store.path / RECORD)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
