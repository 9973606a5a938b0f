"""Whether a canary is worse than the stable release, from what both did in the same stretch of time.

Every answer is one of three: *pass*, *fail*, or *unclear* when the requests are too few to tell. Unclear is no pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

Verdict = Literal["pass", "fail", "unclear"]
TAIL: Final = 0.95
"""Latencies are compared at their 95th percentile."""
SUSPICIOUS: Final = 0.1
"""The p-value below which more failures than the stable release has ask for more requests, before they pass."""


def quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float:
    """A histogram's *q*-quantile, linear within a bucket, as Prometheus' ``histogram_quantile`` has it.

    Args:
        bounds: upper bounds, ascending, the last one infinite.
        counts: cumulative. Where the quantile lies beyond the last finite bound, that bound is returned.

    Returns:
        NaN for a histogram without observations.
    """
    if not counts or not counts[-1] > 0:
        return math.nan
    rank, below, lower = q * counts[-1], 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= rank and count > below:
            return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / (count - below)
        below, lower = count, bound if math.isfinite(bound) else lower
    return lower


def share_above(bounds: Sequence[float], counts: Sequence[float], limit: float) -> float:
    """The share of a histogram's observations above *limit*, linear within a bucket; NaN without observations.

    What lies beyond the last finite bound counts as above it, whatever the limit: nobody knows how far.
    """
    if not counts or not counts[-1] > 0:
        return math.nan
    below, lower = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if limit < bound:
            within = 0.0 if math.isinf(bound) else (count - below) * max(0.0, limit - lower) / (bound - lower)
            return 1 - (below + within) / counts[-1]
        below, lower = count, bound
    return 0.0


def increase(failed: int, of: int, reference_failed: int, reference_of: int) -> float:
    """The p-value of Fisher's exact test, one-sided: that as many failures (*failed* of *of*) or more happen by chance,
    if both fail equally often. 1 where nothing was asked."""
    total, failures = of + reference_of, failed + reference_failed
    if not of or not reference_of or not failed:
        return 1.0
    whole = _log_choose(total, of)
    tail = range(failed, min(failures, of) + 1)
    terms = [
        math.exp(_log_choose(failures, k) + _log_choose(total - failures, of - k) - whole)
        for k in tail
        if of - k <= total - failures
    ]
    return min(1.0, math.fsum(terms))


def exceeds(above: float, of: float, share: float = 1 - TAIL) -> float:
    """The p-value of the exact binomial test, one-sided: that *above* or more of *of* lie above a limit by chance, if
    no more than *share* of all do."""
    if not (of >= 1 and above >= 1):  # nor where they are NaN
        return 1.0
    n, least = math.floor(of), math.floor(above)
    terms = [
        math.exp(_log_choose(n, k) + k * math.log(share) + (n - k) * math.log1p(-share)) for k in range(least, n + 1)
    ]
    return min(1.0, math.fsum(terms))


def failures(
    failed: int, of: int, reference_failed: int, reference_of: int, *, slack: float, significance: float
) -> Verdict:
    """Whether requests fail more often: by more than *slack* (a difference of shares, 0–1), and not by chance.

    One error of three says nothing against a stable release with the same; five of five against none of five does.
    What chance explains passes, or a release that fails now and then could never be replaced.
    """
    if not of or not reference_of:
        return "unclear"
    if failed / of - reference_failed / reference_of <= slack:
        return "pass"
    by_chance = increase(failed, of, reference_failed, reference_of)
    return "fail" if by_chance < significance else "unclear" if by_chance < SUSPICIOUS else "pass"


def latency(
    bounds: Sequence[float], counts: Sequence[float], limit: float, *, least: int, significance: float
) -> Verdict:
    """Whether the 95th percentile is at most *limit*, from at least *least* observations.

    It fails only when more observations lie above the limit than chance explains: a percentile of few requests is
    noise. Over the limit without being sure of it is unclear.
    """
    if not counts or not counts[-1] >= least or not math.isfinite(limit):
        return "unclear"
    if quantile(bounds, counts, TAIL) <= limit:
        return "pass"
    above = share_above(bounds, counts, limit) * counts[-1]
    return "fail" if exceeds(above, counts[-1]) < significance else "unclear"


def mostly(worse: int, of: int, *, significance: float) -> Verdict:
    """Whether no more than half of *of* comparisons were worse; it fails only when more were than chance explains."""
    if not of:
        return "unclear"
    if 2 * worse <= of:
        return "pass"
    return "fail" if exceeds(worse, of, 0.5) < significance else "unclear"


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
