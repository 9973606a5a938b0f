"""What an endpoint offers, and where new requests go: the servers of each release, what replaces them while they do not
answer, and the shares.

While there are two releases, each request has a side, 0–99, by its conversation (see ``sides``): the canary has the
highest ones, as many as its share. A larger share leaves the conversations there that it has.

The replicas of a release are one another's first replacement; after them come the stable release and the standby.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from stages.parts.endpoint.endpoint import Wanted

HEALTH: Final = "/health"
OFFERED: Final = {
    "/v1/chat/completions": "POST",
    "/v1/completions": "POST",
    "/v1/responses": "POST",
    "/v1/models": "GET",
    HEALTH: "GET",
}
"""The method of each path that is offered, on one machine and on a cluster: what vLLM answers for a model that
generates text. vLLM has more: routes that generate without a key (``/invocations``), and routes that reveal what
clients do (``/metrics``, ``/load``)."""
SHARED_HEADER: Final = "x-slipway-shared"
"""Tells a door that a request came by the address that all models share, where nobody learns of others' models."""
SESSIONS: Final = "-sessions"
COPIES: Final = "copies"
"""The cluster that answers copies of requests: the canary's servers, and nothing that replaces them."""


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
    def sticks(self) -> bool:
        """Whether a conversation stays with the release that it has."""
        return self.affinity != "none"

    @property
    def sessions(self) -> bool:
        """Whether requests with a session have a cluster of their own."""
        return self.replicas > 1 and self.affinity == "session"


@dataclass(frozen=True)
class EnvoyCluster:
    """What Envoy calls a cluster: the servers of a release, and those that replace them."""

    name: str
    orders: tuple[tuple[Backend, ...], ...]
    """The release's own servers, then those of each release that replaces it while none of them answers."""
    hashed: bool
    """Whether the session or the client decides which server gets a request, rather than how busy the servers are."""

    @property
    def ejects(self) -> bool:
        """Whether a server that answers with errors gets no requests for some time."""
        return bool(self.orders) and len(self.orders[0]) > 1

    @property
    def max_ejection_percent(self) -> int:
        """The release's servers but one, in % of all servers of the cluster."""
        return -(-100 * (len(self.orders[0]) - 1) // sum(map(len, self.orders)))


@dataclass(frozen=True)
class Routing:
    """What Envoy is to do with new requests."""

    orders: Mapping[str, tuple[tuple[Backend, ...], ...]]
    """For each release, see ``EnvoyCluster``."""
    weights: Mapping[str, int]
    """Share of new requests in %, by release, the stable one's first."""
    balance: Balance = Balance()
    copied: int = 0
    """Share of new requests of which the servers in ``copies`` get copies, in %."""
    copies: tuple[Backend, ...] = ()
    models: Mapping[str, str] | None = None
    """At the address that all models share: which one answers to each name. ``orders`` has their endpoints."""

    @property
    def has_sides(self) -> bool:
        """Whether it matters which side a request is on."""
        return (len(self.weights) > 1 and self.balance.sticks) or 0 < self.copied < 100

    def clusters(self) -> Iterator[EnvoyCluster]:
        if self.copied:
            yield EnvoyCluster(COPIES, (self.copies,) if self.copies else (), hashed=self.balance.sticks)
        for release, orders in self.orders.items():
            plain, sessions = names_of(release)
            yield EnvoyCluster(plain, orders, hashed=self.balance.affinity == "client")
            if self.balance.sessions:
                yield EnvoyCluster(sessions, orders, hashed=True)


def routing(
    releases: Iterable[str], up: Mapping[str, Sequence[Backend]], wanted: Wanted, balance: Balance = Balance()
) -> Routing:
    """Route to the stable release and the canary that are *wanted*. If all servers of a release are gone, its requests
    go to the stable release's servers; those of the stable release, to the standby's."""
    stable, canary, percent = wanted.stable, wanted.canary, wanted.percent
    orders = {}
    for release in releases:
        names = dict.fromkeys(name for name in (release, stable, wanted.standby) if name is not None and up.get(name))
        orders[release] = tuple(tuple(up[name]) for name in names)
    weights = {stable: 100} if canary is None else {stable: 100 - percent, canary: percent}
    copies = tuple(up.get(canary, ())) if canary and wanted.copied else ()
    shares = {release: share for release, share in weights.items() if share}
    return Routing(orders, shares, balance, wanted.copied if canary else 0, copies)


def names_of(release: str) -> tuple[str, str]:
    """Return the names of the clusters that a release may have."""
    return release, f"{release}{SESSIONS}"
