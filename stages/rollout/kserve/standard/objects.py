"""The objects of mode ``standard``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from stages.parts.cluster.kinds import Object
from stages.rollout.kserve import objects
from stages.rollout.kserve.autoscaling import scaled_objects
from stages.rollout.kserve.objects import (
    DEPLOYMENT_MODE,
    KServeEndpoint,
    autoscaler_class,
    disruption_budget,
    predictor_name,
)

NAMES: Final = ("Standard", "RawDeployment")
"""KServe's deployment mode, by its new name and its old one. Versions with ``spec.canary`` need the new one."""
ONLY_ON_STABLE: Final = ("maxReplicas", "scaleMetric", "scaleTarget", "containerConcurrency", "timeout")
"""Fields that KServe refuses on a canary, or takes from the stable predictor."""


def predictor(endpoint: KServeEndpoint, release: str) -> Object:
    """``spec.predictor`` of the stable release; raises as ``objects.predictor``."""
    return objects.predictor(endpoint, release) | {"name": predictor_name(release)}


def canary(stable: Object, percent: int) -> Object:
    """Build an entry of ``spec.canary``, made from its release's ``predictor``."""
    fields = {key: value for key, value in stable.items() if key not in ONLY_ON_STABLE}
    return {"trafficPercent": percent, "predictor": fields}


def replicas(predictor: Object) -> int:
    return int(predictor.get("minReplicas", 1))


def with_replicas(predictor: Object, more: int) -> Object:
    """Add *more* replicas to a predictor."""
    bounds = [key for key in ("minReplicas", "maxReplicas") if key in predictor]
    return predictor | {key: max(1, int(predictor[key]) + more) for key in bounds}


def inference_service(endpoint: KServeEndpoint, stable: Object, canaries: Sequence[Object] = ()) -> Object:
    """Args: stable: its ``spec.predictor``."""
    annotations = {DEPLOYMENT_MODE: NAMES[0]} | autoscaler_class(endpoint)
    return objects.inference_service(endpoint, {"predictor": stable, "canary": list(canaries)}, annotations)


def deployment(endpoint: KServeEndpoint, predictor: Object) -> str:
    """Name a predictor's Deployment and its Service."""
    return f"{endpoint.name}-{predictor['name']}-predictor"


def render(endpoint: KServeEndpoint, shares: Mapping[str, int]) -> list[Object]:
    """See ``Mode.render``."""
    predictors = {release: predictor(endpoint, release) for release in shares}
    first, *tried = shares
    canaries = [canary(predictors[release], shares[release]) for release in tried]
    stable = with_replicas(predictors[first], sum(replicas(predictors[release]) for release in tried))
    deployments = {release: deployment(endpoint, served) for release, served in predictors.items()}
    return [
        inference_service(endpoint, stable, canaries),
        disruption_budget(endpoint),
        *scaled_objects(endpoint, deployments),
    ]
