"""Where releases are served and traffic is moved: what a rollout asks of one machine and of KServe alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Split:
    """What is served, and who gets which share of new requests."""

    stable: str | None
    """The release that clients get; None before the first one."""
    canary: str | None = None
    """The release that is being tried beside it."""
    percent: int = 0
    """Of new requests, to the canary: 0–100."""


@dataclass(frozen=True)
class Histogram:
    """A Prometheus histogram: cumulative counts by upper bound in seconds, the last one infinite."""

    bounds_s: tuple[float, ...]
    counts: tuple[float, ...]


@dataclass(frozen=True)
class Counters:
    """Running totals of one release, over all of its replicas, from vLLM's own metrics."""

    answered: float
    """Requests that were answered with 2xx."""
    failed: float
    """Requests that ended in 5xx, or that never reached a living server."""
    output_tokens: float
    ttft_s: Histogram
    tpot_s: Histogram
    instance: str
    """Changes when a server was started anew, and its totals with it from zero."""


class Target(Protocol):
    """Every call may be made again after a crash: what is already so stays so. Releases go by their directory's name.

    Raises (any of them):
        ServerFailed: a server does not come up or is gone. TransientError: the platform did not answer; ask again.
        Conflict: somebody else changed what is served meanwhile.
    """

    def split(self) -> Split:
        """What is in force, as the platform tells it, not as it was asked."""
        ...

    def deploy(self, release: str) -> None:
        """Start *release* beside the stable one, without traffic (the first release ever gets it all, once ready)."""
        ...

    def ready(self, release: str) -> bool:
        """Whether its servers say that they are ready. The rollout itself then asks for a completion."""
        ...

    def url(self, release: str) -> str:
        """Base URL (without ``/v1``) that reaches this release alone: for the first completion and the probes."""
        ...

    def shift(self, release: str, percent: int) -> None:
        """Give the canary *percent* % of new requests; returns once that is in force. Those in flight stay."""
        ...

    def promote(self, release: str) -> None:
        """The canary becomes the stable one. The old stable stays as a warm standby or is drained and removed."""
        ...

    def withdraw(self, release: str) -> None:
        """All traffic to the stable one, then drain and remove *release*."""
        ...

    def counters(self, release: str) -> Counters:
        """Its totals now."""
        ...
