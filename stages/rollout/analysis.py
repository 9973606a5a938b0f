"""Compares the canary with the stable release slice by slice, and decides whether the rollout may go on.

Latencies are those of pairs: the same request, sent to both releases at the same moment. A release is slower the more
load it carries, so they are compared sharply up to 50 % only, where the canary carries as much as the stable release or
less. Beyond, a canary that is not as fast as the stable release now is compared with what that did when it had most of
the requests, leniently, since the traffic may have changed. Failures of both are compared over the whole rollout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal

from scoring import canary as stats
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.workload import Slo
from stages.parts.records.rollout import Analysis, CanaryCheck, Counters, Journal, Side, Slice, Window
from stages.rollout.slices import LATENCIES, Latency, counts, load, log_ratios, logs, slices_of, typical_s

MS: Final = 1000.0
ERRORS: Final = 0.5
"""The share of the error rate that the check of errors has for itself: they hurt most, and have to be found first."""
OTHERS: Final = 6
"""The other checks of a step that may fail by chance: two of failures, two of delays and two of latencies."""
SETTLED: Final = 10
"""The fewest slices by which a latency fails: what slows a server for half a minute is not yet its own slowness."""
EVEN: Final = 50
"""The largest share of the canary, in percent, at which it carries no more load than the stable release."""
LENIENCE: Final = {"ttft": 8.0, "tpot": 2.0}
"""How many times the limit a latency may be if it is compared with that of another step. A little more load, or a
longer burst, may multiply the time in a queue, but not the time per token, since the number of requests in flight is
bounded. The limits are so wide that slices may count as independent: a queue that grows and grows is found soon."""
MORE_LOAD: Final = 2
"""It may be more by the square of how many times as many requests there are now."""
BEST_GUESS: Final = 0.5
"""The probability with which such a latency has to be within its limit to pass. Observing the canary for longer tells
no more of the stable release's figures from then."""


@dataclass(frozen=True)
class Observation:
    """What one step has shown so far."""

    journal: Journal
    """With the settings, and the steps that have ended."""
    window: Window
    """Its counters at the beginning of the step, and its slices."""
    canary: Counters
    stable: Counters | None
    """None if they can't be read."""
    seconds: float
    slo: Slo | None
    """The targets of the workload that the canary was measured with."""
    agreement: float | None = None
    """With the recorded answers, 0–1; None if the canary was not asked."""

    @property
    def even(self) -> list[Slice]:
        """Those in which the canary carried no more load than the stable release."""
        now = self.window.slices if self.journal.percent <= EVEN else ()
        return [*(ended for step in self.journal.observed if step.percent <= EVEN for ended in step.slices), *now]


def analyse(observation: Observation) -> Analysis:
    """Judge a step: ``rollback`` as soon as one check fails, ``promote`` once all pass, else ``inconclusive``."""
    window, journal, settings = observation.window, observation.journal, observation.journal.settings
    alone, slices = journal.percent == 100, slices_of(journal, window)
    canary, stable = observation.canary.since(window.canary), None
    if observation.stable and not alone:
        stable = observation.stable.since(window.stable or observation.stable)
    mirrored = settings.mirror is not None
    steps, looks = len(settings.steps) + mirrored, (journal.windows, len(window.slices))
    errors = stats.level(ERRORS * settings.error_rate, steps, *looks)
    level = stats.level((1 - ERRORS) * settings.error_rate, OTHERS * steps + mirrored, *looks)
    settled = len(window.slices) >= SETTLED
    if journal.copied and not settled:  # bursts of failures are known better later, and nobody is harmed meanwhile
        errors = level = 0.0
    checks = [
        _enough_requests(settings, canary, stable),
        _failures(settings, "errors", slices, errors),
        _failures(settings, "own requests", slices, level),
    ]
    if not alone:
        checks.append(_failures(settings, "refused", slices, level))
    if journal.copied:
        checks.append(_failures(settings, "copies", slices, level))
    if journal.percent <= EVEN:
        checks += [_failures(settings, name, observation.even, level) for name in DELAYS]
    if not settled:
        level = 0.0
    checks += [check for name in LATENCIES if (check := _latency(settings, name, observation, level))]
    if observation.agreement is not None:
        checks.append(check_quality(settings, observation.agreement))
    good = "sound with all the traffic" if alone else "as good as the stable release in every check"
    verdict, reason = _verdict(checks, good)
    return Analysis(
        percent=journal.percent,
        verdict=verdict,
        reason=reason,
        checks=tuple(checks),
        seconds=round(observation.seconds, 3),
        at=journal.entered_at + timedelta(seconds=observation.seconds),
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


def _enough_requests(settings: Rollout, canary: Side, stable: Side | None) -> CanaryCheck:
    """Count requests with a first token: those whose latency is known."""
    least, requests = settings.min_requests, [round(side.ttft_count) for side in (canary, stable) if side]
    enough = min(requests) >= least
    beside = f" and {requests[1]} to the stable release" if stable else ""
    needed = f"; {least} {'of each ' if stable else ''}are needed"
    return CanaryCheck(
        name="requests",
        verdict="pass" if enough else "unclear",
        canary=requests[0],
        stable=requests[1] if stable else None,
        limit=least,
        unit="",
        text=f"{requests[0]} requests to the canary{beside}{'' if enough else needed}",
    )


Failing = Literal["errors", "own requests", "refused", "copies", "late", "delayed"]


def _failures(settings: Rollout, name: Failing, slices: Sequence[Slice], level: float) -> CanaryCheck:
    """Compare the shares of requests that failed, and so on, at both releases."""
    of, what = FAILURES[name]
    canary, stable = counts(slices, "canary", of), counts(slices, "stable", of)
    verdict = stats.failures(canary, stable, slack=settings.error_slack, level=level)
    if name != "errors" and not canary.count:
        verdict = "pass"  # no client asked, or no pair was sent
    text = f"{canary} {what} (stable release: {stable})" if canary.total or stable.total else "there were none"
    return CanaryCheck(
        name=name,
        verdict=verdict,
        canary=canary.share,
        stable=stable.share,
        limit=None if stable.share is None else stable.share + settings.error_slack,
        unit="share",
        text=f"{text}; chance may explain it: more requests would tell" if verdict == "unclear" else text,
    )


def _refused(side: Side) -> tuple[float, float]:
    """Count refusals. A 4xx is the client's mistake, unless a release refuses what the stable one accepts: it lacks a
    chat template, or takes shorter prompts. Only clients' requests count: the rollout's own are never refused and would
    hide refusals."""
    return side.refused, max(side.refused, side.answered + side.failed + side.refused - side.sent)


FAILURES: Final = {
    "errors": (lambda side: (side.failed, side.failed + side.answered), "requests failed"),
    "own requests": (lambda side: (side.lost, side.sent), "of the rollout's own requests failed"),
    "refused": (_refused, "clients' requests were refused"),
    "copies": (lambda side: (side.lost_copies, side.copies), "copies of clients' requests were not answered"),
    "late": (lambda side: (side.late, side.sent), "of the rollout's own requests were answered far too late"),
    "delayed": (lambda side: (side.delayed, side.ttft_count), "requests waited far too long for their first token"),
}
DELAYS: Final[tuple[Failing, ...]] = ("late", "delayed")


def _latency(settings: Rollout, name: Latency, observation: Observation, level: float) -> CanaryCheck | None:
    """Check a latency, if anything is comparable with the load that the canary has."""
    slices = observation.window.slices
    # The step in which the stable release carried most.
    reference = min(observation.journal.observed, key=lambda step: step.percent, default=None)
    canary, stable = logs(slices, "canary", name), logs(slices, "stable", name)
    present = ComparedLatency(_at_equal_load(observation, name), canary, stable)
    check = _within_limit(settings, name, present, level, observation.seconds)
    if observation.journal.percent <= EVEN or check.verdict == "pass":
        return check
    if reference is None:
        return None
    rate, rate_then = load(slices, "canary"), load(reference.slices, "stable")
    before = logs(reference.slices, "stable", name)
    ratio = stats.mean_of(canary, independent=True).plus(stats.mean_of(before, independent=True), -1)
    lenience = LENIENCE[name] * max(1.0, rate / rate_then if rate_then else math.inf) ** MORE_LOAD
    whom = f"stable release with {100 - reference.percent} % of the requests, {rate_then:.1f} a second, now {rate:.1f}"
    target_ms = getattr(observation.slo, f"{name}_ms") if observation.slo else math.inf
    then = ComparedLatency(ratio, canary, before, whom, lenience, target_ms, BEST_GUESS)
    return _within_limit(settings, name, then, level, observation.seconds)


def _at_equal_load(observation: Observation, name: Latency) -> stats.Mean:
    """Estimate the logarithm of the canary's latency relative to the stable release's.

    With clients that stick to a server, the canary may carry more at 50 %. The ratio is then interpolated linearly
    between this step and the last one in which the canary carried less, to where both carry the same.
    """
    slices = observation.window.slices
    ratio, more = stats.mean_of(log_ratios(slices, name)), _more_load(slices)
    before = next((step.slices for step in reversed(observation.journal.observed) if _more_load(step.slices) < 0), None)
    if more <= 0 or before is None or observation.journal.percent > EVEN:
        return ratio
    part = more / (more - _more_load(before))
    return ratio.times(1 - part).plus(stats.mean_of(log_ratios(before, name)), part)


def _more_load(slices: Sequence[Slice]) -> float:
    return load(slices, "canary") - load(slices, "stable")


@dataclass(frozen=True)
class ComparedLatency:
    """A canary's latency beside one of the stable release."""

    ratio: stats.Mean
    """The logarithm of the canary's, relative to the stable release's."""
    canary: Sequence[float]
    stable: Sequence[float]
    """Logarithms of seconds, slice by slice."""
    whom: str = "stable release"
    lenience: float = 1.0
    target_ms: float = math.inf
    """The workload's, which lenience does not exceed."""
    confidence: float = stats.CONFIDENCE


def _within_limit(
    settings: Rollout, name: Latency, compared: ComparedLatency, level: float, seconds: float
) -> CanaryCheck:
    slower, slack_ms, what = {
        "ttft": (settings.ttft_ratio, settings.ttft_slack_ms, "time to first token"),
        "tpot": (settings.tpot_ratio, settings.tpot_slack_ms, "time per output token"),
    }[name]
    typical = map(typical_s, (compared.canary, compared.stable))
    canary_ms, stable_ms = (None if each_s is None else each_s * MS for each_s in typical)
    limit_ms = None
    if stable_ms is not None:
        strict_ms = stable_ms * slower + slack_ms
        limit_ms = max(strict_ms, min(compared.lenience * strict_ms, compared.target_ms))
    text = f"typical {what}: {_shown(canary_ms)} ({compared.whom}: {_shown(stable_ms)}, at most {_shown(limit_ms)})"
    verdict: stats.Verdict = "unclear"
    if stable_ms and limit_ms:
        limit = math.log(limit_ms / stable_ms)
        verdict = stats.at_most(compared.ratio, limit, level, compared.confidence)
        if verdict == "unclear":
            text += _what_would_tell(compared.ratio, limit, level, seconds)
    return CanaryCheck(
        name=name, verdict=verdict, canary=canary_ms, stable=stable_ms, limit=limit_ms, unit="ms", text=text
    )


def _what_would_tell(ratio: stats.Mean, limit: float, level: float, seconds: float) -> str:
    if not math.isfinite(ratio.error):
        return "; unclear: there are too few slices"
    longer = stats.times_longer(ratio, limit, level or 1e-4)
    more = f"{seconds * (longer - 1):.0f} s more" if longer < 20 else "no reasonable time"
    return f"; unclear at ±{100 * math.expm1(ratio.error):.0f} %: {more} would tell"


def _verdict(checks: list[CanaryCheck], good: str) -> tuple[Literal["promote", "rollback", "inconclusive"], str]:
    failed = [check.text for check in checks if check.verdict == "fail"]
    unclear = [check.text for check in checks if check.verdict == "unclear"]
    if failed:
        return "rollback", "; ".join(failed)
    if unclear:
        few = checks[0].verdict == "unclear"  # with too few requests, the other checks can't be clear
        return "inconclusive", unclear[0] if few else "; ".join(unclear)
    return "promote", good


def _shown(value_ms: float | None) -> str:
    return "unknown" if value_ms is None else f"{value_ms:.1f} ms"
