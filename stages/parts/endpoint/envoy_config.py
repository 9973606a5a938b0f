"""Envoy's configuration: one listener, and routes that split new requests by weight among the releases' clusters.

A path is compared as it was sent: what another spelling would mean to vLLM (doubled or encoded slashes, dot segments,
upper case) does not matter, since only what is spelled as in ``OFFERED`` is forwarded. All else is answered 404.

Field names and meanings: https://www.envoyproxy.io/docs/envoy/latest/api-v3/api
"""

from __future__ import annotations

import json
from typing import Final

from stages.parts.endpoint import access_log
from stages.parts.endpoint.clusters import (
    BODY_BYTES,
    PROTOCOL,
    TYPES,
    UNLIMITED_USE,
    Balance,
    Json,
    Plan,
    http_options,
    names_of,
)
from stages.parts.endpoint.door import CLIENT_HEADER, PRIORITY_HEADER
from stages.parts.endpoint.offered import HEALTH, OFFERED
from stages.parts.endpoint.tls import transport_socket

RELEASE_HEADER: Final = "x-slipway-release"
"""The header of every answer that names the release that gave it."""
ROUTER: Final = "endpoint"
ROUTES: Final = "routes"
CLUSTERS_FILE: Final = "clusters.json"
ROUTES_FILE: Final = "routes.json"
ADMIN_SOCKET: Final = "admin.sock"
DOOR_SOCKET: Final = "door.sock"
DOOR: Final = "door"
"""The cluster of the service that decides who may ask."""
DOOR_TIMEOUT_S: Final = 5
AUTHORIZATION: Final = access_log.AUTHORIZATION
EVENT_BYTES: Final = 1 << 20
RETRY_AFTER_S: Final = 2
NOT_FOUND: Final = {"message": "there is no such route", "type": "invalid_request_error", "param": None, "code": None}
SESSION_HEADER: Final = "x-session-id"
RETRY_HOSTS: Final = 20
"""How often Envoy looks for a server that has not been tried yet."""
MANAGER: Final = f"{TYPES}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"


def bootstrap(address: tuple[str, int], folder: str, model: str, *, tls: bool) -> Json:
    """Envoy's start configuration. It reads clusters, routes and the certificate from files, again whenever they are
    replaced.
    """
    source = {"path": f"{folder}/{CLUSTERS_FILE}"}
    return {
        "node": {"id": "slipway", "cluster": "slipway"},
        "admin": {"address": {"pipe": {"path": ADMIN_SOCKET, "mode": 0o600}}},
        "dynamic_resources": {"cds_config": {"path_config_source": source, "resource_api_version": "V3"}},
        "static_resources": {"listeners": [_listener(address, folder, model, tls)], "clusters": [_door()]},
    }


def routes_document(plan: Plan, version: str) -> Json:
    balance = plan.balance
    plain, sessions = ([names_of(release)[place] for release in plan.weights] for place in (0, 1))
    routes = []
    for path, method in OFFERED.items():
        unasked = _UNASKED if path == HEALTH else {}
        if balance.sessions:
            of_session = {"name": SESSION_HEADER, "present_match": True}
            action = _action(plan, sessions, [_SESSION])
            routes.append({"match": _match(path, method, of_session), "route": action} | unasked)
        hashed = [_SESSION, *_CLIENT] if balance.affinity == "client" else []
        routes.append({"match": _match(path, method), "route": _action(plan, plain, hashed)} | unasked)
    routes.append(_NOTHING)
    release = {"key": RELEASE_HEADER, "value": "%UPSTREAM_METADATA(slipway:release)%"}
    # What vLLM refuses because too much is waiting already may be tried again. An empty header is left out.
    retry = {"key": "retry-after", "value": f"%CEL(response.code == 503 ? '{RETRY_AFTER_S}' : '')%"}
    configuration = {
        "@type": f"{TYPES}.config.route.v3.RouteConfiguration",
        "name": ROUTES,
        "virtual_hosts": [{"name": ROUTES, "domains": ["*"], "routes": routes}],
        "response_headers_to_add": [
            {"header": release, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"},
            {"header": retry, "append_action": "ADD_IF_ABSENT"},
        ],
    }
    return {"version_info": version, "resources": [configuration]}


# Without a question to the door.
_UNASKED: Final[Json] = {
    "typed_per_filter_config": {
        AUTHORIZATION: {"@type": f"{TYPES}.extensions.filters.http.ext_authz.v3.ExtAuthzPerRoute", "disabled": True}
    }
}
_NOTHING: Final[Json] = _UNASKED | {
    "match": {"prefix": "/"},
    "direct_response": {"status": 404, "body": {"inline_string": json.dumps({"error": NOT_FOUND})}},
    "response_headers_to_add": [
        {
            "header": {"key": "content-type", "value": "application/json"},
            "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
        }
    ],
}


# Envoy itself answers 503 while no server or no door does.
_UNAVAILABLE: Final[Json] = {
    "filter": {"status_code_filter": {"comparison": {"value": {"default_value": 503, "runtime_key": "unavailable"}}}},
    "headers_to_add": [
        {"header": {"key": "retry-after", "value": str(RETRY_AFTER_S)}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
    ],
    "body_format_override": {
        "json_format": {
            "error": {
                "message": "the model is not available at the moment",
                "type": "server_error",
                "param": None,
                "code": "unavailable",
            }
        }
    },
}


# It would take as long again: OpenAI's clients don't retry what says so.
_TIMED_OUT: Final[Json] = {
    "filter": {"status_code_filter": {"comparison": {"value": {"default_value": 504, "runtime_key": "timed_out"}}}},
    "headers_to_add": [
        {"header": {"key": "x-should-retry", "value": "false"}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
    ],
    "body_format_override": {
        "json_format": {
            "error": {
                "message": "the answer took longer than serving.request_timeout_s allows",
                "type": "server_error",
                "param": None,
                "code": "timeout",
            }
        }
    },
}


def _match(path: str, method: str, *headers: Json) -> Json:
    return {"path": path, "headers": [{"name": ":method", "string_match": {"exact": method}}, *headers]}


_SESSION: Final[Json] = {"header": {"header_name": SESSION_HEADER}, "terminal": True}
# Both together: a client without a name is told by its address.
_CLIENT: Final[list[Json]] = [
    {"header": {"header_name": CLIENT_HEADER}},
    {"connection_properties": {"source_ip": True}},
]


def _action(plan: Plan, clusters: list[str], hashed: list[Json]) -> Json:
    shares = zip(clusters, plan.weights.values(), strict=True)
    return {
        "weighted_clusters": {"clusters": [{"name": name, "weight": share} for name, share in shares]},
        "timeout": f"{plan.balance.request_timeout_s}s",
        "retry_policy": _retry(plan.balance),
        "hash_policy": hashed,
    }


def _retry(balance: Balance) -> Json:
    """A request goes to the next server if its own refuses it, or dies before it has answered a byte: first to the
    other replicas, then to another release's."""
    return {
        "retry_on": "connect-failure,refused-stream,reset",
        "num_retries": balance.replicas + 1,
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": {"@type": f"{TYPES}.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"},
            }
        ],
        "host_selection_retry_max_attempts": RETRY_HOSTS,
        "retry_priority": {
            "name": "envoy.retry_priorities.previous_priorities",
            "typed_config": {
                "@type": f"{TYPES}.extensions.retry.priority.previous_priorities.v3.PreviousPrioritiesConfig",
                "update_frequency": balance.replicas,
            },
        },
    }


def _listener(address: tuple[str, int], folder: str, model: str, tls: bool) -> Json:
    manager = {
        "@type": MANAGER,
        "stat_prefix": ROUTER,
        "stream_idle_timeout": "0s",  # a long prompt takes long until the first token
        "use_remote_address": True,
        "access_log": [_access_log(model)],
        "local_reply_config": {"mappers": [_UNAVAILABLE, _TIMED_OUT]},
        "server_header_transformation": "PASS_THROUGH",
        "rds": {
            "route_config_name": ROUTES,
            "config_source": {
                "path_config_source": {"path": f"{folder}/{ROUTES_FILE}"},
                "resource_api_version": "V3",
            },
        },
        "http_filters": [
            {"name": AUTHORIZATION, "typed_config": _authorization()},
            *_usage(),
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": f"{TYPES}.extensions.filters.http.router.v3.Router",
                    "suppress_envoy_headers": True,
                },
            },
        ],
    }
    chain: Json = {"filters": [{"name": MANAGER.rpartition(".")[2], "typed_config": manager}]}
    if tls:
        chain["transport_socket"] = transport_socket(folder)
    return {
        "name": ROUTER,
        "address": {"socket_address": {"address": address[0], "port_value": address[1]}},
        "per_connection_buffer_limit_bytes": BODY_BYTES,
        "enable_reuse_port": False,  # otherwise a second proxy could share the port unnoticed
        "filter_chains": [chain],
    }


def _authorization() -> Json:
    """Ask the door for each request, and refuse it if there is no answer."""
    answered = [{"exact": name} for name in ("content-type", "retry-after", "www-authenticate")]
    return {
        "@type": f"{TYPES}.extensions.filters.http.ext_authz.v3.ExtAuthz",
        "transport_api_version": "V3",
        "http_service": {
            "server_uri": {"uri": f"http://{DOOR}", "cluster": DOOR, "timeout": f"{DOOR_TIMEOUT_S}s"},
            "authorization_response": {
                "allowed_upstream_headers": {"patterns": [{"exact": PRIORITY_HEADER}, {"exact": CLIENT_HEADER}]},
                "allowed_client_headers": {"patterns": answered},
                "dynamic_metadata_from_headers": {"patterns": [{"exact": CLIENT_HEADER}]},
            },
        },
        "allowed_headers": {"patterns": [{"exact": "authorization"}, {"exact": "x-request-id"}]},
        "failure_mode_allow": False,
        "status_on_error": {"code": "ServiceUnavailable"},
    }


def _usage() -> list[Json]:
    """The filters that take from an answer, whole or streamed, the tokens that it says it used. vLLM says so in every
    event of a stream, so that of one that was cut the last is known."""
    rules = [
        {
            "selectors": [{"key": key} for key in path],
            "on_present": {"metadata_namespace": access_log.NAMESPACE, "key": name},
        }
        for name, paths in access_log.USAGE.items()
        for path in paths
    ]
    parser = {
        "@type": f"{TYPES}.extensions.content_parsers.json.v3.JsonContentParser",
        "rules": [{"rule": rule} for rule in rules],
    }
    whole = {
        "@type": f"{TYPES}.extensions.filters.http.json_to_metadata.v3.JsonToMetadata",
        "response_rules": {"rules": rules},
    }
    streamed = {
        "@type": f"{TYPES}.extensions.filters.http.sse_to_metadata.v3.SseToMetadata",
        "response_rules": {
            "content_parser": {"name": "envoy.content_parsers.json", "typed_config": parser},
            "max_event_size": EVENT_BYTES,
        },
    }
    return [
        {"name": "envoy.filters.http.json_to_metadata", "typed_config": whole},
        {"name": "envoy.filters.http.sse_to_metadata", "typed_config": streamed},
    ]


def _access_log(model: str) -> Json:
    fields = access_log.line_format(model, CLIENT_HEADER, RELEASE_HEADER)
    healthy = {"name": ":path", "string_match": {"exact": HEALTH}, "invert_match": True}
    return {
        "name": "envoy.access_loggers.file",
        "filter": {"header_filter": {"header": healthy}},
        "typed_config": {
            "@type": f"{TYPES}.extensions.access_loggers.file.v3.FileAccessLog",
            "path": access_log.NAME,
            "log_format": {"json_format": fields, "omit_empty_values": True},
        },
    }


def _door() -> Json:
    return {
        "name": DOOR,
        "type": "STATIC",
        "connect_timeout": f"{DOOR_TIMEOUT_S}s",
        "circuit_breakers": UNLIMITED_USE,
        "typed_extension_protocol_options": http_options(PROTOCOL),
        "load_assignment": {
            "cluster_name": DOOR,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": {"pipe": {"path": DOOR_SOCKET}}}}]}],
        },
    }
