"""Keeps an endpoint in the state that ``serving.json`` asks for: the vLLM servers of each release and Envoy in front of
them, at one address.

``serving.json`` may change at any time. New servers come up beside the old ones, traffic moves, and a server is stopped
only once it answers no more requests. ``endpoint.json`` says what is in force.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import UTC, datetime
from typing import Final, NoReturn

from stages.parts.base.errors import (
    ConfigError,
    NotEnoughSpace,
    NotWritable,
    ServerFailed,
    TransientError,
    VolumeFailed,
    disk_errors,
)
from stages.parts.base.log import say
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import ModelStore
from stages.parts.endpoint import endpoint as endpoints
from stages.parts.endpoint.database import usage_url
from stages.parts.endpoint.door import Door
from stages.parts.endpoint.envoy import Proxy, proxying
from stages.parts.endpoint.metering import importing
from stages.parts.endpoint.routing import Balance, Routing, routing
from stages.parts.endpoint.shared import SharedProcess
from stages.parts.endpoint.supervised_server import CRASHES, FIRST_PAUSE_S, SupervisedServer, failure_of
from stages.parts.endpoint.tls import tls_of
from stages.parts.model.adapter import adapters_in
from stages.parts.releases.pinned import pinned
from stages.parts.vllm.client import reachable
from stages.parts.vllm.server import ServerSpec, reserved_port

POLL_S: Final = 0.1
PAUSE_S: Final = 5.0
WITHDRAWN_DRAIN_S: Final = 600
"""A server that gets no new requests may finish the others within this time; the endpoint keeps serving meanwhile."""


def serve_foreground(store: ModelStore, serving: AskedServing, *, resume: bool = False) -> None:
    """Serve the published release or, to *resume*, what ``serving.json`` asks for, until interrupted; a rollout that
    was under way is resumed in any case.

    Raises as ``supervise``; NothingToServe if no release is published, Busy if another supervisor serves this model.
    """
    with endpoints.supervising(store):
        former = endpoints.Wanted.read(store.path / endpoints.WANTED)
        complete = former is not None and all((store.releases / release).is_dir() for release in former.releases())
        if former is None or not complete or not (resume or former.tried):
            endpoints.Wanted(stable=endpoints.published(store).name).write(store.path / endpoints.WANTED)
        try:
            supervise(store, serving)
        finally:
            (store.path / endpoints.RECORD).unlink(missing_ok=True)


def supervise(store: ModelStore, serving: AskedServing) -> NoReturn:
    """Serve what ``serving.json`` asks for, until a signal or an error.

    Raises:
        ConfigError: its certificate or the usage database's URL can't be used, or it would be plain HTTP for other
            machines.
        Conflict, PortInUse: as ``SharedProcess``, or something else listens on ``serving.port``; nothing was started.
        ServerFailed: the stable release did not come up the first time, or crashed too often in a row, and no
            standby is up.
    """
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port(serving.host, serving.port))
        supervisor = _Supervisor(store, serving, port)
        stack.enter_context(importing(store, usage_url()))  # until after the servers' last readings
        stack.callback(supervisor.stop)
        while True:
            try:
                with disk_errors(store.path):
                    supervisor.converge()
            except (NotEnoughSpace, NotWritable, VolumeFailed) as error:
                if not supervisor.serving:
                    raise
                say(f"{error}; serving as before")  # a disk is no reason to stop a working endpoint
                time.sleep(PAUSE_S)
            supervisor.changed.wait(POLL_S)
            supervisor.changed.clear()


class _Supervisor:
    """The servers, the proxy (once a server is up), and what is in force."""

    def __init__(self, store: ModelStore, serving: AskedServing, port: int) -> None:
        self._store, self._serving, self._port = store, serving, port
        self._tls = tls_of(serving)
        self._shared = SharedProcess(store.root, serving)
        self._door = Door(store.root, store.model, endpoints.api_key())
        self._balance = Balance(serving.replicas, serving.affinity, serving.request_timeout_s)
        self._servers: dict[str, list[SupervisedServer]] = {}
        self._draining: dict[str, float] = {}
        """When each release lost its traffic."""
        self._stopping: list[SupervisedServer] = []
        self._proxy: Proxy | None = None
        self._proxy_stack = contextlib.ExitStack()
        self._proxy_failures = 0
        """In a row."""
        self._started_at = datetime.now(UTC)
        self._reported: endpoints.Endpoint | None = None
        self.changed = threading.Event()

    def converge(self) -> None:
        """Take one step towards what ``serving.json`` asks for."""
        wanted = endpoints.Wanted.read(self._store.path / endpoints.WANTED)
        if wanted is None:  # the endpoint is about to be stopped
            return
        for release in wanted.releases():
            if release not in self._servers:
                # On the half of the cores that fewer of the other releases use.
                halves = [self._servers[other][0].half for other in wanted.releases() if other in self._servers]
                self._start(release, min((0, 1), key=halves.count))
        stable = self._servers[wanted.stable]
        up = {name: [server.backend for server in every if server.backend] for name, every in self._servers.items()}
        if (error := failure_of(stable)) and not up.get(wanted.standby or ""):
            raise error
        if self._proxy is None and not all(server.started for server in stable) and not self.serving:
            return
        self._shared.keep()
        if self._route(routing(up, up, wanted, self._balance)):
            self._retire(wanted)
            self._report(wanted)

    @property
    def serving(self) -> bool:
        """Whether clients have been told the address."""
        return self._reported is not None

    def stop(self) -> None:
        """Let requests in flight finish, then end everything."""
        servers = [server for servers in self._servers.values() for server in servers] + self._stopping
        try:
            with contextlib.suppress(TransientError):
                if self._proxy:
                    if waiting := self._proxy.in_flight():
                        say(f"waiting at most {endpoints.DRAIN_S} s for {waiting} requests to finish")
                    self._proxy.drain(endpoints.DRAIN_S)
        finally:
            for server in servers:
                server.stop()
            self._proxy_stack.close()
        for server in servers:
            server.join()

    def _start(self, release: str, half: int) -> None:
        settings = pinned(self._store, self._serving, release)
        say(f"starting {release}{f' on {settings.replicas} servers' if settings.replicas > 1 else ''}")
        adapters = adapters_in(self._store.releases / release)
        self._door.adapters |= adapters.keys()
        self._servers[release] = []
        for replica in range(settings.replicas):
            spec = ServerSpec(
                self._store.releases / release,
                self._store.model,
                settings,
                log=endpoints.log_of(self._store, release, replica),
                unix_socket=True,
                for_clients=True,
                drain_s=endpoints.DRAIN_S,
                log_requests=False,
                half=half,
                replica=replica,
                adapters=adapters,
            )
            self._servers[release].append(SupervisedServer(spec, self.changed))

    def _route(self, wanted: Routing) -> bool:
        """Bring the split into force, and return whether it is. This starts the proxy the first time, and again if it
        dies."""
        try:
            if self._proxy:
                self._proxy.check_alive()
                try:
                    self._proxy.follow_certificate()
                except ConfigError as error:
                    say(f"{error}; serving with the one before")
                self._proxy.apply(wanted)
            else:
                proxy = proxying(
                    (self._serving.host, self._port),
                    wanted,
                    self._door,
                    folder=self._store.path / endpoints.SERVERS,
                    log=self._store.path / endpoints.LOG,
                    tls=self._tls,
                )
                self._proxy = self._proxy_stack.enter_context(proxy)
        except ServerFailed as error:
            self._proxy_failures += 1
            if not self.serving or self._proxy_failures > CRASHES:
                raise
            say(f"{error}; restarting Envoy (failure {self._proxy_failures} in a row)")
            self._proxy = None
            self._proxy_stack.close()
            time.sleep(FIRST_PAUSE_S * (self._proxy_failures - 1))
            return False
        self._proxy_failures = 0
        return True

    def _retire(self, wanted: endpoints.Wanted) -> None:
        """Stop the servers that are no longer wanted, once they have answered the requests that they have."""
        for release in [server for server in self._servers if server in wanted.releases()]:
            self._draining.pop(release, None)
        for release in [server for server in self._servers if server not in wanted.releases()]:
            since = self._draining.setdefault(release, time.monotonic())
            if self._busy(release) and time.monotonic() - since < WITHDRAWN_DRAIN_S:
                continue
            say(f"stopping {release}")
            del self._draining[release]
            servers = self._servers.pop(release)
            for server in servers:
                server.stop()
            self._stopping += servers
        self._stopping = [server for server in self._stopping if not server.ended()]

    def _busy(self, release: str) -> bool:
        try:
            return self._proxy is not None and self._proxy.in_flight(release) > 0
        except TransientError:
            return True

    def _report(self, wanted: endpoints.Wanted) -> None:
        record = endpoints.Endpoint(
            pid=os.getpid(),
            url=f"{'https' if self._tls else 'http'}://{reachable(self._serving.host)}:{self._port}",
            model=self._store.model,
            release=wanted.stable,
            **wanted.model_dump(include=set(endpoints.BesideStable.model_fields)),
            servers=tuple(server.state for servers in self._servers.values() for server in servers),
            log=str(self._store.path / endpoints.LOG),
            serving=self._serving.model_dump(mode="json"),
            protected=bool(endpoints.api_key()),
            started_at=self._started_at,
        )
        if record == self._reported:
            return
        record.write(self._store.path / endpoints.RECORD)
        if self._reported is None:
            say(f"serving {record.release} as {record.model!r} on {record.url}/v1")
            if port := self._serving.shared_port:
                say(f"and with all models of this store on port {port}")
        elif any(
            getattr(record, field) != getattr(self._reported, field)
            for field in ("release", "canary", "percent", "copied")
        ):
            canary = f", {wanted.percent} % to {wanted.canary}" if wanted.canary else ""
            copied = f", copies of {wanted.copied} %" if wanted.copied else ""
            say(f"serving {wanted.stable}{canary}{copied}")
        self._reported = record
