"""The canary beside the stable release, over the same stretch of time: what each did, and whether it may go on.

Everything is computed from differences of the servers' own totals. A percentile mixes what clients sent with the
rollout's own requests, of which both releases get the same number; a canary under a small share of the traffic is
under less load than the stable one, so that the last step, where it carries all of it, is compared with what the
stable release did when it carried all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from statistics import median
from typing import Final, Literal

from scoring import canary as statistics
from stages.parts.base.errors import TransientError
from stages.parts.base.settings import Rollout
from stages.parts.engine.metrics import Counters, Histogram
from stages.parts.records.rollout import Analysis, Check, Figures, Pace, Synthetic, Totals, Window

MS: Final = 1000.0


def totals(counters: Counters) -> Totals:
    """Counters as the journal holds them.

    Raises:
        TransientError: they are no numbers.
    """
    told = (counters.answered, counters.failed, counters.refused, counters.output_tokens, counters.in_flight_s)
    if not all(map(math.isfinite, (*told, *counters.ttft_s.counts, *counters.tpot_s.counts))):
        raise TransientError("its totals are not numbers")
    return Totals(
        answered=counters.answered,
        failed=counters.failed,
        refused=counters.refused,
        output_tokens=counters.output_tokens,
        in_flight_s=counters.in_flight_s,
        ttft_bounds=_finite(counters.ttft_s),
        ttft=counters.ttft_s.counts,
        tpot_bounds=_finite(counters.tpot_s),
        tpot=counters.tpot_s.counts,
        instance=counters.instance,
    )


def restarted(now: Totals, then: Totals) -> bool:
    """Whether the totals began again from zero in between, so that a difference says nothing."""
    counted = [(now.answered, then.answered), (now.failed, then.failed), (now.output_tokens, then.output_tokens)]
    return now.instance != then.instance or any(a < b for a, b in counted)


def figures(now: Totals, then: Totals) -> Figures:
    """What happened between two moments. After a restart: since the restart."""
    if restarted(now, then):
        then = now.model_copy(
            update={
                "answered": 0.0,
                "failed": 0.0,
                "refused": 0.0,
                "output_tokens": 0.0,
                "in_flight_s": 0.0,
                "ttft": (0.0,) * len(now.ttft),
                "tpot": (0.0,) * len(now.tpot),
            }
        )
    ttft, tpot = _since(now.ttft, then.ttft), _since(now.tpot, then.tpot)
    return Figures(
        requests=round(ttft[-1]) if ttft else 0,
        answered=round(now.answered - then.answered),
        failed=round(now.failed - then.failed),
        refused=round(now.refused - then.refused),
        ttft_p95_ms=_p95_ms(now.ttft_bounds, ttft),
        tpot_p95_ms=_p95_ms(now.tpot_bounds, tpot),
        tokens_per_s_each=_tokens_per_s_each(now, then),
    )


def paced(window: Window, canary: Totals, stable: Totals, *, alone: bool) -> Pace:
    """The window's pace with the present look, which goes on until a request has ended at both.

    Args:
        alone: the canary gets all requests of clients; the stable release is not waited for.
    """
    pace = window.pace or Pace(canary_from=window.canary, stable_from=window.stable or stable)
    ours, theirs = _tokens_per_s_each(canary, pace.canary_from), _tokens_per_s_each(stable, pace.stable_from)
    if ours is None or (theirs is None and not alone):
        return pace
    return Pace(canary_from=canary, stable_from=stable, canary=(*pace.canary, ours), stable=(*pace.stable, theirs))


def analyse(
    settings: Rollout,
    percent: int,
    window: Window,
    canary_now: Totals,
    stable_now: Totals,
    *,
    earlier: Sequence[Figures],
    agreement: float | None,
    seconds: float,
    at: datetime,
) -> Analysis:
    """Look at a step.

    Args:
        window: where the step began.
        earlier: what the stable release did before, the best comparison first: while it had all the traffic, and in
            the step before. At 100 % it gets no requests of clients any more.
        agreement: with the recorded answers, 0–1; None if it was not asked.

    Returns:
        ``rollback`` as soon as one check fails, ``promote`` once all pass, else ``inconclusive``.
    """
    canary = figures(canary_now, window.canary).model_copy(update={"own": window.to_canary.sent})
    stable = figures(stable_now, window.stable or stable_now).model_copy(update={"own": window.to_stable.sent})
    comparable = [each for each in earlier if each.requests >= settings.min_requests] if percent == 100 else []
    reference = comparable[0] if comparable else stable
    checks = [
        _errors(settings, "errors", canary.failed, canary.answered, reference.failed, reference.answered),
        _refusals(settings, canary, reference),
        own_requests(settings, window.to_canary, window.to_stable),
        _latency(settings, "ttft", canary_now.ttft_bounds, _since(canary_now.ttft, window.canary.ttft), reference),
        _latency(settings, "tpot", canary_now.tpot_bounds, _since(canary_now.tpot, window.canary.tpot), reference),
        _speed(settings, window.pace, canary, reference, reference.tokens_per_s_each if comparable else None),
    ]
    if agreement is not None:
        checks.append(quality(settings, agreement))
    checks.insert(0, _enough(settings, canary, reference))
    verdict, reason = _verdict(checks)
    return Analysis(
        percent=percent,
        verdict=verdict,
        reason=reason,
        canary=canary,
        stable=reference,
        checks=tuple(checks),
        seconds=round(seconds, 3),
        at=at,
    )


def quality(settings: Rollout, agreement: float) -> Check:
    """Whether the answers to recorded questions are still those that were recorded."""
    good = agreement >= settings.agreement  # False for NaN
    return Check(
        name="quality",
        verdict="pass" if good else "fail",
        canary=agreement if math.isfinite(agreement) else None,
        stable=None,
        limit=settings.agreement,
        unit="agreement",
        text=f"its answers agree with the recorded ones by {agreement:.3f}, at least {settings.agreement:g} is asked",
    )


def _enough(settings: Rollout, canary: Figures, reference: Figures) -> Check:
    least = settings.min_requests
    enough = canary.requests >= least and reference.requests >= least
    return Check(
        name="requests",
        verdict="pass" if enough else "unclear",
        canary=canary.requests,
        stable=reference.requests,
        limit=least,
        unit="",
        text=f"{canary.requests} requests to the canary and {reference.requests} to the stable release"
        f"{'' if enough else f', {least} of each are needed'}",
    )


def _errors(
    settings: Rollout, name: str, failed: int, answered: int, stable_failed: int, stable_answered: int
) -> Check:
    of, stable_of = failed + answered, stable_failed + stable_answered
    return _shares(settings, name, failed, of, stable_failed, stable_of, "requests failed")


def _refusals(settings: Rollout, canary: Figures, reference: Figures) -> Check:
    """4xx is the client's mistake, unless a release refuses what the stable one takes: it lacks a chat template, or
    takes shorter prompts. Of clients' requests alone: nobody refuses our own, which would hide what is refused."""
    of, stable_of = _of_clients(canary), _of_clients(reference)
    check = _shares(settings, "refused", canary.refused, of, reference.refused, stable_of, "clients' requests refused")
    return check if canary.refused else check.model_copy(update={"verdict": "pass"})


def _of_clients(figures: Figures) -> int:
    return max(figures.refused, figures.answered + figures.failed + figures.refused - figures.own)


def _shares(settings: Rollout, name: str, count: int, of: int, stable_count: int, stable_of: int, what: str) -> Check:
    verdict = statistics.failures(
        count, of, stable_count, stable_of, slack=settings.error_slack, significance=settings.significance
    )
    stable_share = stable_count / stable_of if stable_of else None
    return Check(
        name=name,
        verdict=verdict,
        canary=count / of if of else None,
        stable=stable_share,
        limit=None if stable_share is None else stable_share + settings.error_slack,
        unit="share",
        text=f"{count} of {of} {what}, of the stable release's {stable_count} of {stable_of}",
    )


def own_requests(settings: Rollout, canary: Synthetic, stable: Synthetic) -> Check:
    """As the errors, by what was answered to ourselves: what a platform does not count can't hide here."""
    if not canary.sent:
        return Check(
            name="own requests", verdict="pass", canary=None, stable=None, limit=None, unit="share", text="none sent"
        )
    answered = (canary.sent - canary.failed, stable.sent - stable.failed)
    return _errors(settings, "own requests", canary.failed, answered[0], stable.failed, answered[1])


def _latency(
    settings: Rollout, name: str, bounds: tuple[float, ...], counts: tuple[float, ...], reference: Figures
) -> Check:
    ratio, slack_ms, stable_ms, what = {
        "ttft": (settings.ttft_ratio, settings.ttft_slack_ms, reference.ttft_p95_ms, "time to first token"),
        "tpot": (settings.tpot_ratio, settings.tpot_slack_ms, reference.tpot_p95_ms, "time per output token"),
    }[name]
    limit_ms = math.nan if stable_ms is None else stable_ms * ratio + slack_ms
    verdict = statistics.latency(
        (*bounds, math.inf),
        counts,
        limit_ms / MS,
        least=settings.min_requests,
        significance=settings.significance,
    )
    canary_ms = _p95_ms(bounds, counts)
    return Check(
        name=name,
        verdict=verdict,
        canary=canary_ms,
        stable=stable_ms,
        limit=limit_ms if math.isfinite(limit_ms) else None,
        unit="ms",
        text=f"{what}, p95: {_shown(canary_ms)}, the stable release's {_shown(stable_ms)}, at most {_shown(limit_ms)}",
    )


def _speed(settings: Rollout, pace: Pace | None, canary: Figures, reference: Figures, earlier: float | None) -> Check:
    """Look by look, with what the stable release did at the same time or *earlier*: in a sum, the one moment in which
    the machine was busy outweighs all others."""
    canary_each, stable_each = (pace.canary, pace.stable) if pace else ((), ())
    if earlier is not None:
        stable_each = (earlier,) * len(canary_each)
    looks = [(ours, theirs) for ours, theirs in zip(canary_each, stable_each, strict=True) if theirs is not None]
    slower = sum(ours < theirs * settings.speed_ratio for ours, theirs in looks)
    enough = min(canary.requests, reference.requests) >= settings.min_requests
    if not settings.speed_ratio:
        verdict: statistics.Verdict = "pass"
    else:
        verdict = statistics.mostly(slower, len(looks), significance=settings.significance) if enough else "unclear"
    ours, theirs = (median(each) for each in zip(*looks, strict=True)) if looks else (None, None)
    limit = None if theirs is None else theirs * settings.speed_ratio
    return Check(
        name="speed",
        verdict=verdict,
        canary=ours,
        stable=theirs,
        limit=limit,
        unit="tokens/s",
        text=f"output tokens per second of each request, median: {_shown(ours, '')}, the stable release's "
        f"{_shown(theirs, '')}, at least {_shown(limit, '')}; less in {slower} of {len(looks)} looks",
    )


def _verdict(checks: list[Check]) -> tuple[Literal["promote", "rollback", "inconclusive"], str]:
    failed = [each.text for each in checks if each.verdict == "fail"]
    unclear = [each.text for each in checks if each.verdict == "unclear"]
    if failed:
        return "rollback", "; ".join(failed)
    if unclear:
        few = checks[0].verdict == "unclear"  # then the rest can't be clear
        return "inconclusive", unclear[0] if few else "; ".join(unclear)
    return "promote", "as good as the stable release in every check"


def _tokens_per_s_each(now: Totals, then: Totals) -> float | None:
    """None where no request ended in between."""
    in_flight_s = now.in_flight_s - then.in_flight_s
    return (now.output_tokens - then.output_tokens) / in_flight_s if in_flight_s > 0 else None


def _finite(histogram: Histogram) -> tuple[float, ...]:
    return tuple(bound for bound in histogram.bounds_s if math.isfinite(bound))


def _since(now: tuple[float, ...], then: tuple[float, ...]) -> tuple[float, ...]:
    """A histogram that was empty at first has no buckets yet."""
    return tuple(a - b for a, b in zip(now, then, strict=True)) if then else now


def _p95_ms(bounds: tuple[float, ...], counts: tuple[float, ...]) -> float | None:
    value = statistics.quantile((*bounds, math.inf), counts, statistics.TAIL) * MS
    return value if math.isfinite(value) else None


def _shown(value: float | None, unit: str = " ms") -> str:
    return f"{value:.1f}{unit}" if value is not None and math.isfinite(value) else "unknown"
