"""Capacity: the highest rate of requests at which the workload's targets hold, from the trials after a start of the
server; and with it the throughput of a start.

The capacity follows from all trials of a start: from how the strain on the server rises with the rate (``response``).
At a rate the targets hold if 95 % of the requests meet both, and the wait for the first token does not grow with time.
The second shows that the server keeps up: where targets are loose, a short trial alone would not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, linear_regression, median_low, pvariance
from typing import Final

from scoring.lead import Lead
from scoring.percentiles import p95
from stages.parts.records.evaluation import Capacity, Trial
from stages.parts.samples.lines import LoadSamples, StartLoad, TimedRequest

RULE: Final = 2
"""Raised when the same trials give another capacity: figures of another rule are not recomputed."""
SHARE: Final = 0.95
GROWTH: Final = 0.1
"""Seconds by which the wait may grow in a second: the share of the arrivals that the server does not keep up with."""
SURE: Final = 1.645
"""Standard errors of a one-sided 95 % bound."""
LEAST: Final = 1e-6
"""In place of 0, which has no logarithm."""
LARGEST: Final = 2.0
"""Where the rate is interpolated, a strain counts at most this much: far beyond the capacity it depends on how long the
trial was. A trial ends early only once its strain is certain to be more."""


@dataclass(frozen=True)
class Tried:
    """A rate in requests/s that was tried, and by how much it strained the server: it held if that is at most 1."""

    rate_per_s: float
    strain: float

    @property
    def held(self) -> bool:
        return self.strain <= 1


def strain_of(requests: Sequence[TimedRequest], ttft_ms: float, tpot_ms: float) -> float:
    """How far the requests of a trial were from its targets: at most 1 where they held, infinite without requests,
    because it was then ended early.

    It is the 95th percentile over the requests of the larger of TTFT and TPOT, each as a share of its target; or, if
    that is more, the growth of the wait during the trial, as a share of ``GROWTH``.
    """
    share = p95(max(request.ttft_ms / ttft_ms, request.tpot_ms / tpot_ms) for request in requests)
    return math.inf if share is None else max(share, growth_of(requests) / GROWTH)


def growth_of(requests: Sequence[TimedRequest]) -> float:
    """Seconds by which the time to the first token surely grew per second: the lower 95 % bound of the line through
    all, because in a short trial waits also grow by chance. 0 if unknown."""
    times_s, waits_s = [request.start_s for request in requests], [request.ttft_ms / 1000 for request in requests]
    if len(requests) < 3 or min(times_s) == max(times_s):
        return 0.0
    slope, at_0_s = linear_regression(times_s, waits_s)
    residual = sum((wait - at_0_s - slope * time) ** 2 for time, wait in zip(times_s, waits_s, strict=True))
    spread = len(requests) * pvariance(times_s)
    return slope - SURE * math.sqrt(residual / (len(requests) - 2) / spread)


def within(request: TimedRequest, ttft_ms: float, tpot_ms: float) -> bool:
    """Whether a request met both targets."""
    return request.ttft_ms <= ttft_ms and request.tpot_ms <= tpot_ms


def tried(trial: LoadSamples) -> Tried | None:
    """None for a run that is no trial of a rate."""
    run = trial.run
    if run.rate_per_s is None or run.targets_ms is None:
        return None
    return Tried(run.rate_per_s, strain_of(trial.requests, *run.targets_ms))


def response(trials: Iterable[Tried]) -> list[Tried]:
    """How the strain rises with the rate: one strain for each rate that was tried, none less than at a lower rate.

    This is isotonic regression by medians, so that no single trial decides (Robertson & Waltman 1968, Annals of
    Mathematical Statistics 39, 1030–1039): where the strains of neighbouring rates fall instead of rising, all get
    their median. Of an even number it is the lower of the two in the middle, because a pause of the machine makes
    trials fail, and nothing makes them hold: of two trials at one rate, a single failure does not count.
    """
    by_rate: dict[float, list[float]] = {}
    for trial in trials:
        by_rate.setdefault(trial.rate_per_s, []).append(trial.strain)
    rates = sorted(by_rate)
    strains, places = [by_rate[rate] for rate in rates], range(len(rates))

    def pooled(first: int, last: int) -> float:
        return median_low(list(chain.from_iterable(strains[first : last + 1])))

    return [
        Tried(rate, max(min(pooled(first, last) for last in places[place:]) for first in places[: place + 1]))
        for place, rate in enumerate(rates)
    ]


def bracket(trials: Iterable[Tried]) -> tuple[Tried | None, Tried | None]:
    """Return the highest rate that holds by the response of the server, and the lowest that does not."""
    curve = response(trials)
    held = sum(point.held for point in curve)  # no rate above one that does not hold
    return curve[held - 1] if held else None, curve[held] if held < len(curve) else None


def capacity_per_s(trials: Sequence[Tried]) -> float | None:
    """Return the rate in requests/s at which the server's response reaches a strain of 1, interpolated in logarithms
    between the highest rate that holds and the lowest that does not; if none fails, the highest, and None if none
    holds."""
    low, high = bracket(trials)
    if low is None or high is None:
        return low.rate_per_s if low else None
    below, above = -math.log(max(low.strain, 1 / LARGEST)), math.log(min(high.strain, LARGEST))
    share = below / (below + above) if below + above > 0 else 1.0
    return math.exp((1 - share) * math.log(low.rate_per_s) + share * math.log(high.rate_per_s))


def mean_capacity_per_s(load: StartLoad) -> float | None:
    """Return the geometric mean of the capacities in requests/s that starts had; None without trials of a rate."""
    rated = [(trial.run.restart, rate) for trial in load.trials if (rate := tried(trial))]
    capacities = [
        capacity
        for start in sorted({start for start, _ in rated})
        if (capacity := capacity_per_s([rate for of_start, rate in rated if of_start == start]))
    ]
    return math.exp(fmean(map(math.log, capacities))) if capacities else None


def throughput_of(load: StartLoad) -> float:
    """Return the throughput of one start of the server in output tokens/s.

    It is the capacity in requests/s times the mean answer of the rounds, which is the same for all variants. Without
    trials of a rate, the rounds had the same number of requests in flight all the time: then it is the geometric mean
    of their rates. Raise ValueError if the targets held at no rate."""
    rates = list(filter(None, map(tried, load.trials)))
    if not rates:
        return math.exp(fmean(math.log(run.output_tokens_per_s) for run in load.rounds))
    if (rate_per_s := capacity_per_s(rates)) is None:
        raise ValueError("the targets held at no rate")
    return rate_per_s * _mean_answer(load)


def _mean_answer(load: StartLoad) -> float:
    """Average the output tokens of the requests of the rounds."""
    return fmean(request.output_tokens for run in load.rounds for request in run.requests)


def capacity_of(load: StartLoad) -> Capacity | None:
    """Return the capacity over all starts of a server; None without trials of a rate. Raise ValueError if the targets
    held at no rate after a start."""
    rated = [trial for trial in load.trials if tried(trial)]
    targets_ms = rated[0].run.targets_ms if rated else None
    if targets_ms is None:
        return None
    tokens = [throughput_of(load.of_start(start)) for start in dict.fromkeys(trial.run.restart for trial in rated)]
    mean = math.exp(fmean(map(math.log, tokens)))
    low, high = interval(tokens) if len(tokens) > 1 else (None, None)
    return Capacity(
        ttft_ms=targets_ms[0],
        tpot_ms=targets_ms[1],
        requests_per_s=mean / _mean_answer(load),
        output_tokens_per_s=mean,
        low=low,
        high=high,
        starts=tuple(tokens),
        trials=tuple(
            Trial(
                restart=trial.run.restart,
                rate_per_s=trial.run.rate_per_s or 0.0,
                requests=len(trial.requests),
                share=fmean(within(request, *targets_ms) for request in trial.requests) if trial.requests else None,
                held=bool(trial.run.held),
            )
            for trial in rated
        ),
        rule=RULE,
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Compute the 95 % interval of the geometric mean of two or more starts of the server, by Student's t of the
    logarithms: a time or a rate has no negative end, however few the starts."""
    mean = Lead.of_starts([math.log(max(value, LEAST)) for value in values])
    return math.exp(mean.value - mean.reach()), math.exp(mean.value + mean.reach())
