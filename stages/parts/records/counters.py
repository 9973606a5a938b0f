"""A release's counters at one moment, as ``rollout.json`` stores them, and how far they rose between two moments."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ConfigDict

from stages.parts.base.store import Record


class Counters(Record):
    """Running totals of one release over all of its replicas, from vLLM's own metrics. All numbers are finite.

    The rollout's own requests are counted like those of clients.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    answered: float
    """Requests that were answered with 2xx."""
    failed: float
    """Requests that ended in 5xx. On one machine also those that never reached a living server; not on a cluster, where
    Kubernetes does not count what a gateway refuses itself, and each gateway counts it in its own way."""
    refused: float = 0.0
    """Requests that ended in 4xx: a mistake of the client, or of a release that refuses what another one accepts."""
    output_tokens: float
    """Tokens of requests that have ended (``vllm:request_generation_tokens_sum``)."""
    ttft_bounds: tuple[float, ...]
    """Finite upper bounds in s of ``vllm:time_to_first_token_seconds``, ascending; JSON can't hold the infinite one."""
    ttft: tuple[float, ...]
    """Cumulative counts, one more than the bounds: the last one is the number of all observations. Empty while the
    server has reported no histogram."""
    tpot_bounds: tuple[float, ...]
    """The same for ``vllm:request_time_per_output_token_seconds``."""
    tpot: tuple[float, ...]
    ttft_s: float = 0.0
    """The sum of what ``ttft`` counts, in seconds; 0 in records of older versions."""
    tpot_s: float = 0.0
    prompt_tokens: float = 0.0
    """Tokens of the prompts of requests that have ended."""
    prompts: float = 0.0
    """How many requests these were."""
    instance: str
    """Changes when a server was restarted and its counters began again at zero."""

    def restarted_since(self, earlier: Counters) -> bool:
        """Return whether the counters began again at zero after *earlier*: a difference would be meaningless."""
        fell = any(getattr(self, name) < getattr(earlier, name) for name in ("answered", "failed", "output_tokens"))
        return self.instance != earlier.instance or fell

    def since(self, earlier: Counters) -> Increase:
        """Return what was counted after *earlier*; after a restart, what was counted since the restart."""
        base = ZERO if self.restarted_since(earlier) else earlier
        return Increase(
            answered=self.answered - base.answered,
            failed=self.failed - base.failed,
            refused=self.refused - base.refused,
            ttft=Histogram(self.ttft_bounds, _difference(self.ttft, base.ttft), self.ttft_s - base.ttft_s),
            tpot=Histogram(self.tpot_bounds, _difference(self.tpot, base.tpot), self.tpot_s - base.tpot_s),
        )


@dataclass(frozen=True)
class Histogram:
    """Observations by finite upper bound in seconds; the cumulative counts are one more than the bounds."""

    bounds_s: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    sum_s: float = 0.0

    def above(self, limit_s: float) -> float:
        """Return the number of observations that are certainly above *limit_s*, and above the next bound."""
        place = bisect_left(self.bounds_s, limit_s)
        return self.observations - self.counts[place] if self.counts else 0.0

    @property
    def mean_s(self) -> float | None:
        return self.sum_s / self.observations if self.observations else None

    @property
    def observations(self) -> float:
        return self.counts[-1] if self.counts else 0.0


@dataclass(frozen=True)
class Increase:
    """What a release did between two moments."""

    answered: float
    failed: float
    refused: float
    ttft: Histogram
    tpot: Histogram


ZERO: Final = Counters(
    answered=0.0, failed=0.0, output_tokens=0.0, ttft_bounds=(), ttft=(), tpot_bounds=(), tpot=(), instance=""
)
"""A server that has counted nothing yet."""


def together(servers: Sequence[Counters]) -> Counters:
    """Sum over servers, of which at least one has reported; one that was restarted makes it another instance."""
    names = ("answered", "failed", "refused", "output_tokens", "ttft_s", "tpot_s", "prompt_tokens", "prompts")
    sums: dict[str, Any] = {name: sum(getattr(server, name) for server in servers) for name in names}
    for name in ("ttft", "tpot"):
        # A server without an observation has reported no histogram yet.
        counts = [getattr(server, name) for server in servers if getattr(server, name)]
        sums[name] = tuple(map(sum, zip(*counts, strict=True)))
        sums[f"{name}_bounds"] = next(filter(None, (getattr(server, f"{name}_bounds") for server in servers)), ())
    return Counters(instance=", ".join(server.instance for server in servers), **sums)


def _difference(counts: tuple[float, ...], base: tuple[float, ...]) -> tuple[float, ...]:
    """Subtract bucket by bucket; a server that had reported no histogram before has no buckets in *base*."""
    return tuple(a - b for a, b in zip(counts, base, strict=True)) if base else counts
