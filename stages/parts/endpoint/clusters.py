"""Envoy's clusters: the servers of each release, which of them gets a request, and when one gets none.

The replicas of a release are one another's first replacement; after them come the stable release and the standby.
Without a session, a request goes where the fewest are under way. Envoy's hashing has no such fallback: without a hash
it draws a server. Requests with a session therefore have clusters of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from stages.parts.endpoint.offered import HEALTH

IDLE_S: Final = 3
"""Envoy closes an idle connection before vLLM does, so that a request never meets a closing connection."""
UNLIMITED: Final = 1_000_000
"""Envoy's own limits would refuse more than 1024 requests, and more than 3 retries, at a time."""
BODY_BYTES: Final = 64 << 20
"""The longest prompt, and the longest answer that is not streamed, both with all that belongs to them."""
BALANCE_PERCENT: Final = 125
"""What a replica may have under way, of the mean of all, before its sessions' requests go to another one: the bound of
Mirrokni et al., "Consistent Hashing with Bounded Loads"."""
ANY_IS_ENOUGH: Final = 100_000
"""Envoy's overprovisioning factor in %: as long as one replica is healthy, no request goes to another release."""
EJECTED_AFTER: Final = 5
"""Errors in a row."""
EJECTED_S: Final = 10
"""For how long a replica gets no requests the first time; so much longer each further time."""
SESSIONS: Final = "-sessions"
TYPES: Final = "type.googleapis.com/envoy"
Json = dict[str, Any]


@dataclass(frozen=True)
class Backend:
    """A server that is up."""

    release: str
    socket: str
    """The path of the Unix socket on which it listens."""
    replica: int = 0
    """Its number within the release."""


@dataclass(frozen=True)
class Balance:
    """How requests are divided among the replicas of a release; the same as long as an endpoint runs."""

    replicas: int = 1
    affinity: Literal["session", "client", "none"] = "session"
    request_timeout_s: int = 3600

    @property
    def sessions(self) -> bool:
        """Whether requests with a session have a cluster of their own."""
        return self.replicas > 1 and self.affinity == "session"


@dataclass(frozen=True)
class Plan:
    """How requests are routed."""

    clusters: Mapping[str, tuple[tuple[Backend, ...], ...]]
    """For each release: its own servers, then those of each release that replaces it while none of them answers."""
    weights: Mapping[str, int]
    """Share of new requests in %, by release."""
    balance: Balance = Balance()


def plan(
    releases: Iterable[str],
    up: Mapping[str, Sequence[Backend]],
    stable: str,
    canary: str | None,
    percent: int,
    standby: str | None,
    balance: Balance = Balance(),
) -> Plan:
    """If all servers of a release are gone, its requests go to the stable release's servers; those of the stable
    release, to the standby's."""
    clusters = {}
    for release in releases:
        order = dict.fromkeys(name for name in (release, stable, standby) if name is not None and up.get(name))
        clusters[release] = tuple(tuple(up[name]) for name in order)
    weights = {stable: 100} if canary is None else {stable: 100 - percent, canary: percent}
    return Plan(clusters, {release: share for release, share in weights.items() if share}, balance)


def names_of(release: str) -> tuple[str, str]:
    """The clusters that a release may have."""
    return release, f"{release}{SESSIONS}"


def clusters_document(plan: Plan, version: str) -> Json:
    resources = [cluster for release in plan.clusters for cluster in _clusters(plan, release)]
    return {"version_info": version, "resources": resources}


PROTOCOL: Final[Json] = {
    "@type": f"{TYPES}.extensions.upstreams.http.v3.HttpProtocolOptions",
    "common_http_protocol_options": {"idle_timeout": f"{IDLE_S}s"},
    "explicit_http_config": {"http_protocol_options": {}},
}
UNLIMITED_USE: Final[Json] = {
    "thresholds": [dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), UNLIMITED)]
}


def http_options(protocol: Json) -> Json:
    return {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": protocol}


def _clusters(plan: Plan, release: str) -> Iterator[Json]:
    orders, balance = plan.clusters[release], plan.balance
    plain, sessions = names_of(release)
    yield _cluster(plain, orders, _HASHED if balance.affinity == "client" else _LEAST)
    if balance.sessions:
        yield _cluster(sessions, orders, _HASHED)


def _policy(name: str, message: str, **settings: object) -> Json:
    typed = {"@type": f"{TYPES}.extensions.load_balancing_policies.{name}.v3.{message}", **settings}
    return {"policies": [{"typed_extension_config": {"name": name, "typed_config": typed}}]}


# By default Envoy compares two that it draws, which of two replicas are the same one half of the time.
_LEAST: Final = _policy("least_request", "LeastRequest", selection_method="FULL_SCAN")
# Of a replica that is gone only its own sessions go elsewhere, but for one of a thousand. Envoy's ring is of one size,
# whatever the number of servers, so that a tenth of the others' sessions would move, too.
_HASHED: Final = _policy("maglev", "Maglev", consistent_hashing_lb_config={"hash_balance_factor": BALANCE_PERCENT})
# What a server refuses because too much is waiting (503) is no fault: its load would only go to the others.
_FAULTS: Final[Json] = {
    "or_match": {
        "rules": [
            {"http_response_headers_match": {"headers": [{"name": ":status", "range_match": {"start": a, "end": b}}]}}
            for a, b in ((500, 503), (504, 600))
        ]
    }
}


def _cluster(name: str, orders: tuple[tuple[Backend, ...], ...], policy: Json) -> Json:
    own = len(orders[0]) if orders else 0
    ejecting = own > 1
    return {
        "@type": f"{TYPES}.config.cluster.v3.Cluster",
        "name": name,
        "type": "STATIC",
        "connect_timeout": "5s",
        "per_connection_buffer_limit_bytes": BODY_BYTES,
        "circuit_breakers": UNLIMITED_USE,
        "typed_extension_protocol_options": http_options(
            PROTOCOL | ({"outlier_detection": {"error_matcher": _FAULTS}} if ejecting else {})
        ),
        "load_balancing_policy": policy,
        "health_checks": [
            {
                "timeout": "5s",
                "interval": "1s",
                "no_traffic_interval": "1s",
                "unhealthy_threshold": 3,
                "healthy_threshold": 1,
                "http_health_check": {"path": HEALTH},
            }
        ],
        "load_assignment": {
            "cluster_name": name,
            "policy": {"overprovisioning_factor": ANY_IS_ENOUGH},
            "endpoints": [
                {"priority": priority, "lb_endpoints": [_endpoint(backend) for backend in backends]}
                for priority, backends in enumerate(orders)
            ],
        },
    } | ({"outlier_detection": _outlier_detection(own, sum(map(len, orders)))} if ejecting else {})


def _outlier_detection(own: int, all_servers: int) -> Json:
    """A replica that answers with errors in a row gets no requests for some time; one always stays. Envoy counts the
    ejected among all servers of the cluster, those of other releases included."""
    return {
        "consecutive_5xx": EJECTED_AFTER,
        "interval": "1s",
        "base_ejection_time": f"{EJECTED_S}s",
        "max_ejection_percent": -(-100 * (own - 1) // all_servers),
        "enforcing_success_rate": 0,
        # It is healthy, or its supervisor would restart it, and answers with errors all the same.
        "successful_active_health_check_uneject_host": False,
    }


def _endpoint(backend: Backend) -> Json:
    # A server that was restarted listens elsewhere, and gets back the sessions that it had.
    metadata = {"slipway": {"release": backend.release}, "envoy.lb": {"hash_key": str(backend.replica)}}
    return {
        "endpoint": {"address": {"pipe": {"path": backend.socket}}},
        "metadata": {"filter_metadata": metadata},
    }
