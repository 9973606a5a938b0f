"""What adds replicas on a cluster when more is asked of a release than they can take: found by ``install``, said by
``doctor``."""

from __future__ import annotations

from typing import Final

from pipeline.runs.tables import Finding, missing, ok, warning
from pipeline.settings.config import RunConfig, kserve_settings
from stages.parts.base.errors import ConfigError, NotInstalled
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import Object
from stages.rollout.kserve.autoscaling import check_scaling, lacking, pod_metrics
from stages.rollout.kserve.detect import detect
from stages.rollout.kserve.modes import AUTO, mode_named
from stages.rollout.kserve.objects import SELECTOR
from stages.rollout.kserve.scaler import PROMETHEUS, RUNTIMES, SCALED_OBJECTS, answer, find_prometheus, find_scaler
from stages.rollout.kserve.settings import KServe

KEDA_METRICS: Final = "/apis/external.metrics.k8s.io/v1beta1"
"""Through this API KEDA tells autoscalers how high the load is."""


def with_prometheus(documents: list[Object], cluster: Cluster) -> list[Object]:
    """Tell rollouts, who may not look for it, where Prometheus is: on the ServingRuntime among *documents*."""
    if len(urls := find_prometheus(cluster)) == 1:
        for body in documents:
            if body["kind"] == RUNTIMES.name:
                body["metadata"].setdefault("annotations", {})[PROMETHEUS] = urls[0]
    return documents


def check(cluster: Cluster, config: RunConfig) -> Finding:
    """Say who adds replicas, and by what. Raises AccessDenied if that may not be seen; ConfigError if nothing can do
    what is set."""
    settings = kserve_settings(config)
    scaling, scaler = settings.scaling, find_scaler(cluster, settings)
    span = f"{scaling.minimum} to {scaling.maximum} replicas of a release by {scaling.metric}"
    span += f", {len(scaling.schedule)} floors by the time of the week" if scaling.schedule else ""
    try:
        mode = detect(cluster, settings).mode
    except (ConfigError, NotInstalled):
        return warning(f"unknown until KServe is ready: {span}", "see KServe")
    check_scaling(scaler, scaling, mode)
    if autoscaler := mode_named(mode).autoscaler:
        return ok(f"{autoscaler}: {span}")
    if scaler.name == "KEDA":
        return _keda(cluster, settings, scaler.prometheus, span)
    hint = _hint(cluster, settings)
    if scaler.name:
        names = ", ".join(pod_metrics(scaler, scaling))
        return ok(f"{scaler.name}, because there is {scaler.lacking}: {span} ({names})", hint)
    return ok(f"off: as many replicas under any load: {scaler.lacking}", hint)


def _hint(cluster: Cluster, settings: KServe) -> str:
    """Say how KEDA would scale."""
    if settings.prometheus != AUTO:
        return "to follow the load: kserve.prometheus: auto, with KEDA and a Prometheus that has manifests/monitoring"
    urls = find_prometheus(cluster)
    if len(urls) > 1:
        return f"there are several Prometheus, name one in kserve.prometheus: {', '.join(urls)}"
    where = f"slipway install tells rollouts of {urls[0]}" if urls else "a Prometheus with manifests/monitoring"
    return f"to follow the load: KEDA 2, and {where}"


def _keda(cluster: Cluster, settings: KServe, prometheus: str, span: str) -> Finding:
    try:
        cluster.require(SCALED_OBJECTS)
    except NotInstalled as error:
        return missing(f"kserve.prometheus, but {error}", "install KEDA 2, or leave kserve.prometheus empty")
    if not answer(cluster, KEDA_METRICS):
        hint = "is KEDA running? kubectl describe apiservice v1beta1.external.metrics.k8s.io"
        return missing("KEDA's definitions, but nothing answers external.metrics.k8s.io", hint)
    scaled, _ = cluster.list(SCALED_OBJECTS, labels=SELECTOR)
    faults = [f"{body['metadata']['name']}: {why}" for body in scaled if (why := lacking(body))]
    if faults:
        hint = f"does KEDA reach {prometheus}, and does that have the series of manifests/monitoring?"
        return warning(f"KEDA: {span}; {'; '.join(faults)}", hint)
    found = f", by the Prometheus that was found ({prometheus})" if settings.prometheus == AUTO else ""
    return ok(f"KEDA: {span}{found}")
