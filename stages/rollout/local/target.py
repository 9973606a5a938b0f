"""One machine as the target of a rollout: says in ``serving.json`` what is wanted, and waits until it is in force."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final
from urllib.parse import urlsplit

import httpx

from stages.errors import Conflict, ServerFailed, TransientError
from stages.rollout.local.detached import start
from stages.rollout.local.envoy import Admin
from stages.rollout.target import Counters, Split
from stages.rollout.vllm_metrics import counters
from stages.serve.endpoint import SERVERS, WANTED, Endpoint, ServerState, Wanted, api_key, endpoint, stop, supervisor
from stages.server import HEALTH_TIMEOUT_S, http
from stages.settings import Serving
from stages.store import ModelStore, exclusive

IN_FORCE_TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.05


class OneMachine:
    """See ``Target``. The endpoint is started where there is none, and taken up again where a rollout was cut off."""

    def __init__(self, store: ModelStore, source: str, serving: Serving) -> None:
        self._store, self._source, self._serving = store, source, serving

    def split(self) -> Split:
        found = self._living()
        if found is None:
            return Split(None)
        return Split(found.release, found.canary, found.percent, found.standby)

    def deploy(self, release: str) -> None:
        """The first one is waited for: an endpoint without a server would be none."""
        found = self._living()
        if found is None:
            start(self._store, self._source, self._serving, Wanted(stable=release))
            return
        changed = self.changed_settings(found)
        if release == found.release:
            if changed:
                stop(self._store)
                start(self._store, self._source, self._serving, Wanted(stable=release))
            return
        if changed:
            raise Conflict(
                f"the endpoint runs with other settings than are asked for now: {', '.join(changed)}",
                hint=f"slipway serve {self._source} --stop, then serve it again",
            )
        with self._wanted() as wanted:
            if wanted.canary not in (None, release):
                raise Conflict(f"{wanted.canary} is being rolled out already", hint="end that rollout first")
            if wanted.canary is None:
                self._want(Wanted(stable=wanted.stable, canary=release))
        self._until(lambda now: now.canary == release)

    def ready(self, release: str) -> bool:
        return self._server(release).state == "up"

    def url(self, release: str) -> str:
        return self._up(release).url

    def shift(self, release: str, percent: int) -> None:
        with self._wanted() as wanted:
            if wanted.canary != release:
                raise Conflict(f"{release} is not the canary, but {wanted.canary} is", hint="deploy it first")
            self._want(wanted.model_copy(update={"percent": percent}))
        self._until(lambda now: (now.canary, now.percent) == (release, percent))

    def promote(self, release: str) -> None:
        with self._wanted() as wanted:
            if wanted.stable != release:
                if wanted.canary != release:
                    raise Conflict(f"{release} is not the canary, but {wanted.canary} is", hint="deploy it first")
                self._up(release)
                self._want(Wanted(stable=release, standby=wanted.stable))
        self._until(lambda now: now.release == release and now.canary is None)

    def withdraw(self, release: str) -> None:
        """Returns once it gets no new request; it is removed when it has answered what it was sent."""
        if self._living() is None:
            return
        with self._wanted() as wanted:
            if wanted.stable == release:
                alone = wanted.canary is None
                if not alone:
                    raise Conflict(f"{release} is the stable release", hint="promote the other one, or withdraw that")
            else:
                alone = False
                gone = {role: None for role in ("canary", "standby") if getattr(wanted, role) == release}
                left = wanted.model_copy(update={**gone, "percent": 0 if "canary" in gone else wanted.percent})
                self._want(left)
        if alone:
            stop(self._store)
        else:
            self._until(lambda now: release not in (now.canary, now.standby))

    def counters(self, release: str) -> Counters:
        """vLLM's own, and what never reached it by Envoy's count."""
        server = self._up(release)
        try:
            text = http().get(f"{server.url}/metrics", timeout=HEALTH_TIMEOUT_S).raise_for_status().text
        except httpx.HTTPError as error:
            raise TransientError(f"{release} does not tell its metrics: {type(error).__name__}: {error}") from error
        told = counters(text, f"{server.pid} on {server.url}")
        host = Admin(self._store.path / SERVERS).hosts(release).get(urlsplit(server.url).port or 0, {})
        # rq_error holds the 5xx of clients too, but not those of requests that went past Envoy.
        failed = max(told.failed + host.get("cx_connect_fail", 0), host.get("rq_error", 0))
        return replace(told, failed=float(failed))

    def endpoint(self) -> str:
        found = self._living()
        if found is None:
            raise TransientError(f"{self._store.model} is not being served")
        return found.url

    def _living(self) -> Endpoint | None:
        """The endpoint; one that died during a rollout is started again, so that the rollout can go on or back."""
        if found := endpoint(self._store):
            return found
        if supervisor(self._store):
            raise TransientError(f"the endpoint of {self._store.model} is starting")
        wanted = Wanted.read(self._store.path / WANTED)
        return start(self._store, self._source, self._serving, wanted) if wanted and wanted.canary else None

    def changed_settings(self, found: Endpoint) -> list[str]:
        """The names of settings that *found* does not run with, as they are asked for now."""
        asked = {**self._serving.model_dump(mode="json"), "the API key": bool(api_key())}
        runs = {**found.serving, "the API key": found.protected}
        return [name for name, value in asked.items() if runs.get(name) != value]

    @contextlib.contextmanager
    def _wanted(self) -> Iterator[Wanted]:
        """What is wanted now, while nobody else changes it."""
        with exclusive(self._store.lock("serving"), f"what is served of {self._store.model}"):
            if self._living() is None or (wanted := Wanted.read(self._store.path / WANTED)) is None:
                raise Conflict(f"{self._store.model} is not being served", hint=f"slipway serve {self._source}")
            yield wanted

    def _want(self, wanted: Wanted) -> None:
        wanted.write(self._store.path / WANTED)

    def _until(self, in_force: Callable[[Endpoint], bool]) -> None:
        deadline = time.monotonic() + IN_FORCE_TIMEOUT_S
        while True:
            found = endpoint(self._store)
            if found and in_force(found):
                return
            if found is None and supervisor(self._store) is None:
                raise TransientError(
                    f"the endpoint of {self._store.model} ended", hint="see endpoint.log in its folder"
                )
            if time.monotonic() > deadline:
                raise TransientError(f"what is asked for was not in force within {IN_FORCE_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)

    def _server(self, release: str) -> ServerState:
        """Raises: ServerFailed: it failed for good. TransientError: the endpoint says nothing of it."""
        found = self._living()
        server = found.server(release) if found else None
        if server is None:
            raise TransientError(f"{release} is not being served")
        if server.state == "failed":
            raise ServerFailed(f"{release}: {server.message}", hint=server.hint)
        return server

    def _up(self, release: str) -> ServerState:
        """Raises: also TransientError: it is starting, or being started again."""
        server = self._server(release)
        if server.state != "up":
            raise TransientError(f"{release} is {server.state}{f': {server.message}' if server.message else ''}")
        return server
