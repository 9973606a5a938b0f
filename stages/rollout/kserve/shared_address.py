"""One host name for all models, where the model that a request names decides: by Envoy AI Gateway 1.0 or newer, which
reads the name from the body and answers ``GET /v1/models`` itself.

Each model adds a route of its own for that host. It leads back to the gateway, under the model's own host name, so that
its keys, limits and rollouts are in one place, as on one machine. It lacks the label of our other routes: their
policies would take the key from the request before the model's own route sees it.
"""

from __future__ import annotations

from typing import Final

from stages.parts.base.templates import rendered
from stages.parts.cluster.kinds import Kind, Object
from stages.parts.model.adapter import adapters_in
from stages.rollout.kserve.objects import ENDPOINT, PART_OF, TEMPLATES, KServeEndpoint, gateway_reference

AI_GATEWAY: Final = "aigateway.envoyproxy.io/v1beta1"
ENVOY_GATEWAY: Final = "gateway.envoyproxy.io/v1alpha1"
KINDS: Final = (
    Kind(ENVOY_GATEWAY, "Backend", "backends"),
    Kind(AI_GATEWAY, "AIServiceBackend", "aiservicebackends"),
    Kind(AI_GATEWAY, "AIGatewayRoute", "aigatewayroutes"),
    Kind(ENVOY_GATEWAY, "BackendTrafficPolicy", "backendtrafficpolicies"),
)
"""Of the objects, in their order."""
SHARED: Final = {"slipway/shared-address": "true"}
"""Their label."""


def list_host(shared_host: str) -> str:
    """Where Envoy AI Gateway's list of models is asked for, of which clients then see their own."""
    return f"list.{shared_host}"


def shared_name(endpoint: KServeEndpoint) -> str:
    return f"{endpoint.name}-shared"


def shared_objects(endpoint: KServeEndpoint, release: str, gateway: str, hostname: str) -> list[Object]:
    """Build the objects of the shared address for a model, which *gateway* (``namespace/name``) serves as *hostname*;
    none if the settings name no such address."""
    settings = endpoint.settings
    if settings.shared_host is None:
        return []
    shared = {ENDPOINT: endpoint.name} | SHARED
    host, _, port = (settings.shared_through or f"{hostname}:80").rpartition(":")
    return rendered(
        TEMPLATES / "shared_address.yaml.jinja",
        endpoint=endpoint,
        name=shared_name(endpoint),
        labels=PART_OF | shared,
        models=[endpoint.store.model, *adapters_in(endpoint.store.releases / release)],
        gateway=gateway_reference(gateway),
        host=host,
        port=int(port),
        hostname=hostname,
        list_host=list_host(settings.shared_host),
        shared=shared,
    )
