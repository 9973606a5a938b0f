"""One machine as the target of a rollout: it writes what is wanted to ``serving.json``, and waits until that is in
force."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import psutil

from stages.parts.base.errors import ConfigError, Conflict, ServerFailed, SlipwayError, TransientError
from stages.parts.base.files import exclusive
from stages.parts.base.log import say
from stages.parts.base.serving_settings import AskedServing, Serving
from stages.parts.base.settings import parse
from stages.parts.base.store import ModelStore
from stages.parts.endpoint import access_log
from stages.parts.endpoint import endpoint as endpoints
from stages.parts.endpoint.database import usage_url
from stages.parts.endpoint.endpoint import SERVERS, WANTED, Endpoint, ServerState, Wanted, api_key, endpoint
from stages.parts.endpoint.envoy import Admin
from stages.parts.endpoint.metering import count_own
from stages.parts.endpoint.tls import tls_of
from stages.parts.records.rollout import LOCAL, Counters, together
from stages.parts.releases.pinned import pinned
from stages.parts.releases.release import Split, user
from stages.parts.vllm.arguments import check_replicas, serves_on_gpu
from stages.parts.vllm.client import read_metrics, socket_of
from stages.parts.vllm.prometheus import read_counters
from stages.parts.vllm.server_log import ServerLog
from stages.rollout.copies import CopyReader
from stages.rollout.slices import CopiedRequest
from stages.rollout.target import Replicas, needed, tried_already

IN_FORCE_TIMEOUT_S: Final = 60.0
ALONE: Final = 0.5
"""Above this share of a GPU's memory, a server leaves no room for a second one like it."""
POLL_S: Final = 0.05


class OneMachine:
    """See ``Target``. The endpoint is started if there is none, and resumed if a rollout was interrupted."""

    name = LOCAL

    def __init__(self, store: ModelStore, source: str, serving: AskedServing) -> None:
        self._store, self._source, self._asked = store, source, serving
        self._asked_last = 0
        self._copies = CopyReader(store.path / SERVERS / access_log.NAME)
        count_own(store)

    def split(self) -> Split:
        if (running := self._running()) is None:
            return Split(None)
        room, roles = fits_twice(self._asked), Wanted.read(self._store.path / WANTED)
        if roles and roles.replaced:
            return Split(roles.replaced, running.release, 100, room=room)
        if roles and roles.stable != running.release:  # a promotion is decided before it is in force
            return Split(roles.stable, roles.canary, roles.percent, roles.standby, room)
        return Split(running.release, running.canary, running.percent, running.standby, room)

    def who(self) -> str:
        return user()

    def announce(self, reason: str, note: str) -> None:
        """Do nothing: nobody watches anything but stderr and the history."""

    def changes(self, release: str) -> str:
        running = self._running()
        return ", ".join(self.changed_settings(running)) if running and running.release == release else ""

    def serving_of(self, release: str) -> Serving:
        return pinned(self._store, self._asked, release)

    def check_room(self, release: str) -> None:
        """See ``Target``. Where two releases do not fit, ``deploy`` replaces the stable one."""
        check_replicas(self.serving_of(release))

    def deploy(self, release: str) -> None:
        """See ``Target``. Unlike a canary, these are waited for: the first release, one that has to replace the stable
        one, and one that gets other settings. If it does not come up, the former state is restored."""
        if (running := self._running()) is None:
            endpoints.start(self._store, self._source, self._asked, Wanted(stable=release))
            return
        changed = self.changed_settings(running)
        if release == running.release:
            if changed:
                self._restart(running, Wanted(stable=release, replaced=self._replaced()))
            return
        if changed:
            text = f"the endpoint runs with settings other than the present ones: {', '.join(changed)}"
            raise Conflict(text, hint=self._way_out(running))
        if self._replaced():
            raise tried_already(running.release)
        if not fits_twice(self._asked):
            say(
                f"two servers do not fit on the GPU (serving.gpu_memory_utilization > 0.5): replacing {running.release}"
            )
            self._restart(running, Wanted(stable=release, replaced=running.release))
            return
        with self._wanted() as roles:
            if roles.canary not in (None, release):
                raise tried_already(roles.canary)
            if roles.canary is None:
                Wanted(stable=roles.stable, canary=release).write(self._store.path / WANTED)
        self._until(lambda endpoint: endpoint.canary == release)

    def ready(self, release: str) -> bool:
        servers = self._replicas(release)
        for server in servers:
            if server.state == "failed":
                raise ServerFailed(f"{release}: {server.message}", hint=server.hint)
        return all(server.state == "up" for server in servers)

    def waits_for(self, release: str) -> str:
        with contextlib.suppress(SlipwayError):
            return next((replica.message for replica in self._replicas(release) if replica.message), "")
        return ""

    def servers(self, release: str) -> tuple[int, int]:
        servers = self._replicas(release)
        return len(servers), sum(server.state == "up" for server in servers)

    def url(self, release: str) -> str:
        """Take the replicas' in turn."""
        up = self._up(release)
        self._asked_last += 1
        return up[self._asked_last % len(up)].url

    def prepare(self, release: str, percent: int) -> str:  # noqa: ARG002
        return ""  # its servers take as much as the stable release's do

    def shift(self, release: str, percent: int) -> None:
        self._give(release, percent=percent, copied=0)

    def cannot_copy(self) -> str:
        return ""

    def copy(self, release: str, percent: int) -> None:
        self._give(release, percent=0, copied=percent)

    def _give(self, release: str, **shares: int) -> None:
        with self._wanted() as roles:
            if roles.replaced and roles.stable == release:
                return  # it has replaced the stable release and has all requests
            _check_canary(roles, release)
            roles.model_copy(update=shares).write(self._store.path / WANTED)
        self._until(lambda now: now.canary == release and shares.items() <= vars(now).items())

    def copies(self, release: str) -> Sequence[CopiedRequest]:
        return self._copies.read(release)

    def promote(self, release: str) -> None:
        with self._wanted() as roles:
            if roles.stable == release:
                roles.model_copy(update={"replaced": None}).write(self._store.path / WANTED)
            else:
                _check_canary(roles, release)
                self._up(release)
                Wanted(stable=release, standby=roles.stable).write(self._store.path / WANTED)
        self._until(lambda endpoint: endpoint.release == release and endpoint.canary is None)

    def withdraw(self, release: str, *, first: bool = False) -> None:
        """See ``Target``. This returns once it gets no new request; it is removed when its requests have ended."""
        if (running := self._running()) is None:
            return
        with self._wanted() as roles:
            if roles.replaced and roles.stable == release:
                self._bring_back(running, Wanted(stable=roles.replaced), endpoints.secrets_of(running))
                return
            alone = roles.stable == release
            if alone and (not first or roles.canary):
                raise needed(self._store, release)
            if not alone:
                freed = {role: None for role in ("canary", "standby") if getattr(roles, role) == release}
                shares = dict.fromkeys(("percent", "copied"), 0) if "canary" in freed else {}
                roles.model_copy(update=freed | shares).write(self._store.path / WANTED)
        if alone:
            endpoints.stop(self._store)
        else:
            self._until(lambda endpoint: release not in (endpoint.canary, endpoint.standby))

    def counters(self, release: str) -> Counters:
        """Read vLLM's own counters, and Envoy's count of requests that never reached it, of all replicas."""
        servers, by_server = self._up(release), []
        hosts = Admin(self._store.path / SERVERS).hosts(release)
        for server in servers:
            counters = read_counters(read_metrics(server.url, server.release), f"{server.pid} on {server.url}")
            host = hosts.get(socket_of(server.url), Counter())
            # rq_error also counts the 5xx of clients' requests, but not of requests that did not pass through Envoy.
            failed = max(counters.failed + host["cx_connect_fail"], host["rq_error"])
            by_server.append(counters.model_copy(update={"failed": float(failed)}))
        return together(by_server)

    def replicas(self, release: str) -> Replicas:
        hint = "name a platform that serves on KServe: --platform"
        raise ConfigError(f"nothing scales {release}: one machine has the same servers under any load", hint=hint)

    def client_url(self) -> str:
        if (running := self._running()) is None:
            raise TransientError(f"{self._store.model} is not being served")
        return running.url

    def kill(self, release: str) -> Callable[[], bool]:
        server, *_ = self._up(release)
        for process in psutil.Process(server.pid).children():  # the pid is that of its guard process
            process.kill()

        def up_again() -> bool:
            running = endpoint(self._store)
            states = running.replicas(release) if running else ()
            replaced = (state for state in states if state.replica == server.replica and state.pid != server.pid)
            return any(state.state == "up" for state in replaced)

        return up_again

    def last_start(self, release: str) -> tuple[float | None, str]:
        def began(server: ServerState) -> float:
            return max(child.create_time() for child in psutil.Process(server.pid).children())

        newest = max(self._up(release), key=began)
        return began(newest), ServerLog(endpoints.log_of(self._store, release, newest.replica)).text()

    def _running(self) -> Endpoint | None:
        """Read the endpoint. If it died during a rollout, restart it, so that the rollout can continue or go back."""
        if running := endpoint(self._store):
            return running
        if endpoints.supervisor(self._store):
            raise TransientError(f"the endpoint of {self._store.model} is starting")
        roles = Wanted.read(self._store.path / WANTED)
        return endpoints.start(self._store, self._source, self._asked, roles) if roles and roles.tried else None

    def _replaced(self) -> str | None:
        roles = Wanted.read(self._store.path / WANTED)
        return roles.replaced if roles else None

    def _restart(self, running: Endpoint, roles: Wanted) -> None:
        """Serve *roles* instead of what is *running*, with the present settings. If that fails, what was served before
        is served again."""
        tls_of(self._asked)  # this and the next raise before anything is changed
        usage_url()
        former = Wanted.read(self._store.path / WANTED) or Wanted(stable=running.release)
        secrets = endpoints.secrets_of(running)
        try:
            endpoints.stop(self._store)
            endpoints.start(self._store, self._source, self._asked, roles)
        except BaseException as error:
            say(f"serving {running.release} again as before")
            self._bring_back(running, former, secrets)
            if isinstance(error, SlipwayError):
                error.args = (f"{error}; {running.release} is served again as before",)
            raise

    def _bring_back(self, running: Endpoint, roles: Wanted, secrets: Mapping[str, str]) -> None:
        """Serve *roles* with the settings and the secrets of what is, or was, *running*."""
        endpoints.stop(self._store)
        endpoints.start(self._store, self._source, settings_of(running), roles, secrets=secrets)

    def _way_out(self, running: Endpoint) -> str:
        """Choose the hint if the endpoint runs with other settings."""
        if running.protected and not api_key():
            return f"set {endpoints.API_KEY_VARIABLE} to the key that the endpoint requires"
        if api_key() and not running.protected:
            return f"the endpoint requires no key: unset {endpoints.API_KEY_VARIABLE}"
        return f"to apply the present ones: slipway serve {self._source}"

    def changed_settings(self, running: Endpoint) -> list[str]:
        """Name the settings in which *running* differs from the present ones, for the release that it serves, whose
        adapters are its own."""
        present, former = (
            {**pinned(self._store, settings, running.release).model_dump(mode="json"), "the API key": protected}
            for settings, protected in ((self._asked, bool(api_key())), (settings_of(running), running.protected))
        )
        return [name for name, value in present.items() if former[name] != value and name != "adapters"]

    @contextlib.contextmanager
    def _wanted(self) -> Iterator[Wanted]:
        """Read what is wanted now, and lock it against changes by others."""
        with exclusive(self._store.lock("serving"), f"what is served of {self._store.model}"):
            if self._running() is None or (roles := Wanted.read(self._store.path / WANTED)) is None:
                raise Conflict(f"{self._store.model} is not being served", hint=f"slipway serve {self._source}")
            yield roles

    def _until(self, in_force: Callable[[Endpoint], bool]) -> None:
        deadline = time.monotonic() + IN_FORCE_TIMEOUT_S
        while True:
            running = endpoint(self._store)
            if running and in_force(running):
                return
            if running is None and endpoints.supervisor(self._store) is None:
                hint = "see endpoint.log in its folder"
                raise TransientError(f"the endpoint of {self._store.model} ended", hint=hint)
            if time.monotonic() > deadline:
                raise TransientError(f"the change was not in force within {IN_FORCE_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)

    def _replicas(self, release: str) -> tuple[ServerState, ...]:
        running = self._running()
        if servers := running.replicas(release) if running else ():
            return servers
        raise TransientError(f"{release} is not being served")

    def _up(self, release: str) -> list[ServerState]:
        """List the replicas that did not fail for good; raise TransientError if one of them is not up: one that is left
        out and comes back would look like a restart."""
        servers = self._replicas(release)
        usable = [server for server in servers if server.state != "failed"]
        if not usable:
            raise ServerFailed(f"{release}: {servers[0].message}", hint=servers[0].hint)
        for server in usable:
            if server.state != "up":
                raise TransientError(f"{release} is {server.state}{f': {server.message}' if server.message else ''}")
        return usable


def _check_canary(roles: Wanted, release: str) -> None:
    if roles.canary != release:
        raise Conflict(f"{release} is not the canary, but {roles.canary} is", hint="deploy it first")


def fits_twice(serving: AskedServing) -> bool:
    """Tell whether a canary's server fits beside the stable one's: on a GPU, each takes its share of the memory."""
    return not serves_on_gpu() or serving.gpu_memory_utilization <= ALONE


def settings_of(running: Endpoint) -> AskedServing:
    earlier = {"tool_parser": "none", "reasoning_parser": "none"}  # of an endpoint that an earlier version started
    return parse(AskedServing, earlier | running.serving, "endpoint.json")
