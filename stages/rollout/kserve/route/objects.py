"""The objects of mode ``route``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stages.parts.base.errors import ConfigError
from stages.parts.cluster.kinds import Object
from stages.rollout.kserve import objects
from stages.rollout.kserve.autoscaling import scaled_objects
from stages.rollout.kserve.detect import as_configured
from stages.rollout.kserve.http_route import HTTP_ROUTES
from stages.rollout.kserve.objects import (
    DEPLOYMENT_MODE,
    ENDPOINT,
    LEAST_CHARACTERS,
    MODEL,
    PART_OF,
    KServeEndpoint,
    autoscaler_class,
    disruption_budget,
    predictor,
    predictor_name,
    room_for_name,
    route_spec,
    shortened,
)

SERVICE_PORT: Final = 80


def route_name(endpoint: KServeEndpoint) -> str:
    """Name the rollout's HTTPRoute: never the name of one that KServe makes for an InferenceService."""
    return f"{endpoint.name}-route"


def service_name(endpoint: KServeEndpoint, release: str) -> str:
    """Name a release's InferenceService. KServe calls its Deployment ``<this>-predictor``, as no other mode's is
    called, and its host ``<this>-predictor-<namespace>``, which is one label of DNS.

    Raises:
        ConfigError: the namespace's name leaves no room for the endpoint's.
    """
    suffix = f"-{predictor_name(release)}-route"
    room = room_for_name(suffix, endpoint.namespace)
    if room < LEAST_CHARACTERS:
        raise ConfigError(
            f"the namespace {endpoint.namespace} is too long for the host names that KServe makes of it",
            hint=f"one of at most {len(endpoint.namespace) + room - LEAST_CHARACTERS} characters has room",
        )
    return shortened(endpoint, room) + suffix


def deployment(endpoint: KServeEndpoint, release: str) -> str:
    """Name a release's Deployment and its Service."""
    return f"{service_name(endpoint, release)}-predictor"


def inference_service(endpoint: KServeEndpoint, release: str) -> Object:
    """Build a release's InferenceService; raises as ``objects.predictor``."""
    # The old name of the deployment mode, which every version understands.
    annotations = {DEPLOYMENT_MODE: "RawDeployment"} | autoscaler_class(endpoint)
    labels = {"networking.kserve.io/visibility": "cluster-local", ENDPOINT: endpoint.name}
    spec = {"predictor": predictor(endpoint, release)}
    return objects.inference_service(endpoint, spec, annotations, name=service_name(endpoint, release), labels=labels)


def http_route(endpoint: KServeEndpoint, gateway: str, hostname: str, weights: list[tuple[str, int, int]]) -> Object:
    """Build the route of clients; the gateway answers 404 for what it does not match.

    Args:
        weights: (Service, port, percent), the stable release first.
    """
    return {
        "apiVersion": HTTP_ROUTES.api_version,
        "kind": HTTP_ROUTES.name,
        "metadata": {
            "name": route_name(endpoint),
            "namespace": endpoint.namespace,
            "labels": dict(PART_OF),
            "annotations": {MODEL: endpoint.store.model, "slipway/mode": "route"},
        },
        "spec": route_spec(
            endpoint,
            gateway,
            hostname,
            [
                {"group": "", "kind": "Service", "name": service, "port": port, "weight": percent}
                for service, port, percent in weights
            ],
        ),
    }


def render(endpoint: KServeEndpoint, shares: Mapping[str, int]) -> list[Object]:
    """See ``Mode.render``."""
    deployments = {release: deployment(endpoint, release) for release in shares}
    weights = [(deployments[release], SERVICE_PORT, percent) for release, percent in shares.items()]
    installation = as_configured("route", endpoint.settings, {})
    hostname = installation.hostname(endpoint.name, endpoint.namespace)
    return [
        *(inference_service(endpoint, release) for release in shares),
        http_route(endpoint, installation.gateway, hostname, weights),
        disruption_budget(endpoint),
        *scaled_objects(endpoint, deployments),
    ]
