"""One host name for all models, where the model that a request names decides: by Envoy AI Gateway 1.1 or newer, which
reads the name from the body and answers ``GET /v1/models`` itself.

Each model adds a route of its own for that host. It leads back to the gateway, under the model's own host name, so that
its keys, limits and rollouts are in one place, as on one machine. It lacks the label of our other routes: their
policies would take the key from the request before the model's own route sees it.
"""

from __future__ import annotations

import json
from typing import Final

from stages.parts.cluster.kinds import Kind, Object
from stages.parts.model.adapter import adapters_in
from stages.rollout.kserve.objects import ENDPOINT, KServeEndpoint, manifest

AI_GATEWAY: Final = "aigateway.envoyproxy.io/v1beta1"
ENVOY_GATEWAY: Final = "gateway.envoyproxy.io/v1alpha1"
ROUTES: Final = Kind(AI_GATEWAY, "AIGatewayRoute", "aigatewayroutes")
SERVICES: Final = Kind(AI_GATEWAY, "AIServiceBackend", "aiservicebackends")
BACKENDS: Final = Kind(ENVOY_GATEWAY, "Backend", "backends")
POLICIES: Final = Kind(ENVOY_GATEWAY, "BackendTrafficPolicy", "backendtrafficpolicies")
KINDS: Final = (BACKENDS, SERVICES, ROUTES, POLICIES)
SHARED: Final = {"slipway/shared-address": "true"}
"""The label of these routes."""
MODEL_HEADER: Final = "x-ai-eg-model"
UNKNOWN: Final = {
    "message": "the model does not exist at this address; GET /v1/models lists those that do",
    "type": "invalid_request_error",
    "param": "model",
    "code": "model_not_found",
}


def shared_name(endpoint: KServeEndpoint) -> str:
    return f"{endpoint.name}-shared"


def shared_objects(endpoint: KServeEndpoint, release: str, gateway: str, hostname: str) -> list[Object]:
    """Build the objects of the shared address for a model, which *gateway* (``namespace/name``) serves as *hostname*;
    none if the settings name no such address."""
    settings, name = endpoint.settings, shared_name(endpoint)
    if settings.shared_host is None:
        return []
    host, _, port = (settings.shared_through or f"{hostname}:80").rpartition(":")
    backend = {"fqdn": {"hostname": host, "port": int(port)}, "hostname": hostname}
    reference = {"group": "gateway.envoyproxy.io", "kind": BACKENDS.name, "name": name}
    names = (endpoint.store.model, *adapters_in(endpoint.store.releases / release))
    rule = {
        "matches": [{"headers": [{"type": "Exact", "name": MODEL_HEADER, "value": served}]} for served in names],
        "backendRefs": [{"name": name}],
        "timeouts": {"request": f"{settings.timeout_s}s"},
        "modelsOwnedBy": "slipway",
    }
    namespace, _, called = gateway.rpartition("/")
    parent = {"name": called} | ({"namespace": namespace} if namespace else {})
    route = {"parentRefs": [parent], "hostnames": [settings.shared_host], "rules": [rule]}
    # Of the gateway's own answers; those of a model pass as they are.
    unknown = {
        "match": {"statusCodes": [{"type": "Value", "value": 404}]},
        "source": "Local",
        "response": {
            "contentType": "application/json",
            "body": {"type": "Inline", "inline": json.dumps({"error": UNKNOWN})},
        },
    }
    # Envoy AI Gateway makes it of the route, with its labels.
    target = {"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "name": name}
    specs: dict[Kind, Object] = {
        BACKENDS: {"endpoints": [backend]},
        SERVICES: {"schema": {"name": "OpenAI"}, "backendRef": reference},
        ROUTES: route,
        POLICIES: {"targetRefs": [target], "responseOverride": [unknown]},
    }
    labels = {ENDPOINT: endpoint.name}
    bodies = [manifest(kind, endpoint, spec, name=name, labels=labels) for kind, spec in specs.items()]
    for body in bodies:
        if body["kind"] == ROUTES.name:
            body["metadata"]["labels"] = labels | SHARED
    return bodies
