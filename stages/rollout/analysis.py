"""Compares the canary with the stable release over the same window, and decides whether the rollout may go on.

Everything is computed from differences of the servers' own counters. A percentile covers the clients' requests and the
rollout's own, of which both releases get the same number. Speeds are compared only while both serve, since the machine
may have become busy meanwhile. Where the canary has the larger share, it also carries more load: it then counts as
slower only if it is slower than the stable release is now and than that was with as large a share. At 100 % nothing is
compared: only errors and answers count there.
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
    stable: Counters | None
    """None at 100 %, where it gets no requests."""
    earlier: Sequence[Figures]
    """What the stable release did before, the best comparison first: with at least the canary's present share; at
    100 %, in the last step in which it served, too."""
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


def extend_pace(window: Window, canary: Counters, stable: Counters) -> Pace:
    """The window's pace with the present look, which goes on until a request has ended at both releases."""
    pace = window.pace or Pace(canary_from=window.canary, stable_from=window.stable or stable)
    ours = canary.since(pace.canary_from).tokens_per_s_each
    theirs = stable.since(pace.stable_from).tokens_per_s_each
    if ours is None or theirs is None:
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
    earlier = next((each for each in seen.earlier if each.requests >= settings.min_requests), None)
    stable, good = None, "as good as the stable release in every check"
    if seen.stable is None:
        good = f"{good}, and sound with all the traffic" if earlier else "sound with all the traffic"
        checks = _alone(settings, canary, window.to_canary, earlier)
    else:
        stable = figures(seen.stable.since(window.stable or seen.stable), own=window.to_stable.sent)
        checks = [
            _enough_requests(settings, canary, stable),
            _errors(settings, "errors", _failures(canary), _failures(stable)),
            _refusals(settings, canary, stable),
            check_own_requests(settings, window.to_canary, window.to_stable),
            _latency(settings, "ttft", rise.ttft, stable, earlier),
            _latency(settings, "tpot", rise.tpot, stable, earlier),
            _speed(settings, _looks(window.pace, earlier), enough=_have_enough(settings, canary, stable)),
        ]
    if seen.agreement is not None:
        checks.append(check_quality(settings, seen.agreement))
    verdict, reason = _verdict(checks, good)
    return Analysis(
        percent=seen.percent,
        verdict=verdict,
        reason=reason,
        canary=canary,
        stable=stable,
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


def check_own_requests(
    settings: Rollout, canary: SyntheticRequests, stable: SyntheticRequests, limit: float | None = None
) -> CanaryCheck:
    """Compares the failures of the rollout's own requests, as the rollout saw them: a failure that the platform does
    not count can't hide here.

    Args:
        limit: the share that may fail if none were sent to the stable release; None: the slack.
    """
    if not canary.sent:
        return CanaryCheck(
            name="own requests", verdict="pass", canary=None, stable=None, limit=None, unit="share", text="none sent"
        )
    ours = Proportion(canary.failed, canary.sent)
    if not stable.sent:
        return _at_most(settings, "own requests", ours, settings.error_slack if limit is None else limit)
    return _errors(settings, "own requests", ours, Proportion(stable.failed, stable.sent))


def _alone(settings: Rollout, canary: Figures, own: SyntheticRequests, earlier: Figures | None) -> list[CanaryCheck]:
    """The checks at 100 %, where nothing serves beside the canary.

    Args:
        earlier: the stable release in the last step in which both served; its errors are no fault of the canary.
    """
    least, limit = settings.min_requests, settings.error_slack
    if earlier:
        limit += _failures(earlier).value or 0.0
    few = canary.requests < least
    requests = CanaryCheck(
        name="requests",
        verdict="unclear" if few else "pass",
        canary=canary.requests,
        stable=None,
        limit=least,
        unit="",
        text=f"{canary.requests} requests to the canary{f'; {least} are needed' if few else ''}",
    )
    errors = _at_most(settings, "errors", _failures(canary), limit)
    return [requests, errors, check_own_requests(settings, own, SyntheticRequests(), limit)]


def _at_most(settings: Rollout, name: str, failed: Proportion, limit: float) -> CanaryCheck:
    return CanaryCheck(
        name=name,
        verdict=stats.share_within(failed.count, failed.total, limit, significance=settings.significance),
        canary=failed.value,
        stable=None,
        limit=limit,
        unit="share",
        text=f"{failed} requests failed (at most {100 * limit:.1f} %)",
    )


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


def _latency(
    settings: Rollout, name: Literal["ttft", "tpot"], canary: Histogram, stable: Figures, earlier: Figures | None
) -> CanaryCheck:
    ratio, slack_ms, what = {
        "ttft": (settings.ttft_ratio, settings.ttft_slack_ms, "time to first token"),
        "tpot": (settings.tpot_ratio, settings.tpot_slack_ms, "time per output token"),
    }[name]
    stable_ms = getattr(stable, f"{name}_p95_ms")
    if stable_ms is not None and earlier:
        stable_ms = max(stable_ms, getattr(earlier, f"{name}_p95_ms") or 0.0)
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
    """Tokens per second of each request, look by look: the canary's, and the stable release's at the same time, or what
    it was *earlier* if that was less. A sum would be dominated by the one moment in which the machine was busy."""
    if pace is None:
        return []
    before = math.inf if earlier is None or earlier.tokens_per_s_each is None else earlier.tokens_per_s_each
    looks = zip(pace.canary, pace.stable, strict=True)
    return [(ours, min(theirs, before)) for ours, theirs in looks if theirs is not None]


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


def _verdict(checks: list[CanaryCheck], good: str) -> tuple[Literal["promote", "rollback", "inconclusive"], str]:
    failed = [each.text for each in checks if each.verdict == "fail"]
    unclear = [each.text for each in checks if each.verdict == "unclear"]
    if failed:
        return "rollback", "; ".join(failed)
    if unclear:
        few = checks[0].verdict == "unclear"  # with too few requests, the other checks can't be clear
        return "inconclusive", unclear[0] if few else "; ".join(unclear)
    return "promote", good


def _p95_ms(histogram: Histogram) -> float | None:
    """None without observations."""
    value = stats.quantile((*histogram.bounds_s, math.inf), histogram.counts, stats.TAIL) * MS
    return value if math.isfinite(value) else None


def _shown(value: float | None, unit: str = "") -> str:
    return "unknown" if value is None else f"{value:.1f}{unit}"
