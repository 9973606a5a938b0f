"""A model's endpoint on this machine: what it should serve, what it serves, and whether it runs; its start and its end.

Its supervisor holds the model's ``endpoint`` lock as long as its process exists, however that ends, so that a record
left by a process that is gone is not mistaken for an endpoint.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

import psutil

from stages.parts.base import program
from stages.parts.base.errors import Busy, NothingToServe, PortInUse, ServerFailed
from stages.parts.base.files import end_holder, exclusive, holder
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import STORE_VARIABLE, ModelStore, Record
from stages.parts.endpoint.database import URL_VARIABLE, usage_url
from stages.parts.endpoint.tls import tls_of
from stages.parts.records.rollout import LOCAL, read_journal

API_KEY_VARIABLE: Final = "SLIPWAY_API_KEY"
RECORD: Final = "endpoint.json"
LOG: Final = "endpoint.log"
PREVIOUS_LOG: Final = "endpoint.previous.log"
WANTED: Final = "serving.json"
SERVERS: Final = "serving"
"""The folder for files of the running endpoint: each server's log, and Envoy's files."""
LOCK: Final = "endpoint"
LOCK_PROBES: Final = 10
"""Tries to get the lock: a process that only reads it holds it for an instant, which is not another supervisor."""
POLL_S: Final = 0.25
DRAIN_S: Final = 30
"""Requests in flight may finish within this time when the endpoint stops."""
STOP_TIMEOUT_S: Final = 60.0 + DRAIN_S
State = Literal["starting", "up", "down", "failed"]


class BesideStable(Record):
    """What is served beside the stable release, and of which requests."""

    canary: str | None = None
    percent: int = 0
    """The canary's share of new requests."""
    copied: int = 0
    """The share of the clients' new requests, in %, of which the canary gets copies; nobody gets its answers."""
    standby: str | None = None
    """An earlier stable release that is kept warm."""


class Wanted(BesideStable):
    """``serving.json``: what is to be served. The supervisor brings it into force, now or when it is started again."""

    stable: str
    replaced: str | None = None
    """The release that the stable one has replaced because both do not fit; it returns if that one is withdrawn."""

    @property
    def tried(self) -> bool:
        """Whether a rollout is under way."""
        return self.canary is not None or self.replaced is not None

    def releases(self) -> list[str]:
        return [release for release in (self.stable, self.canary, self.standby) if release is not None]


class ServerState(Record):
    """A server of a release, as the supervisor knows it."""

    release: str
    replica: int = 0
    """Its number within the release."""
    state: State
    """down: it was up, and is being restarted. failed: it is not restarted."""
    url: str = ""
    """This server's own base URL, without ``/v1``: ``unix://localhost`` and its socket, which only this user can open.
    It changes when the server is restarted, and is empty unless it is up."""
    pid: int | None = None
    message: str = ""
    """Why it is down or failed."""
    hint: str = ""


class Endpoint(BesideStable):
    """``endpoint.json``: what serves a model; written once it has answered, and whenever it changes."""

    pid: int
    """The supervisor's process; SIGTERM stops the endpoint."""
    url: str
    """Base URL of the OpenAI-compatible API, without ``/v1``: the proxy's, which does not change."""
    model: str
    release: str
    """The stable one."""
    servers: tuple[ServerState, ...] = ()
    log: str
    serving: dict[str, Any]
    """As they were asked for: where they leave something open, each release is served as it was measured."""
    protected: bool
    """Whether clients need an API key."""
    started_at: datetime

    def replicas(self, release: str) -> tuple[ServerState, ...]:
        return tuple(server for server in self.servers if server.release == release)

    def server(self, release: str) -> ServerState | None:
        """Select a server of a release, one that is up if there is any."""
        return min(self.replicas(release), key=lambda server: server.state != "up", default=None)


def log_of(store: ModelStore, release: str, replica: int) -> Path:
    """Name the log of a release's server: ``<release>.log``, ``<release>.2.log`` of the second replica, and so on."""
    return store.path / SERVERS / f"{release}{f'.{replica + 1}' if replica else ''}.log"


def endpoint(store: ModelStore) -> Endpoint | None:
    """Read the endpoint of a running supervisor; None if none runs."""
    pid = supervisor(store)
    record = Endpoint.read(store.path / RECORD) if pid else None
    return record if record and record.pid == pid else None


def serving_here(root: Path) -> list[Endpoint]:
    """Find the running endpoints of all models in the store at *root*: they share this machine with whatever else
    runs."""
    records = [Endpoint.read(path) for path in sorted(root.glob(f"*/{RECORD}"))]
    endpoints = [endpoint(ModelStore(root, record.model)) for record in records if record]
    return [running for running in endpoints if running]


def start(
    store: ModelStore, source: str, serving: AskedServing, wanted: Wanted, *, secrets: Mapping[str, str] | None = None
) -> Endpoint:
    """Serve what is *wanted* by a supervisor in a session of its own, which outlives this process, and return once the
    stable release answers. If this is interrupted, it is stopped again. *source* is the model as the user named it;
    without *secrets* (see ``secrets_of``), those of this process count.

    Raises:
        ConfigError: see ``tls_of`` and ``usage_url``.
        PortInUse: something else listens on ``serving.port``.
        ServerFailed: it could not be served.
    """
    from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

    from stages.parts.vllm.server import reserved_port
    from stages.parts.vllm.server_log import ServerLog

    tls_of(serving)
    secrets = {URL_VARIABLE: usage_url()} if secrets is None else secrets
    # The proxy of a supervisor that ended a moment ago, or was killed, may still be ending.
    over = stop_after_delay(STOP_TIMEOUT_S if (store.path / WANTED).exists() else 0.0)
    in_use = retry_if_exception_type(PortInUse)
    for attempt in Retrying(retry=in_use, stop=over, wait=wait_fixed(POLL_S), reraise=True):
        with attempt, reserved_port(serving.host, serving.port):
            pass
    log = store.path / LOG
    with contextlib.suppress(FileNotFoundError):
        log.replace(log.with_name(PREVIOUS_LOG))
    (store.path / RECORD).unlink(missing_ok=True)
    wanted.write(store.path / WANTED)
    failure = store.path / SERVERS / program.FAILURE
    failure.unlink(missing_ok=True)
    command = [sys.executable, "-m", "stages.serve", "--foreground", "--resume", "--model", source]
    variables = program.without_secrets(os.environ, f"PG|{API_KEY_VARIABLE}")
    variables |= {STORE_VARIABLE: str(store.root), program.OUTPUTS_VARIABLE: str(failure.parent)}
    variables.pop(program.RUN_VARIABLE, None)  # the run ends before the endpoint does
    with log.open("ab") as output:
        child = subprocess.Popen(
            [*command, "--serving", serving.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**variables, **secrets},
            start_new_session=True,
        )
    try:
        while child.poll() is None:
            if (running := endpoint(store)) and running.pid == child.pid:
                return running
            time.sleep(POLL_S)
    except BaseException:
        child.terminate()
        child.wait()
        raise
    if (error := program.StageFailure.read(failure, child.returncode)) is None:  # it was killed
        raise ServerFailed(f"the endpoint ended: {ServerLog(log).cause()}", hint=f"see {log}")
    raise ServerFailed(error.message, hint=error.hint or f"see {log}")


def secrets_of(running: Endpoint) -> dict[str, str]:
    """Read the environment variables of a running endpoint that no file holds: the key that it requires, and where it
    puts its usage."""
    try:
        variables = psutil.Process(running.pid).environ()
    except psutil.Error:
        variables = dict(os.environ)
    return {name: variables.get(name, "") for name in (API_KEY_VARIABLE, URL_VARIABLE)}


def stop(store: ModelStore) -> bool:
    """Stop the endpoint and wait until none of its processes is left; False if nothing was being served. This also
    forgets a canary: the next endpoint serves only the published release. Raises ServerFailed if it did not end."""
    if pid := supervisor(store):
        end_holder(store.lock(LOCK), pid, f"the endpoint of {store.model}")
    (store.path / WANTED).unlink(missing_ok=True)
    if pid is None:
        return False
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while supervisor(store) == pid:
        if time.monotonic() > deadline:
            raise ServerFailed(f"the endpoint did not stop within {STOP_TIMEOUT_S:.0f} s", hint=f"kill -9 {pid}")
        time.sleep(POLL_S)
    with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        psutil.Process(pid).wait(STOP_TIMEOUT_S)  # the lock is released a moment before the process ends
    return True


def supervisor(store: ModelStore) -> int | None:
    """Find the process that holds the endpoint's lock and has written its id there; None if none does."""
    return holder(store.lock(LOCK)) or None


@contextlib.contextmanager
def supervising(store: ModelStore) -> Iterator[None]:
    """Hold the lock of the only supervisor of the model's endpoint; Busy if there is another."""
    from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

    lock, busy, enough = store.lock(LOCK), retry_if_exception_type(Busy), stop_after_attempt(LOCK_PROBES)
    with contextlib.ExitStack() as stack:
        try:
            for attempt in Retrying(retry=busy, stop=enough, wait=wait_fixed(POLL_S), reraise=True):
                with attempt:
                    stack.enter_context(exclusive(lock, f"the endpoint of {store.model}", wait=False))
        except Busy as error:
            error.hint = f"stop it first: slipway serve {store.model} --stop"
            raise
        lock.write_text(str(os.getpid()))  # in place: a renamed file would be a different lock
        yield


def published(store: ModelStore) -> Path:
    """Find the release that ``production`` points to, by its own path, since the link may move while it is served;
    raise NothingToServe if there is none."""
    release = store.production.resolve()
    if not store.production.is_symlink() or not release.is_dir():
        raise NothingToServe(f"no release of {store.model} is published", hint=f"first: slipway run {store.model}")
    return release


def api_key() -> str:
    return os.environ.get(API_KEY_VARIABLE, "")


def being_served(store: ModelStore) -> bool:
    """Whether clients may be using a release now: here, or on the platform of the last rollout."""
    last = read_journal(store)
    elsewhere = last is not None and last.target != LOCAL and (last.stable is not None or last.state == "promoted")
    return elsewhere or endpoint(store) is not None
