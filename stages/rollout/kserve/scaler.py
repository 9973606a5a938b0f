"""What adds replicas on a cluster, as it is found there: KEDA with a Prometheus, or else a HorizontalPodAutoscaler by
the metrics of pods that an adapter offers. CPU load, which every cluster has, says nothing about an LLM."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stages.parts.base.errors import AccessDenied, ClusterUnavailable, NotInstalled
from stages.parts.cluster.api import Absent, Cluster
from stages.parts.cluster.kinds import SERVICES, Kind, Object
from stages.rollout.kserve.modes import AUTO

if TYPE_CHECKING:
    from stages.rollout.kserve.settings import KServe

RUNTIMES: Final = Kind("serving.kserve.io/v1alpha1", "ServingRuntime", "servingruntimes")
RUNTIME: Final = "slipway-vllm"
"""The ServingRuntime in ``manifests/kserve``."""
SCALED_OBJECTS: Final = Kind("keda.sh/v1alpha1", "ScaledObject", "scaledobjects")
PROMETHEUS: Final = "slipway/prometheus"
"""The annotation of our ServingRuntime by which ``install`` tells rollouts, who may not look for it, where it is."""
SERVERS: Final = ("operated-prometheus=true", "app.kubernetes.io/name=prometheus")
"""The labels of its Service: by prometheus-operator, and by charts without it."""
WEB: Final = ("web", "http-web", "http")
"""The names of its port."""
POD_METRICS: Final = "/apis/custom.metrics.k8s.io/v1beta1"
ADAPTER: Final = "pods/"
"""How the names of pods' metrics begin there."""


@dataclass(frozen=True)
class Scaler:
    """Adds replicas, and takes them away."""

    prometheus: str = ""
    """Base URL of the Prometheus by which KEDA scales."""
    pod_metrics: frozenset[str] = frozenset()
    """Metrics of pods by which a HorizontalPodAutoscaler can scale, by their names there."""
    lacking: str = "kserve.prometheus is null"
    """Why nothing does."""

    @property
    def name(self) -> str:
        """KEDA, HorizontalPodAutoscaler, or nothing."""
        return "KEDA" if self.prometheus else "HorizontalPodAutoscaler" if self.pod_metrics else ""

    def metrics(self, names: Iterable[str]) -> list[str]:
        """Name those of vLLM's metrics as the adapter does, which may not allow a colon; empty if one is not there."""
        offered = [{name, name.replace(":", "_")} & self.pod_metrics for name in names]
        return [min(name) for name in offered] if all(offered) else []


NOTHING: Final = Scaler()


def find_scaler(cluster: Cluster, settings: KServe) -> Scaler:
    """Find what scales releases on *cluster*, unless *settings* say it. Needs the right to read our ServingRuntime."""
    if settings.prometheus != AUTO:
        return Scaler(settings.prometheus or "")
    prometheus = ""
    with contextlib.suppress(Absent, AccessDenied):
        prometheus = cluster.get(RUNTIMES, RUNTIME)["metadata"].get("annotations", {}).get(PROMETHEUS, "")
    lacking = [] if prometheus else ["no Prometheus (slipway install looks for it)"]
    try:
        cluster.require(SCALED_OBJECTS)
    except NotInstalled:
        lacking.append("no KEDA")
    if not lacking:
        return Scaler(prometheus)
    offered = answer(cluster, POD_METRICS).get("resources", [])
    names = frozenset(metric["name"].removeprefix(ADAPTER) for metric in offered if metric["name"].startswith(ADAPTER))
    return Scaler("", frozenset(name for name in names if name.startswith("vllm")), " and ".join(lacking))


def find_prometheus(cluster: Cluster) -> list[str]:
    """List the base URLs of the cluster's Prometheus servers; none without the right to list Services everywhere."""
    for labels in SERVERS:
        with contextlib.suppress(AccessDenied):
            listed, _ = cluster.list(SERVICES, labels=labels, everywhere=True)
            if urls := {_url(service) for service in listed}:
                return sorted(urls)
    return []


def answer(cluster: Cluster, path: str) -> Object:
    """Ask an API that something beside Kubernetes serves, without patience; empty if nothing answers."""
    with contextlib.suppress(Absent, AccessDenied, ClusterUnavailable):
        return Cluster(cluster.login, cluster.namespace, patience_s=0).request("GET", path)
    return {}


def _url(service: Object) -> str:
    metadata, ports = service["metadata"], service["spec"]["ports"]
    port = next((port for port in ports if port.get("name") in WEB), ports[0])
    return f"http://{metadata['name']}.{metadata['namespace']}.svc:{port['port']}"
