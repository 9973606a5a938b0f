"""Where releases are served and traffic is moved: what a rollout asks of one machine and of KServe alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Split:
    """What is served, and who gets which share of new requests."""

    stable: str | None
    """The release that clients get; None while nothing is served."""
    canary: str | None = None
    """The release that is being tried beside it."""
    percent: int = 0
    """Of new requests, to the canary: 0–100."""
    standby: str | None = None
    """An earlier stable one that is kept warm, so that going back to it takes seconds."""
    room: bool = True
    """Whether a canary finds room beside the stable release. Where it does not, ``deploy`` puts it in its place and
    gives it all requests at once, and ``withdraw`` brings the stable one back: nothing can be compared."""


@dataclass(frozen=True)
class Histogram:
    """A Prometheus histogram: cumulative counts by upper bound in seconds, the last one infinite.

    The last count is the number of observations. Empty where the server has told nothing yet.
    """

    bounds_s: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()


@dataclass(frozen=True)
class Counters:
    """Running totals of one release, over all of its replicas, from vLLM's own metrics.

    Requests to ``url()`` are counted as those of clients are.
    """

    answered: float
    """Requests that were answered with 2xx."""
    failed: float
    """Requests that ended in 5xx. On one machine also those that never reached a living server; on a cluster not, since
    Kubernetes tells nothing of what a gateway refuses itself, and each gateway counts it in its own way."""
    refused: float
    """Requests that ended in 4xx: the client's mistake, or a release that refuses what another one takes."""
    output_tokens: float
    """Of requests that have ended (``vllm:request_generation_tokens_sum``): their time is below."""
    in_flight_s: float
    """Seconds from arrival to end, summed over requests that have ended (``vllm:e2e_request_latency_seconds_sum``).
    By Little's law the integral of the requests in flight: tokens per second of it is the speed that each one sees."""
    ttft_s: Histogram
    """``vllm:time_to_first_token_seconds``: how many there are is the number of requests that can be compared."""
    tpot_s: Histogram
    """``vllm:request_time_per_output_token_seconds``."""
    instance: str
    """Changes when a server was started anew, and its totals with it from zero."""


class Target(Protocol):
    """Every call may be made again after a crash: what is already so stays so. Releases go by their directory's name.

    Raises (any of them):
        ServerFailed: a server does not come up or is gone.
        TransientError: the platform did not answer; ask again.
        Conflict: somebody else changed what is served meanwhile.
    """

    def split(self) -> Split:
        """What is in force, as the platform tells it, not as it was asked."""
        ...

    def deploy(self, release: str) -> None:
        """Start *release* beside the stable one, without traffic, and do not wait until it is up.

        The first one (nothing is stable) may get all traffic once it is ready; ``promote`` makes it stable, here too.
        Of the stable one: make sure that it runs as it should, with the settings that are asked for now.
        """
        ...

    def ready(self, release: str) -> bool:
        """Whether its servers say that they are ready. The rollout itself then asks for a completion."""
        ...

    def url(self, release: str) -> str:
        """Base URL (without ``/v1``) that reaches this release alone, the stable one as the canary: for the first
        completion, for probes and for requests of the rollout's own."""
        ...

    def shift(self, release: str, percent: int) -> None:
        """Give the canary *percent* % of new requests; returns once that is in force. Those in flight stay."""
        ...

    def promote(self, release: str) -> None:
        """The canary becomes the stable one. The old stable stays as a warm standby or is drained and removed."""
        ...

    def withdraw(self, release: str, *, first: bool = False) -> None:
        """All traffic to the stable one, then drain and remove *release*; what others changed of it meanwhile is no
        obstacle.

        Args:
            first: nothing was served before *release*, and nothing shall be after it.

        Raises:
            Conflict: it is the stable one, and not *first*: clients would be left with nothing. Nothing was touched.
        """
        ...

    def counters(self, release: str) -> Counters:
        """Its totals now."""
        ...

    def endpoint(self) -> str:
        """Base URL (without ``/v1``) that clients use, whatever the split."""
        ...

    def kill(self, release: str) -> Callable[[], bool]:
        """End one of its servers at once, as a crash would: for drills.

        Returns:
            Whether another one is up in its place.

        Raises:
            TransientError: none is up.
            AccessDenied: whoever calls may not.
        """
        ...
