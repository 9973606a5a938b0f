"""Whether a canary is worse than the stable release, judged by the requests of both in the same period of time.

The verdict is *pass*, *fail*, or *unclear* if there are too few requests to tell. Unclear does not count as a pass.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Final, Literal

Verdict = Literal["pass", "fail", "unclear"]
TAIL: Final = 0.95
"""Latencies are compared at their 95th percentile."""
SUSPICIOUS: Final = 0.1
"""The p-value below which more failures than those of the stable release are unclear, so more requests are needed."""


def quantile(bounds: Sequence[float], counts: Sequence[float], q: float) -> float:
    """A histogram's *q*-quantile, linear within a bucket, like Prometheus' ``histogram_quantile``.

    Args:
        bounds: upper bounds, ascending, the last one infinite.
        counts: cumulative. If the quantile is beyond the last finite bound, that bound is returned.

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

    Observations beyond the last finite bound count as above any limit, because their values are not known.
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
    """The p-value of Fisher's exact test, one-sided: the probability of *failed* or more failures among *of* requests,
    if both releases fail equally often. 1 if there were no requests."""
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
    """The p-value of the exact binomial test, one-sided: the probability that *above* or more of *of* observations are
    above a limit if the true share above it is *share*."""
    if not (of >= 1 and above >= 1):  # also if they are NaN
        return 1.0
    n, least = math.floor(of), math.floor(above)
    terms = [
        math.exp(_log_choose(n, k) + k * math.log(share) + (n - k) * math.log1p(-share)) for k in range(least, n + 1)
    ]
    return min(1.0, math.fsum(terms))


def failures(
    failed: int, of: int, reference_failed: int, reference_of: int, *, slack: float, significance: float
) -> Verdict:
    """Whether requests fail more often, by more than *slack* (a difference of shares, 0–1) and beyond chance.

    One failure in three requests is no evidence; five in five, with none on the stable release, is. A difference that
    chance explains passes, because otherwise a release that fails occasionally could never be replaced.
    """
    if not of or not reference_of:
        return "unclear"
    if failed / of - reference_failed / reference_of <= slack:
        return "pass"
    by_chance = increase(failed, of, reference_failed, reference_of)
    return "fail" if by_chance < significance else "unclear" if by_chance < SUSPICIOUS else "pass"


def share_within(count: int, of: int, limit: float, *, significance: float) -> Verdict:
    """Whether at most the share *limit* of *of* requests failed; more that chance explains pass, as in ``failures``."""
    if not of:
        return "unclear"
    if count / of <= limit:
        return "pass"
    by_chance = exceeds(count, of, max(limit, sys.float_info.epsilon))
    return "fail" if by_chance < significance else "unclear" if by_chance < SUSPICIOUS else "pass"


def latency(
    bounds: Sequence[float], counts: Sequence[float], limit: float, *, least: int, significance: float
) -> Verdict:
    """Whether the 95th percentile is at most *limit*, from at least *least* observations.

    It fails only if more observations are above the limit than chance explains, because a percentile of few requests is
    noise. A percentile above the limit that chance explains is unclear.
    """
    if not counts or not counts[-1] >= least or not math.isfinite(limit):
        return "unclear"
    if quantile(bounds, counts, TAIL) <= limit:
        return "pass"
    above = share_above(bounds, counts, limit) * counts[-1]
    return "fail" if exceeds(above, counts[-1]) < significance else "unclear"


def mostly(worse: int, of: int, *, significance: float) -> Verdict:
    """Whether at most half of *of* comparisons were worse; it fails only if more were worse than chance explains."""
    if not of:
        return "unclear"
    if 2 * worse <= of:
        return "pass"
    return "fail" if exceeds(worse, of, 0.5) < significance else "unclear"


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
