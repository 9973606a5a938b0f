"""Compares the canary with the stable release over the same window, and decides whether the rollout may go on.

Everything is computed from differences of the servers' own counters. A percentile covers the clients' requests and the
rollout's own, of which both releases get the same number. A canary that gets a small share of the traffic carries less
load than the stable release. The last step, where the canary carries all of it, is therefore compared with what the
stable release did when it carried all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Final, Literal

from scoring import canary as stats
from stages.parts.base.settings import Rollout
from stages.parts.records.counters import Counters, Histogram, Increase
from stages.parts.records.rollout import Analysis, CanaryCheck, Figures, Pace, SyntheticRequests, Window

MS: Final = 1000.0


@dataclass(frozen=True)
class Observation:
    """What one step has shown so far."""

    percent: int
    """The canary's share of new requests."""
    window: Window
    """Where the step began."""
    canary: Counters
    stable: Counters
    earlier: Sequence[Figures]
    """What the stable release did before, the best comparison first: while it had all the traffic, and in the step
    before. At 100 % it no longer gets requests of clients."""
    agreement: float | None
    """With the recorded answers, 0–1; None if the canary was not asked."""
    seconds: float
    at: datetime


@dataclass(frozen=True)
class Proportion:
    """*count* of *total* requests."""

    count: int
    total: int

    @property
    def value(self) -> float | None:
        return self.count / self.total if self.total else None

    def __str__(self) -> str:
        return f"{self.count} of {self.total}"


def figures(increase: Increase, own: int = 0) -> Figures:
    """Args: own: how many of the requests were the rollout's own."""
    return Figures(
        requests=round(increase.ttft.observations),
        answered=round(increase.answered),
        failed=round(increase.failed),
        refused=round(increase.refused),
        own=own,
        ttft_p95_ms=_p95_ms(increase.ttft),
        tpot_p95_ms=_p95_ms(increase.tpot),
        tokens_per_s_each=increase.tokens_per_s_each,
    )


def extend_pace(window: Window, canary: Counters, stable: Counters, *, alone: bool) -> Pace:
    """The window's pace with the present look, which goes on until a request has ended at both releases.

    Args:
        alone: the canary gets all requests of clients; the stable release is not waited for.
    """
    pace = window.pace or Pace(canary_from=window.canary, stable_from=window.stable or stable)
    ours = canary.since(pace.canary_from).tokens_per_s_each
    theirs = stable.since(pace.stable_from).tokens_per_s_each
    if ours is None or (theirs is None and not alone):
        return pace
    return Pace(canary_from=canary, stable_from=stable, canary=(*pace.canary, ours), stable=(*pace.stable, theirs))


def analyse(settings: Rollout, seen: Observation) -> Analysis:
    """Judge a step.

    Returns:
        ``rollback`` as soon as one check fails, ``promote`` once all pass, else ``inconclusive``.
    """
    window = seen.window
    rise = seen.canary.since(window.canary)
    canary = figures(rise, own=window.to_canary.sent)
    stable = figures(seen.stable.since(window.stable or seen.stable), own=window.to_stable.sent)
    comparable = [each for each in seen.earlier if each.requests >= settings.min_requests]
    earlier = comparable[0] if comparable and seen.percent == 100 else None
    reference = earlier or stable
    checks = [
        _enough_requests(settings, canary, reference),
        _errors(settings, "errors", _failures(canary), _failures(reference)),
        _refusals(settings, canary, reference),
        check_own_requests(settings, window.to_canary, window.to_stable),
        _latency(settings, "ttft", rise.ttft, reference),
        _latency(settings, "tpot", rise.tpot, reference),
        _speed(settings, _looks(window.pace, earlier), enough=_have_enough(settings, canary, reference)),
    ]
    if seen.agreement is not None:
        checks.append(check_quality(settings, seen.agreement))
    verdict, reason = _verdict(checks)
    return Analysis(
        percent=seen.percent,
        verdict=verdict,
        reason=reason,
        canary=canary,
        stable=reference,
        checks=tuple(checks),
        seconds=round(seen.seconds, 3),
        at=seen.at,
    )


def check_quality(settings: Rollout, agreement: float) -> CanaryCheck:
    """Whether the answers to the recorded questions are still those that were recorded."""
    good = agreement >= settings.agreement  # False for NaN
    return CanaryCheck(
        name="quality",
        verdict="pass" if good else "fail",
        canary=agreement if math.isfinite(agreement) else None,
        stable=None,
        limit=settings.agreement,
        unit="agreement",
        text=f"its answers agree with the recorded ones by {agreement:.3f}; "
        f"at least {settings.agreement:g} is required",
    )


def check_own_requests(settings: Rollout, canary: SyntheticRequests, stable: SyntheticRequests) -> CanaryCheck:
    """Compares the failures of the rollout's own requests, as the rollout saw them: a failure that the platform does
    not count can't hide here."""
    if not canary.sent:
        return CanaryCheck(
            name="own requests", verdict="pass", canary=None, stable=None, limit=None, unit="share", text="none sent"
        )
    failures = Proportion(canary.failed, canary.sent), Proportion(stable.failed, stable.sent)
    return _errors(settings, "own requests", *failures)


def _enough_requests(settings: Rollout, canary: Figures, reference: Figures) -> CanaryCheck:
    least = settings.min_requests
    enough = _have_enough(settings, canary, reference)
    return CanaryCheck(
        name="requests",
        verdict="pass" if enough else "unclear",
        canary=canary.requests,
        stable=reference.requests,
        limit=least,
        unit="",
        text=f"{canary.requests} requests to the canary and {reference.requests} to the stable release"
        f"{'' if enough else f'; {least} of each are needed'}",
    )


def _have_enough(settings: Rollout, canary: Figures, reference: Figures) -> bool:
    return min(canary.requests, reference.requests) >= settings.min_requests


def _failures(found: Figures) -> Proportion:
    return Proportion(found.failed, found.failed + found.answered)


def _errors(settings: Rollout, name: str, canary: Proportion, stable: Proportion) -> CanaryCheck:
    return _proportions(settings, name, canary, stable, "requests failed")


def _refusals(settings: Rollout, canary: Figures, reference: Figures) -> CanaryCheck:
    """A 4xx is the client's mistake, unless a release refuses what the stable one accepts: it lacks a chat template, or
    takes shorter prompts. Only clients' requests count: the rollout's own are never refused and would hide refusals."""
    ours = Proportion(canary.refused, _requests_of_clients(canary))
    theirs = Proportion(reference.refused, _requests_of_clients(reference))
    check = _proportions(settings, "refused", ours, theirs, "clients' requests were refused")
    return check if canary.refused else check.model_copy(update={"verdict": "pass"})


def _requests_of_clients(found: Figures) -> int:
    return max(found.refused, found.answered + found.failed + found.refused - found.own)


def _proportions(settings: Rollout, name: str, canary: Proportion, stable: Proportion, what: str) -> CanaryCheck:
    verdict = stats.failures(
        canary.count,
        canary.total,
        stable.count,
        stable.total,
        slack=settings.error_slack,
        significance=settings.significance,
    )
    return CanaryCheck(
        name=name,
        verdict=verdict,
        canary=canary.value,
        stable=stable.value,
        limit=None if stable.value is None else stable.value + settings.error_slack,
        unit="share",
        text=f"{canary} {what} (stable release: {stable})",
    )


def _latency(settings: Rollout, name: Literal["ttft", "tpot"], canary: Histogram, reference: Figures) -> CanaryCheck:
    ratio, slack_ms, stable_ms, what = {
        "ttft": (settings.ttft_ratio, settings.ttft_slack_ms, reference.ttft_p95_ms, "time to first token"),
        "tpot": (settings.tpot_ratio, settings.tpot_slack_ms, reference.tpot_p95_ms, "time per output token"),
    }[name]
    limit_ms = None if stable_ms is None else stable_ms * ratio + slack_ms
    verdict = stats.latency(
        (*canary.bounds_s, math.inf),
        canary.counts,
        math.nan if limit_ms is None else limit_ms / MS,
        least=settings.min_requests,
        significance=settings.significance,
    )
    canary_ms = _p95_ms(canary)
    return CanaryCheck(
        name=name,
        verdict=verdict,
        canary=canary_ms,
        stable=stable_ms,
        limit=limit_ms,
        unit="ms",
        text=f"p95 {what}: {_shown(canary_ms, ' ms')} "
        f"(stable release: {_shown(stable_ms, ' ms')}, at most {_shown(limit_ms, ' ms')})",
    )


def _looks(pace: Pace | None, earlier: Figures | None) -> list[tuple[float, float]]:
    """Tokens per second of each request, look by look: the canary's, and the stable release's at the same time or
    *earlier*. A sum would be dominated by the one moment in which the machine was busy."""
    if pace is None:
        return []
    alone = earlier.tokens_per_s_each if earlier else None
    stable = pace.stable if alone is None else (alone,) * len(pace.canary)
    return [(ours, theirs) for ours, theirs in zip(pace.canary, stable, strict=True) if theirs is not None]


def _speed(settings: Rollout, looks: list[tuple[float, float]], *, enough: bool) -> CanaryCheck:
    slower = sum(ours < theirs * settings.speed_ratio for ours, theirs in looks)
    verdict: stats.Verdict = "unclear"
    if not settings.speed_ratio:
        verdict = "pass"
    elif enough:
        verdict = stats.mostly(slower, len(looks), significance=settings.significance)
    ours, theirs = (median(each) for each in zip(*looks, strict=True)) if looks else (None, None)
    limit = None if theirs is None else theirs * settings.speed_ratio
    return CanaryCheck(
        name="speed",
        verdict=verdict,
        canary=ours,
        stable=theirs,
        limit=limit,
        unit="tokens/s",
        text=f"median output tokens per second of each request: {_shown(ours)} "
        f"(stable release: {_shown(theirs)}, at least {_shown(limit)}); less in {slower} of {len(looks)} looks",
    )


def _verdict(checks: list[CanaryCheck]) -> tuple[Literal["promote", "rollback", "inconclusive"], str]:
    failed = [each.text for each in checks if each.verdict == "fail"]
    unclear = [each.text for each in checks if each.verdict == "unclear"]
    if failed:
        return "rollback", "; ".join(failed)
    if unclear:
        few = checks[0].verdict == "unclear"  # with too few requests, the other checks can't be clear
        return "inconclusive", unclear[0] if few else "; ".join(unclear)
    return "promote", "as good as the stable release in every check"


def _p95_ms(histogram: Histogram) -> float | None:
    """None without observations."""
    value = stats.quantile((*histogram.bounds_s, math.inf), histogram.counts, stats.TAIL) * MS
    return value if math.isfinite(value) else None


def _shown(value: float | None, unit: str = "") -> str:
    return "unknown" if value is None else f"{value:.1f}{unit}"
