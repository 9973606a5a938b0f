"""A real Prometheus and a real Alertmanager on this machine, by the objects that are installed on a cluster.

They scrape, evaluate and alert as prometheus-operator would have them do, by the PodMonitors and PrometheusRules that a
Prometheus resource selects. But for discovery, which a little server does here with the labels that Prometheus' own
discovery gives, and for how long an alert has to last (``for``), which is shortened, nothing is changed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from stages.parts.base.errors import SlipwayError
from stages.parts.cluster.api import Cluster, connect
from stages.parts.cluster.kinds import CONFIG_MAPS, DEFINITIONS, NAMESPACES, PODS, Kind, Object
from stages.parts.machine.process import Contained
from stages.parts.vllm.server import reserved_port
from tests.cluster.conftest import there
from tests.serving import wait_until
from tests.webhook import Hook, hook

MONITORS: Final = Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors")
RULES: Final = Kind("monitoring.coreos.com/v1", "PrometheusRule", "prometheusrules")
PROMETHEUSES: Final = Kind("monitoring.coreos.com/v1", "Prometheus", "prometheuses")
HOME: Final = "slipway-test-monitoring"
"""The namespace of the Prometheus resource."""
LABELS: Final = {"release": "slipway-test"}
"""By which the Prometheus resource selects."""
SELECTED: Final = ",".join(f"{key}={value}" for key, value in LABELS.items())
FOR: Final = "15s"
"""In place of each ``for``."""
HERE: Final = "127.0.0.1"
RENAMED: Final = {"path": "metrics_path", "interval": "scrape_interval", "relabelings": "relabel_configs"}
VARIABLE: Final = re.compile(r"label_values\((.+), (\w+)\)")


@contextlib.contextmanager
def prometheus_operator(cluster: Cluster, path: Path) -> Iterator[None]:
    """Apply the definitions in *path*, and a Prometheus that selects by ``LABELS`` in all namespaces; remove all."""
    if there(cluster, DEFINITIONS, f"{PROMETHEUSES.plural}.{PROMETHEUSES.group}"):
        pytest.skip("has a prometheus-operator, whose objects would go with the definitions")
    definitions = list(filter(None, yaml.safe_load_all(path.read_text())))
    spec: Object = {}
    for each in ("podMonitor", "rule"):
        spec |= {f"{each}Selector": {"matchLabels": LABELS}, f"{each}NamespaceSelector": {}}
    for each in definitions:
        cluster.apply(DEFINITIONS, each)
    cluster.apply(NAMESPACES, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": HOME}})
    body = {"apiVersion": PROMETHEUSES.api_version, "kind": PROMETHEUSES.name, "spec": spec}

    def applied() -> bool:
        with contextlib.suppress(SlipwayError):  # the definitions are in force after a moment
            return bool(cluster.apply(PROMETHEUSES, body | {"metadata": {"name": "test", "namespace": HOME}}, HOME))
        return False

    try:
        wait_until(applied, "a Prometheus")
        yield
    finally:
        for each in definitions:
            cluster.delete(DEFINITIONS, each["metadata"]["name"])  # and with it all objects of its kind
        cluster.delete(NAMESPACES, HOME)


def plain(name: str) -> str:
    """A name as Prometheus has it in labels."""
    return re.sub(r"\W", "_", name)


def snake(value: Any) -> Any:
    """Write a monitor's fields as Prometheus' configuration has them."""
    if isinstance(value, list):
        return [snake(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        RENAMED.get(key, re.sub("[A-Z]", lambda big: f"_{big[0].lower()}", key)): snake(value[key]) for key in value
    }


def targets(pods: list[Object]) -> Iterator[Object]:
    """Yield every port of every container, as ``kubernetes_sd_configs`` finds them for the role pod."""
    for pod in pods:
        metadata, status = pod["metadata"], pod["status"]
        meta = {"namespace": metadata["namespace"], "pod_name": metadata["name"], "pod_phase": status.get("phase", "")}
        for what in ("label", "annotation"):
            for key, value in (metadata.get(f"{what}s") or {}).items():
                meta |= {f"pod_{what}_{plain(key)}": value, f"pod_{what}present_{plain(key)}": "true"}
        containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
        for container, port in ((each, port) for each in containers for port in each.get("ports", [])):
            number = str(port["containerPort"])
            of_port = {"pod_container_port_name": port.get("name", ""), "pod_container_port_number": number}
            labels = meta | of_port | {"pod_container_name": container["name"]}
            if address := status.get("podIP"):
                prefixed = {f"__meta_kubernetes_{key}": value for key, value in labels.items()}
                yield {"targets": [f"{address}:{number}"], "labels": prefixed}


def kept(selector: Object) -> Iterator[Object]:
    """Select as the operator does."""
    wanted = [*selector.get("matchExpressions", [])]
    wanted += [
        {"key": key, "operator": "In", "values": [value]} for key, value in selector.get("matchLabels", {}).items()
    ]
    for each in wanted:
        label = f"__meta_kubernetes_pod_label_{plain(each['key'])}"
        there = f"__meta_kubernetes_pod_labelpresent_{plain(each['key'])}"
        keeps = "keep" if each["operator"] in ("In", "Exists") else "drop"
        if each["operator"] in ("In", "NotIn"):
            values = "|".join(map(re.escape, each["values"]))
            yield {"source_labels": [label, there], "regex": f"({values});true", "action": keeps}
        else:
            yield {"source_labels": [there], "regex": "true", "action": keeps}


def job(monitor: Object, number: int, url: str) -> Object:
    """Make the configuration that the operator makes of one endpoint of a PodMonitor."""
    metadata, spec = monitor["metadata"], monitor["spec"]
    endpoint = dict(spec["podMetricsEndpoints"][number])
    by = "name" if "port" in endpoint else "number"
    port = str(endpoint.pop("port", None) or endpoint.pop("portNumber"))
    relabelings = [
        {"source_labels": ["__meta_kubernetes_pod_phase"], "regex": "(Failed|Succeeded)", "action": "drop"},
        *kept(spec["selector"]),
        {"source_labels": [f"__meta_kubernetes_pod_container_port_{by}"], "regex": port, "action": "keep"},
        *(
            {"source_labels": [f"__meta_kubernetes_{source}"], "target_label": target}
            for source, target in (("namespace", "namespace"), ("pod_container_name", "container"), ("pod_name", "pod"))
        ),
        *(
            {
                "source_labels": [f"__meta_kubernetes_pod_label_{plain(each)}"],
                "regex": "(.+)",
                "target_label": plain(each),
            }
            for each in spec.get("podTargetLabels", [])
        ),
        {"target_label": "job", "replacement": f"{metadata['namespace']}/{metadata['name']}"},
        {"target_label": "endpoint", "replacement": port},
        *snake(endpoint.pop("relabelings", [])),
    ]
    name = f"podMonitor/{metadata['namespace']}/{metadata['name']}/{number}"
    places = spec.get("namespaceSelector", {}).get("matchNames") or [metadata["namespace"]]
    discovered = [{"url": f"{url}/{place}", "refresh_interval": "5s"} for place in places]
    return {"job_name": name, "http_sd_configs": discovered, "relabel_configs": relabelings} | snake(endpoint)


class Discovery(HTTPServer):
    """Answers with the targets in the namespace that the path names."""

    def __init__(self) -> None:
        super().__init__((HERE, 0), Answer)
        self.cluster, self.url = connect(), f"http://{HERE}:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Discovery

    def do_GET(self) -> None:
        body = json.dumps(list(targets(self.server.cluster.list(PODS, self.path.strip("/"))[0]))).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # Prometheus has ended
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@dataclass
class Watched:
    """What Prometheus sees of a cluster, and whom Alertmanager tells."""

    cluster: Cluster
    folder: Path
    discovery: str
    states: int
    """The port of kube-state-metrics."""
    alertmanager: int
    base: str
    hook: Hook
    seen: set[tuple[str, str]] = field(default_factory=set)
    """Queries of the dashboard, by panel and letter, that have once had data."""

    def configure(self) -> None:
        """Take over what is installed."""
        monitors, rules = (self.cluster.list(kind, labels=SELECTED, everywhere=True)[0] for kind in (MONITORS, RULES))
        jobs = [
            job(each, n, self.discovery) for each in monitors for n in range(len(each["spec"]["podMetricsEndpoints"]))
        ]
        static = [{"targets": [f"{HERE}:{self.states}"]}]
        states = {
            "job_name": "kube-state-metrics",
            "honor_labels": True,
            "static_configs": static,
            "scrape_interval": "5s",
        }
        alerting = {"alertmanagers": [{"static_configs": [{"targets": [f"{HERE}:{self.alertmanager}"]}]}]}
        made: Object = {"global": {"evaluation_interval": "15s", "scrape_interval": "15s"}, "alerting": alerting}
        made |= {"scrape_configs": [*jobs, states], "rule_files": []}
        for each in rules:
            for rule in (rule for group in each["spec"]["groups"] for rule in group["rules"] if "for" in rule):
                rule["for"] = FOR
            path = self.folder / f"{each['metadata']['namespace']}-{each['metadata']['name']}.yaml"
            path.write_text(yaml.safe_dump(each["spec"]))
            made["rule_files"].append(str(path))
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(made))

    def reload(self) -> None:
        self.configure()
        httpx.post(f"{self.base}/-/reload", timeout=30).raise_for_status()

    def ask(self, path: str, **query: str) -> Any:
        answer = httpx.get(f"{self.base}/api/v1/{path}", params=query, timeout=30)
        assert answer.is_success, answer.text
        return answer.json()["data"]

    def data(self, query: str) -> list[float]:
        """The values of a query that are numbers."""
        values = (float(each["value"][1]) for each in self.ask("query", query=query)["result"])
        return [value for value in values if math.isfinite(value)]

    def alerts(self) -> set[str]:
        """The names of all alerts in the rules that Prometheus has."""
        groups = self.ask("rules", type="alert")["groups"]
        return {rule["name"] for group in groups for rule in group["rules"]}

    def arrived(self, alert: str) -> Object | None:
        """The alert as the web hook got it, once it has fired."""
        posted = (each for body in list(self.hook.posted) for each in body["alerts"])
        return next(
            (each for each in posted if (each["labels"]["alertname"], each["status"]) == (alert, "firing")), None
        )

    def dashboard(self) -> Object:
        """The one that is installed."""
        (found,) = self.cluster.list(CONFIG_MAPS, labels="grafana_dashboard=1", everywhere=True)[0]
        return dict(json.loads(found["data"]["slipway.json"]))

    def queries(self, board: Object, endpoint: str) -> dict[tuple[str, str], str]:
        """The queries of a dashboard, with the variables that Grafana would offer, of which *endpoint* is chosen."""
        values = {"__rate_interval": "1m"}
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                found = VARIABLE.fullmatch(variable["query"]["query"])
                assert found, variable
                offered = self.ask(f"label/{found[2]}/values", **{"match[]": put(found[1], values)})
                chosen = {"namespace": self.cluster.namespace, "endpoint": endpoint}[variable["name"]]
                assert chosen in offered, (variable["name"], offered)
                values[variable["name"]] = chosen
        panels = [panel for panel in board["panels"] if panel["type"] != "row"]
        return {
            (panel["title"], each["refId"]): put(each["expr"], values) for panel in panels for each in panel["targets"]
        }


def put(expression: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        expression = expression.replace(f"${name}", value)
    assert "$" not in expression, expression
    return expression


def program(*names: str) -> str:
    if found := next(filter(None, map(shutil.which, names)), None):
        return found
    pytest.skip(f"needs {names[0]}")


@contextlib.contextmanager
def kube_state_metrics(port: int) -> Iterator[None]:
    command = [program("kube-state-metrics"), "--kubeconfig", os.environ["KUBECONFIG"], "--resources", "deployments"]
    with reserved_port(HERE, 0) as own:
        command += ["--host", HERE, "--port", str(port), "--telemetry-host", HERE, "--telemetry-port", str(own)]
        with Contained(command, output=subprocess.DEVNULL):
            yield


@contextlib.contextmanager
def watching(cluster: Cluster, folder: Path) -> Iterator[Watched]:
    """Run both until the block ends."""
    prometheus, alertmanager = program("prometheus"), program("prometheus-alertmanager", "alertmanager")
    with contextlib.ExitStack() as stack:
        states, own, port = (stack.enter_context(reserved_port(HERE, 0)) for _ in range(3))
        found, posted = stack.enter_context(Discovery()), stack.enter_context(hook())
        threading.Thread(target=found.serve_forever, daemon=True).start()
        stack.callback(found.shutdown)
        route = {"receiver": "hook", "group_by": ["..."], "group_wait": "1s", "group_interval": "5s"}
        receivers = [{"name": "hook", "webhook_configs": [{"url": posted.url}]}]
        (folder / "alertmanager.yml").write_text(yaml.safe_dump({"route": route, "receivers": receivers}))
        watched = Watched(cluster, folder, found.url, states, own, f"http://{HERE}:{port}", posted)
        watched.configure()
        for name, command in {
            "alertmanager": [alertmanager, f"--web.listen-address={HERE}:{own}", "--cluster.listen-address="],
            "prometheus": [prometheus, f"--web.listen-address={HERE}:{port}", "--web.enable-lifecycle"],
        }.items():
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            data = f"--storage.{'tsdb.' if name == 'prometheus' else ''}path={folder / name}"
            stack.enter_context(Contained([*command, f"--config.file={folder / name}.yml", data], output=log))
        yield watched
