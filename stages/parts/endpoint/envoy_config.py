"""Envoy's configuration: one listener, a cluster for each release, and one route that splits new requests by weight.

Field names and meanings: https://www.envoyproxy.io/docs/envoy/latest/api-v3/api
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

RELEASE_HEADER: Final = "x-slipway-release"
"""The header of every answer that names the release that gave it."""
ROUTER: Final = "endpoint"
ROUTES: Final = "routes"
CLUSTERS_FILE: Final = "clusters.json"
ROUTES_FILE: Final = "routes.json"
ADMIN_SOCKET: Final = "admin.sock"
IDLE_S: Final = 3
"""Envoy closes an idle connection before vLLM does (5 s), so that a request never meets a closing connection."""
UNLIMITED: Final = 1_000_000
"""Envoy's own limits would refuse more than 1024 requests, and more than 3 retries, at a time."""
TYPES: Final = "type.googleapis.com/envoy"
MANAGER: Final = f"{TYPES}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
Json = dict[str, Any]


@dataclass(frozen=True)
class Backend:
    """A server that is up."""

    release: str
    host: str
    port: int


@dataclass(frozen=True)
class Plan:
    """How requests are routed."""

    clusters: Mapping[str, tuple[Backend, ...]]
    """For each release: its own server, then those that replace it while it does not answer."""
    weights: Mapping[str, int]
    """Share of new requests in %, by release."""


def plan(
    releases: Iterable[str],
    up: Mapping[str, Backend],
    stable: str,
    canary: str | None,
    percent: int,
    standby: str | None,
) -> Plan:
    """If a server is gone, its requests go to the stable release's server; those of the stable release, to the
    standby's."""
    clusters = {}
    for release in releases:
        order = dict.fromkeys(name for name in (release, stable, standby) if name in up)
        clusters[release] = tuple(up[name] for name in order if name is not None)
    weights = {stable: 100} if canary is None else {stable: 100 - percent, canary: percent}
    return Plan(clusters, {release: share for release, share in weights.items() if share})


def bootstrap(host: str, port: int, folder: str) -> Json:
    """Envoy's start configuration. It reads clusters and routes from files, again whenever they are replaced."""
    source = {"path": f"{folder}/{CLUSTERS_FILE}"}
    return {
        "node": {"id": "slipway", "cluster": "slipway"},
        "admin": {"address": {"pipe": {"path": ADMIN_SOCKET, "mode": 0o600}}},
        "dynamic_resources": {"cds_config": {"path_config_source": source, "resource_api_version": "V3"}},
        "static_resources": {"listeners": [_listener(host, port, folder)]},
    }


def clusters_document(plan: Plan, version: str) -> Json:
    resources = [_cluster(release, backends) for release, backends in plan.clusters.items()]
    return {"version_info": version, "resources": resources}


def routes_document(plan: Plan, version: str) -> Json:
    weighted = [{"name": release, "weight": share} for release, share in plan.weights.items()]
    route = {
        "match": {"prefix": "/"},
        "route": {
            "weighted_clusters": {"clusters": weighted},
            "timeout": "0s",  # no limit on the time of an answer
            "retry_policy": _RETRY,
        },
    }
    release = {"key": RELEASE_HEADER, "value": "%UPSTREAM_METADATA(slipway:release)%"}
    configuration = {
        "@type": f"{TYPES}.config.route.v3.RouteConfiguration",
        "name": ROUTES,
        "virtual_hosts": [{"name": ROUTES, "domains": ["*"], "routes": [route]}],
        "response_headers_to_add": [{"header": release, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}],
    }
    return {"version_info": version, "resources": [configuration]}


# A request goes to the next server if its own refuses it, or dies before it has answered a byte.
_RETRY: Final[Json] = {
    "retry_on": "connect-failure,refused-stream,reset",
    "num_retries": 2,
    "retry_priority": {
        "name": "envoy.retry_priorities.previous_priorities",
        "typed_config": {
            "@type": f"{TYPES}.extensions.retry.priority.previous_priorities.v3.PreviousPrioritiesConfig",
            "update_frequency": 1,
        },
    },
}


def _listener(host: str, port: int, folder: str) -> Json:
    manager = {
        "@type": MANAGER,
        "stat_prefix": ROUTER,
        "stream_idle_timeout": "0s",  # a long prompt takes long until the first token
        "use_remote_address": True,
        "generate_request_id": False,
        "server_header_transformation": "PASS_THROUGH",
        "upgrade_configs": [{"upgrade_type": "websocket"}],
        "rds": {
            "route_config_name": ROUTES,
            "config_source": {
                "path_config_source": {"path": f"{folder}/{ROUTES_FILE}"},
                "resource_api_version": "V3",
            },
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": f"{TYPES}.extensions.filters.http.router.v3.Router",
                    "suppress_envoy_headers": True,
                },
            }
        ],
    }
    return {
        "name": ROUTER,
        "address": {"socket_address": {"address": host, "port_value": port}},
        "enable_reuse_port": False,  # otherwise a second proxy could share the port unnoticed
        "filter_chains": [{"filters": [{"name": MANAGER.rpartition(".")[2], "typed_config": manager}]}],
    }


def _cluster(release: str, backends: tuple[Backend, ...]) -> Json:
    protocol = {
        "@type": f"{TYPES}.extensions.upstreams.http.v3.HttpProtocolOptions",
        "common_http_protocol_options": {"idle_timeout": f"{IDLE_S}s"},
        "explicit_http_config": {"http_protocol_options": {}},
    }
    limits = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    return {
        "@type": f"{TYPES}.config.cluster.v3.Cluster",
        "name": release,
        "type": "STATIC",
        "connect_timeout": "5s",
        "circuit_breakers": {"thresholds": [dict.fromkeys(limits, UNLIMITED)]},
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": protocol},
        "health_checks": [
            {
                "timeout": "5s",
                "interval": "1s",
                "no_traffic_interval": "1s",
                "unhealthy_threshold": 3,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/health"},
            }
        ],
        "load_assignment": {
            "cluster_name": release,
            "endpoints": [_endpoints(priority, backend) for priority, backend in enumerate(backends)],
        },
    }


def _endpoints(priority: int, backend: Backend) -> Json:
    address = {"socket_address": {"address": backend.host, "port_value": backend.port}}
    return {
        "priority": priority,
        "lb_endpoints": [
            {
                "endpoint": {"address": address},
                "metadata": {"filter_metadata": {"slipway": {"release": backend.release}}},
            }
        ],
    }
