"""The replicas of one release's Deployment: scaled by vLLM's own figures, through KEDA where it is, or else a
HorizontalPodAutoscaler. In mode ``knative``, Knative itself scales, by concurrency.

KServe's own classes of autoscalers are not used: with "keda" a canary would get a ScaledObject without triggers, which
also blocks the stable release's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Final

from stages.parts.base.errors import ConfigError
from stages.parts.base.templates import rendered
from stages.parts.cluster.api import Absent
from stages.parts.cluster.kinds import Kind, Object
from stages.rollout.kserve.applied import AppliedObjects
from stages.rollout.kserve.modes import mode_named
from stages.rollout.kserve.objects import AUTOSCALER, ENDPOINT, RELEASE, TEMPLATES, KServeEndpoint, manifest
from stages.rollout.kserve.release_pods import Pods, selector
from stages.rollout.kserve.scaler import SCALED_OBJECTS, Scaler
from stages.rollout.kserve.scaling_targets import concurrency_of, target_of
from stages.rollout.kserve.settings import Metric, Scaling
from stages.rollout.target import Replicas

POD_AUTOSCALERS: Final = Kind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")
CONCURRENCY: Final = "slipway/concurrency"
"""The annotation that names the requests in flight which one replica should have, whatever the metric."""
METRICS: Final[dict[Metric, tuple[str, ...]]] = {
    "concurrency": ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    "queue": ("vllm:num_requests_waiting",),
    "kv_cache": ("vllm:kv_cache_usage_perc",),
    "ttft": ("vllm:time_to_first_token_seconds_bucket",),
}
SPENT: Final = "vllm:e2e_request_latency_seconds_sum"
BAD: Final = {
    "KEDA": {"Ready": "False", "HPAActive": "False", "Fallback": "True", "Paused": "True"},
    "HorizontalPodAutoscaler": {"AbleToScale": "False", "ScalingActive": "False"},
}
"""The conditions of an autoscaler that does not scale, by what it belongs to; at first they are Unknown."""


def check_scaling(scaler: Scaler, scaling: Scaling, mode: str) -> None:
    """Raise ConfigError if the cluster can't do what the settings say."""
    own = mode_named(mode).autoscaler
    if scaling.minimum == 0 and not own:
        text = f"kserve.scaling.minimum is 0: in mode {mode} requests would be answered 503 until a replica has loaded"
        raise ConfigError(text, hint="at least 1; or mode knative, which keeps requests until then")
    if scaling.schedule and (own or scaler.name != "KEDA"):
        why = f"{own} has none" if own else scaler.lacking or "only KEDA has them"
        hint = "floors by the time of the week need KEDA and Prometheus"
        raise ConfigError(f"kserve.scaling.schedule: {why}", hint=hint)
    if own and scaling.metric != "concurrency":
        raise ConfigError(f"kserve.scaling.metric: {own} does not scale by {scaling.metric}", hint="concurrency")
    if scaler.name == "HorizontalPodAutoscaler":
        pod_metrics(scaler, scaling)


def pod_metrics(scaler: Scaler, scaling: Scaling) -> list[str]:
    """Name the metrics of pods by which a HorizontalPodAutoscaler scales; ConfigError if it can't by what is set."""
    names = [] if scaling.metric == "ttft" else scaler.metrics(METRICS[scaling.metric])
    if not names:
        raise ConfigError(
            f"kserve.scaling.metric: without KEDA nothing scales by {scaling.metric}; metrics of pods there: "
            f"{', '.join(sorted(scaler.pod_metrics))}",
            hint="install KEDA and Prometheus, then slipway install; or another metric",
        )
    return names


def autoscaler(
    endpoint: KServeEndpoint, release: str, deployment: str, *, least: int | None = None, canary: bool = False
) -> Object:
    """Build the autoscaler of one release: a canary scales by its own load, and promoting it changes nothing about its
    pods. There are *least* replicas or, if that is None, ``scaling.minimum``."""
    scaling, keda = endpoint.settings.scaling, endpoint.scaler.name == "KEDA"
    kind = SCALED_OBJECTS if keda else POD_AUTOSCALERS
    (spec,) = rendered(
        TEMPLATES / "autoscaler.yaml.jinja",
        deployment=deployment,
        scaling=scaling,
        minimum=scaling.minimum if least is None else least,
        target=target_of(endpoint, release),
        prometheus=endpoint.scaler.prometheus,
        query=load_query(endpoint, release),
        floors=() if canary or least is not None else scaling.schedule,
        metrics=[] if keda else pod_metrics(endpoint.scaler, scaling),
    )
    labels = {ENDPOINT: endpoint.name, RELEASE: release}
    in_flight = {CONCURRENCY: str(concurrency_of(endpoint, release))}
    return manifest(kind, endpoint, spec, name=_name(kind, deployment), labels=labels, annotations=in_flight)


def load_query(endpoint: KServeEndpoint, release: str) -> str:
    """Write the query for the metric that replicas follow, over all pods of one release.

    By concurrency that is the requests that they have now, or had on average lately if that is more. A server tells its
    number when it has time to: if its requests are short and come together, that is between them, and the number is 0.
    Their times per second are the average of those that have ended.
    """
    of, metric = f"{{{selector(endpoint, release)}}}", endpoint.settings.scaling.metric
    now = " + ".join(f"sum({name}{of})" for name in METRICS[metric])
    if metric == "ttft":
        p95 = f"1000 * histogram_quantile(0.95, sum by (le) (rate({METRICS[metric][0]}{of}[2m])))"
        return f"({p95} >= 0) or 0 * sum({SPENT}{of})"  # without requests it is not a number
    if metric != "concurrency":
        return now
    lately = f"sum(rate({SPENT}{of}[1m]))"
    return f"({now} > {lately}) or {lately} or ({now})"


def lacking(scaled: Object) -> str:
    """Why an autoscaler can't do its work; empty if it does not say so."""
    name = "KEDA" if scaled["kind"] == SCALED_OBJECTS.name else POD_AUTOSCALERS.name
    if not (conditions := scaled.get("status", {}).get("conditions", [])):
        return f"{name} has not said anything about it"
    for condition in conditions:
        if BAD[name].get(condition["type"]) == condition["status"]:
            message = condition.get("message", "")
            return f"{name} says {condition['type']} {condition['status']}: {message}".rstrip(": ")
    return ""


def autoscalers(endpoint: KServeEndpoint, deployments: Mapping[str, str]) -> list[Object]:
    """Build the autoscalers of these Deployments by release, the stable one's first; none where nothing scales."""
    if not endpoint.scaler.name:
        return []
    stable = next(iter(deployments))
    return [autoscaler(endpoint, release, name, canary=release != stable) for release, name in deployments.items()]


class Autoscalers:
    """The autoscalers of one endpoint's releases, each of one Deployment."""

    def __init__(self, objects: AppliedObjects, pods: Pods) -> None:
        self._objects, self._pods, self._endpoint, self._cluster = objects, pods, objects.endpoint, objects.cluster
        self._scaler = objects.endpoint.scaler

    def apply(self, release: str, deployment: str, service: Object, *, canary: bool = False) -> None:
        """Apply the autoscaler of a release, unless *service*, which serves it, names a number of replicas itself:
        KServe would set them back."""
        external = service["metadata"].get("annotations", {}).get(AUTOSCALER) == "external"
        unnumbered = "template" in service["spec"] and "replicas" not in service["spec"]
        if self._scaler.name and (external or unnumbered):
            self._put(autoscaler(self._endpoint, release, deployment, canary=canary))

    def _put(self, body: Object) -> None:
        """Apply an autoscaler in the place of one of the other kind."""
        kinds = {SCALED_OBJECTS: POD_AUTOSCALERS, POD_AUTOSCALERS: SCALED_OBJECTS}
        kind = next(kind for kind in kinds if kind.name == body["kind"])
        self._cluster.require(kind)
        self._objects.remove(kinds[kind], _name(kinds[kind], body["spec"]["scaleTargetRef"]["name"]))
        self._cluster.apply(kind, body, force=True)

    def remove(self, deployment: str) -> None:
        if self._scaler.name:
            for kind in (SCALED_OBJECTS, POD_AUTOSCALERS):
                self._objects.remove(kind, _name(kind, deployment))

    def keep(self, *deployments: str) -> None:
        """Remove the autoscalers of all other Deployments, including those of Deployments that are gone already."""
        if not self._scaler.name:
            return
        for kind in (SCALED_OBJECTS, POD_AUTOSCALERS):
            with contextlib.suppress(Absent):  # KEDA is not installed
                listed, _ = self._cluster.list(kind, labels=f"{ENDPOINT}={self._endpoint.name}")
                names = {body["metadata"]["name"] for body in listed}
                for name in names.difference(_name(kind, deployment) for deployment in deployments):
                    self._objects.remove(kind, name)

    def find(self, deployment: str) -> Object | None:
        kind = SCALED_OBJECTS if self._scaler.name == "KEDA" else POD_AUTOSCALERS
        return self._cluster.find(kind, _name(kind, deployment))

    def prepare(self, release: str, deployment: str, stable: str | None, percent: int) -> str:
        """See ``Target.prepare``. A canary has as few replicas as its share needed so far, and more of them take
        minutes to load. Without an autoscaler every release has the same."""
        if stable is None or self.find(deployment) is None:
            return ""
        ready = len(self._pods.ready_names(release))
        serving = len(self._pods.ready_names(stable)) + ready  # the stable release may have followed its smaller share
        scaling = self._endpoint.settings.scaling
        needed = min(scaling.maximum, max(scaling.minimum, math.ceil(serving * percent / 100)))
        self._put(autoscaler(self._endpoint, release, deployment, least=needed))
        return "" if ready >= needed else f"{ready} of {needed} are ready"

    def replicas(self, release: str, deployment: str) -> Replicas:
        if not self._scaler.name:
            hint = "KEDA, and a Prometheus with manifests/monitoring; slipway install, then slipway rollout start"
            raise ConfigError(f"nothing scales {release}: {self._scaler.lacking}", hint=hint)
        if (scaled := self.find(deployment)) is None:
            self._cluster.require(SCALED_OBJECTS)
            hint = f"slipway rollout start {self._endpoint.store.model}, with kserve.scaling as it is now"
            raise ConfigError(f"nothing scales {release}: there is no {self._scaler.name} of {deployment}", hint=hint)
        spec, annotations = scaled["spec"], scaled["metadata"].get("annotations", {})
        least, most = (spec.get(f"{bound}ReplicaCount", spec.get(f"{bound}Replicas")) for bound in ("min", "max"))
        in_flight = int(annotations.get(CONCURRENCY) or concurrency_of(self._endpoint, release))
        return Replicas(*self._pods.running(release), least, most, in_flight, lacking(scaled))


def _name(kind: Kind, deployment: str) -> str:
    """Name an autoscaler of this kind. KServe removes a HorizontalPodAutoscaler that is called like its Deployment."""
    return deployment if kind == SCALED_OBJECTS else f"hpa-{deployment}"
