"""What Prometheus and Grafana take of Slipway, where and with the labels by which those of the cluster select it.

How selectors choose: https://prometheus-operator.dev/docs/api-reference/api/#monitoring.coreos.com/v1.PrometheusSpec
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from pipeline.cluster.controller import controllers, metrics_scheme
from pipeline.cluster.gateway import budgets
from pipeline.cluster.manifests import MANIFESTS, of_folder
from pipeline.cluster.objects import find, labelled
from pipeline.runs.tables import Finding, off, ok, warning
from pipeline.settings.config import RunConfig
from stages.parts.base.errors import AccessDenied
from stages.parts.cluster.api import Absent, Cluster
from stages.parts.cluster.kinds import DEPLOYMENTS, NAMESPACES, Kind, Object

PROMETHEUSES: Final = Kind("monitoring.coreos.com/v1", "Prometheus", "prometheuses")
SELECTORS: Final = {"PodMonitor": "podMonitor", "PrometheusRule": "rule"}
"""How the fields of a Prometheus begin that select each kind."""
ARGO: Final = "slipway-argo"
"""The PodMonitor of Argo's controller."""
DASHBOARD: Final = "slipway-dashboard"
SIDECAR: Final = "sc-dashboard"
"""How the name of the container ends that brings dashboards to Grafana, in Grafana's chart and those that have it."""
NONE: Final = "no prometheus-operator"


@dataclass(frozen=True)
class Monitoring:
    """A cluster's own Prometheus and Grafana, and what of ours they take."""

    cluster: Cluster
    config: RunConfig

    @cached_property
    def prometheus(self) -> Object | str:
        """The Prometheus that is named or the only one; otherwise why there is none."""
        try:
            if named := self.config.cluster.prometheus:
                namespace, _, name = named.partition("/")
                return self.cluster.find(PROMETHEUSES, name, namespace) or f"no Prometheus {named}"
            prometheuses, _ = self.cluster.list(PROMETHEUSES, everywhere=True)
        except Absent:
            return NONE
        except AccessDenied as error:  # whoever installs need not see all namespaces
            return f"may not be seen: {error}"
        if len(prometheuses) == 1:
            return prometheuses[0]
        return f"{len(prometheuses)} Prometheuses: {', '.join(map(_full_name, prometheuses)) or 'none is set up'}"

    @cached_property
    def documents(self) -> list[Object]:
        """The objects as they are applied; none where nothing would take them. Raises: as ``read_clients``."""
        if isinstance(self.prometheus, str):
            return []
        documents = of_folder("monitoring", self.config.platform.namespace)
        if clients := self.config.cluster.clients:
            documents += budgets(self.config.platform.namespace, clients)
        for body in documents:
            if body["metadata"]["name"] == ARGO:
                self._complete_argo(body["spec"])
            self._place(body, self.prometheus)
        return [*documents, self._dashboard()]

    def lacking(self) -> Iterator[str]:
        """Name the objects that are not there, or that the Prometheus does not take, and why. Raises: NotInstalled."""
        spec = {} if isinstance(self.prometheus, str) else self.prometheus["spec"]
        for body in self.documents:
            field, namespace = SELECTORS.get(body["kind"]), body["metadata"]["namespace"]
            title, current = find(self.cluster, body)
            if current is None:
                yield f"no {title}"
            elif field and not _selects(spec.get(f"{field}Selector"), current["metadata"].get("labels") or {}):
                yield f"{title}: {field}Selector does not select it"
            elif field and not self._looks_in(spec.get(f"{field}NamespaceSelector"), namespace):
                yield f"{title}: {field}NamespaceSelector selects neither namespace"

    def _complete_argo(self, spec: Object) -> None:
        """Find the controller's pods, and whether their port speaks TLS."""
        namespace = self.config.cluster.controller_namespace
        spec["namespaceSelector"] = {"matchNames": [namespace]}
        with contextlib.suppress(AccessDenied):
            if deployments := controllers(self.cluster, namespace):
                spec["selector"] = deployments[0]["spec"]["selector"] or spec["selector"]
        endpoint = spec["podMetricsEndpoints"][0]
        endpoint["scheme"] = metrics_scheme(self.cluster, namespace)
        if endpoint["scheme"] == "http":
            del endpoint["tlsConfig"]

    def _place(self, body: Object, prometheus: Object) -> None:
        """Give *body* the labels that the Prometheus selects; move it to the Prometheus' own namespace if it looks for
        such objects there and not in ours."""
        field, metadata, spec = SELECTORS[body["kind"]], body["metadata"], prometheus["spec"]
        ours, home = metadata["namespace"], prometheus["metadata"]["namespace"]
        metadata["labels"] |= _labels(spec.get(f"{field}Selector"))
        selector = spec.get(f"{field}NamespaceSelector")
        if self._looks_in(selector, ours) or not self._looks_in(selector, home):
            return
        # Named after the namespace that it is about, so that those of several do not meet.
        metadata |= {"namespace": home, "name": f"{metadata['name']}-{ours}"}
        if body["kind"] == "PodMonitor":
            body["spec"].setdefault("namespaceSelector", {"matchNames": [ours]})

    def _looks_in(self, selector: Object | None, namespace: str) -> bool:
        """Whether the Prometheus looks into a namespace; without a selector, into its own alone."""
        if selector is None:
            return not isinstance(self.prometheus, str) and namespace == self.prometheus["metadata"]["namespace"]
        labels: dict[str, str] = {"kubernetes.io/metadata.name": namespace}
        with contextlib.suppress(AccessDenied):
            labels |= (self.cluster.find(NAMESPACES, namespace) or {"metadata": {}})["metadata"].get("labels") or {}
        return _selects(selector, labels)

    def _dashboard(self) -> Object:
        """Build the ConfigMap from which Grafana's sidecar, or one like it, takes the dashboard."""
        namespace, name, (label, value) = self.config.platform.namespace, DASHBOARD, ("grafana_dashboard", "1")
        deployments: list[Object] = []
        with contextlib.suppress(AccessDenied):
            deployments, _ = self.cluster.list(DEPLOYMENTS, everywhere=True)
        for deployment in deployments:
            for container in deployment["spec"]["template"]["spec"]["containers"]:
                if container["name"].endswith(SIDECAR):
                    variables = {each["name"]: each.get("value", "") for each in container.get("env", [])}
                    label, value = variables.get("LABEL") or label, variables.get("LABEL_VALUE") or value
                    home = deployment["metadata"]["namespace"]
                    if {"ALL", namespace}.isdisjoint((variables.get("NAMESPACE") or home).split(",")):
                        namespace, name = home, f"{DASHBOARD}-{namespace}"
        text = (MANIFESTS / "monitoring" / "dashboard.json").read_text(encoding="utf-8")
        body = labelled("ConfigMap", name, namespace, data={"slipway.json": text})
        body["metadata"]["labels"][label] = value
        return body


def check(cluster: Cluster, config: RunConfig) -> Finding:
    """Check that what ``install`` brings is there and is taken. Raises: NotInstalled."""
    monitoring, install = Monitoring(cluster, config), f"slipway install --platform {config.platform.name}"
    if isinstance(prometheus := monitoring.prometheus, str):
        if prometheus == NONE:
            hint = f"with it: {install}, which brings scraping, alerts and a dashboard; see docs/monitoring.md"
            return off(NONE, hint)
        return warning(prometheus, f"cluster.prometheus names one, as namespace/name; then {install}")
    if lacking := list(monitoring.lacking()):
        return warning("; ".join(lacking), f"{install}; or change the selectors of {_full_name(prometheus)}")
    return ok(f"{_full_name(prometheus)} takes endpoints, Argo's controller and alerts; a dashboard is there")


def _full_name(body: Object) -> str:
    return f"{body['metadata']['namespace']}/{body['metadata']['name']}"


def _labels(selector: Mapping[str, Any] | None) -> dict[str, str]:
    """Choose labels that *selector* selects."""
    selector = selector or {}
    labels = dict(selector.get("matchLabels") or {})
    for wanted in selector.get("matchExpressions") or []:
        if wanted["operator"] in ("In", "Exists"):
            labels.setdefault(wanted["key"], (wanted.get("values") or ["true"])[0])
    return labels


def _selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a selector of labels selects an object with these; none selects nothing, an empty one everything."""
    if selector is None:
        return False
    holds = {
        "In": lambda wanted: labels.get(wanted["key"]) in wanted["values"],
        "NotIn": lambda wanted: labels.get(wanted["key"]) not in wanted["values"],
        "Exists": lambda wanted: wanted["key"] in labels,
        "DoesNotExist": lambda wanted: wanted["key"] not in labels,
    }
    expressions = selector.get("matchExpressions") or []
    matched = bool((selector.get("matchLabels") or {}).items() <= labels.items())
    return matched and all(holds[wanted["operator"]](wanted) for wanted in expressions)
