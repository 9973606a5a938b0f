"""The addresses that the models of a store on this machine share: one for clients, where the model that a request names
decides which endpoint gets it, and one at which Prometheus reads the metrics of all servers.

They have a process of their own, so that no endpoint's end cuts requests to another. Each supervisor whose settings ask
for it starts it if it does not run; it ends with the store's last supervisor. Keys, limits and usage stay with the
endpoints, through which all requests pass that name a model.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from prometheus_client import Metric, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from stages.parts.base import program
from stages.parts.base.errors import Conflict, SlipwayError, TransientError
from stages.parts.base.files import digest_of, exclusive, holder, swap_link, write_text
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.settings import parse_json
from stages.parts.base.store import STORE_VARIABLE, ModelStore, store_root
from stages.parts.endpoint.door import Door
from stages.parts.endpoint.endpoint import LOCK, SERVERS, WANTED, Wanted, api_key, serving_here
from stages.parts.endpoint.envoy import SHARED_SOCKET, proxying
from stages.parts.endpoint.routing import Backend, Routing
from stages.parts.endpoint.supervised_server import pause_before_s
from stages.parts.endpoint.tls import tls_of
from stages.parts.model.adapter import adapters_in
from stages.parts.vllm.client import read_metrics
from stages.parts.vllm.server import reserved_port

FOLDER: Final = ".shared"
"""In the store: Envoy's files, the lock, and the log."""
LOG: Final = "shared.log"
SETTINGS: Final = "settings-that-run.json"
FIELDS: Final = {"shared_port", "metrics_address", "host", "tls_certificate", "tls_key"}
POLL_S: Final = 0.5


class SharedProcess:
    """The process of the shared addresses, as a supervisor with these settings keeps it up. Raises Conflict if it runs
    with others, PortInUse if something else listens on ``serving.shared_port``."""

    def __init__(self, root: Path, serving: AskedServing) -> None:
        self._root, self._folder, self._serving = root, root / FOLDER, serving
        self._child: subprocess.Popen[bytes] | None = None
        self._due, self._starts = 0.0, 0
        if not (serving.shared_port or serving.metrics_address):
            self._due = float("inf")
        elif not holder(self._folder / LOCK):
            with reserved_port(serving.host, serving.shared_port or 0), reserved_port(*_metrics_address(serving)):
                pass
        elif (running := (self._folder / SETTINGS).read_text()) != serving.model_dump_json(include=FIELDS):
            hint = "use these, or stop the others first: slipway serve MODEL --stop"
            raise Conflict(f"the models of this store share other addresses: {running}", hint=hint)

    def keep(self) -> None:
        """Start it if it does not run; less often while that fails."""
        if time.monotonic() < self._due:
            return
        runs = holder(self._folder / LOCK) or (self._child and self._child.poll() is None)
        self._starts = 0 if runs else self._starts + 1
        self._due = time.monotonic() + pause_before_s(self._starts)
        if runs:
            return
        variables = {**os.environ, STORE_VARIABLE: str(self._root)}
        variables.pop(program.OUTPUTS_VARIABLE, None)
        command = [sys.executable, "-m", __name__, self._serving.model_dump_json()]
        with contextlib.suppress(OSError):  # no reason to stop a working endpoint
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / LOG).open("ab") as log:
                self._child = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables, start_new_session=True
                )


def serve(root: Path, serving: AskedServing) -> None:
    """Serve the shared addresses until no endpoint of the store has a supervisor. Raises PortInUse, OSError or
    ConfigError if one can't be listened on, ServerFailed if Envoy ends, and Busy if another process serves them."""
    folder, door = root / FOLDER, Door(root, "", api_key())
    with exclusive(folder / LOCK, "the shared address", wait=False), contextlib.ExitStack() as stack:
        write_text(folder / SETTINGS, serving.model_dump_json(include=FIELDS))
        (folder / LOCK).write_text(str(os.getpid()))
        if serving.metrics_address:
            host, port = _metrics_address(serving)
            server, _ = start_http_server(port, host, ServersMetrics(root))  # in a thread that ends with the process
            app: Any = server.get_app()  # as OpenMetrics, which is asked for, it would say vllm_ instead of vllm:
            server.set_app(lambda environ, start: app({**environ, "HTTP_ACCEPT": ""}, start))
        proxy, routing = None, routing_of(root)
        door.shared = routing.models
        if serving.shared_port:
            address, tls = (serving.host, serving.shared_port), tls_of(serving)
            stack.enter_context(reserved_port(*address))
            proxy = stack.enter_context(proxying(address, routing, door, folder=folder, log=folder / LOG, tls=tls))
        while any(holder(lock) for lock in root.glob(f"*/.locks/{LOCK}")):
            if proxy:
                proxy.check_alive()
                with contextlib.suppress(SlipwayError):  # such as a full disk: it goes on as before
                    proxy.follow_certificate()
                    proxy.apply(routing := routing_of(root))
                    door.shared = routing.models
            time.sleep(POLL_S)


def _metrics_address(serving: AskedServing) -> tuple[str, int]:
    host, _, port = (serving.metrics_address or "localhost:0").rpartition(":")
    return host.strip("[]"), int(port)


def routing_of(root: Path) -> Routing:
    """Look which models are served, or are to be: one that is started again is unavailable, not unknown. An adapter's
    name that several models have is that of the first."""
    releases: dict[str, set[str]] = defaultdict(set)
    for running in serving_here(root):
        releases[running.model] |= {server.release for server in running.servers}
    for path in root.glob(f"*/{WANTED}"):
        if wanted := Wanted.read_if_intact(path):
            releases[path.parent.name.replace("--", "/", 1)] |= {*wanted.releases()}
    models, orders = {model: model for model in sorted(releases)}, {}
    for model in sorted(releases):
        store = ModelStore(root, model)
        for release in sorted(releases[model]):
            for adapter in adapters_in(store.releases / release):
                models.setdefault(adapter, model)
        link = root / FOLDER / digest_of(model)[:12]  # the path of a socket is limited to 107 bytes
        if not link.is_symlink():
            swap_link(link, Path("..") / store.path.name / SERVERS)
        orders[model] = ((Backend(model, f"{link.name}/{SHARED_SOCKET}"),),)
    return Routing(orders, {}, models=models)


class ServersMetrics(Collector):
    """vLLM's own metrics of all servers of the store at *root*, each with its model, release and replica."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        servers = [(running.model, server) for running in serving_here(self._root) for server in running.servers]
        for model, server in servers:
            labels = {"model": model, "release": server.release, "replica": str(server.replica + 1)}
            with contextlib.suppress(TransientError, ValueError):  # it is not up
                for family in text_string_to_metric_families(read_metrics(server.url, server.release)):
                    one = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                    one.samples += [sample._replace(labels={**sample.labels, **labels}) for sample in family.samples]
        yield from merged.values()


if __name__ == "__main__":
    program.main(lambda: serve(store_root(), parse_json(AskedServing, sys.argv[1], "the settings")))
