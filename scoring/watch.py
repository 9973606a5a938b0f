"""Whether an endpoint is still what its release was when it was measured, judged look by look for as long as it serves.

Each signal has a test of its own (Page 1954, Biometrika 41, 100–115): the log-likelihood ratio of a look, of a change
that matters against none, is added up and never falls below zero. If looks are independent, the mean time to a false
alarm is at least the exponential of the limit (Lorden 1971, Ann. Math. Stat. 42, 1897–1908). They are not, so that a
look counts only up to a bound: one that is out of line raises no alarm, however far out, and three in a row do. Tests
with a fixed end (``scoring.sequential``) would have to be begun anew again and again.

What is usual is learned from the endpoint's own looks under a similar load, since a server is slower the more it does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Literal, get_args

import numpy as np

from scoring.arrays import Floats

Signal = Literal["answers", "errors", "ttft", "tpot", "context"]
SIGNALS: Final[tuple[Signal, ...]] = get_args(Signal)
LOOKS_A_MONTH: Final = 31 * 24 * 12
"""One every five minutes."""
LIMIT: Final = math.log(LOOKS_A_MONTH * len(SIGNALS))
"""Of the evidence, in nats: at most one false alarm a month, of all signals together."""
BOUND: Final = LIMIT / 2.9
"""The most that a look adds to the evidence: an alarm takes three."""
BOUND_OF_ERRORS: Final = LIMIT / 1.95
"""For failed requests, of which there are few in a look, it takes two."""
KEPT: Final = 7 * 24 * 12
"""The looks that say what is usual: a week has every hour of the day and every day of the week."""
LEARNED: Final = 6
"""Fewer looks don't say what is usual."""
ALIKE: Final = math.log(3)
"""Two loads are alike if the logarithms of their requests in flight, plus one, differ by no more: a server that is half
as fast has about twice as many in flight."""
GROSS: Final = 0.1
"""Nats per token by which answers differ until it is known what is usual; a rollout withdraws a canary by as much."""
DEVIATION: Final = {"answers": 0.002, "ttft": 0.2, "tpot": 0.16}
"""The least standard deviations, in nats per token and of the logarithms of times: looks are more alike by chance, or
for some hours, than they stay."""
CHANGE: Final = {"answers": 0.005, "ttft": math.log(2.5), "tpot": math.log(1.8)}
"""The least changes that matter. In noise, at least ``DEVIATIONS`` standard deviations matter."""
DEVIATIONS: Final = 3.0
STANDARD: Final = NormalDist()
UNCERTAIN: Final = 12.0
"""Divided by the number of looks: the share by which the deviation may be larger than they show, since those of an hour
are alike."""
HIGH: Final = (0.75, 0.9)
"""The quantiles that show a standard deviation: by the second, what a neighbour does from time to time is usual."""
FAILING: Final = 0.005
"""The share of requests that may fail, before anything is known; it counts as much as ``PRIOR`` requests."""
PRIOR: Final = 200.0
MORE_FAILING: Final = 0.045
"""The growth of that share that matters."""
MOST_REQUESTS: Final = 250.0
"""More requests of a look are not more evidence: they fail together."""


@dataclass(frozen=True)
class Sample:
    """What one look showed. What it could not show is None."""

    divergence: float | None
    """Of the answers from the recorded ones, in nats per token (``scoring.probes``): −ln of the agreement."""
    requests: float
    failed: float
    """Requests of clients, and the look's own."""
    ttft_s: float | None
    tpot_s: float | None
    """Medians of the look's own load."""
    load: float
    """Requests of clients in flight."""
    context: int | None
    promised: int | None
    """The longest request in tokens that the server takes, and that it should take."""


class Watch:
    """What the looks at one release have shown so far."""

    def __init__(self) -> None:
        self.evidence: dict[Signal, float] = dict.fromkeys(SIGNALS, 0.0)
        self.alarms: set[Signal] = set()
        """They end once nothing is left of the evidence."""
        self._usual: Floats = np.full((KEPT, 4), np.nan)
        self._count = 0
        self._failed = self._requests = 0.0
        self._doubtful: list[Sample] = []

    @property
    def learned(self) -> bool:
        return self._count >= LEARNED

    def see(self, sample: Sample) -> set[Signal]:
        """Add a look. Returns the signals of which there is an alarm now."""
        for signal, added in self._added(sample).items():
            self.evidence[signal] = min(LIMIT, max(0.0, self.evidence[signal] + added))
            if self.evidence[signal] >= LIMIT:
                self.alarms.add(signal)
                self._doubtful.clear()
            elif not self.evidence[signal]:
                self.alarms.discard(signal)
        if not self.alarms:
            self._doubtful.append(sample)
            if not any(self.evidence.values()):  # what looked like a change was none
                for usual in self._doubtful:
                    self._learn(usual)
                self._doubtful.clear()
        return set(self.alarms)

    def usual(self, signal: Literal["answers", "ttft", "tpot"], load: float) -> tuple[float, float] | None:
        """Return what is usual under this load, in nats or as a logarithm of seconds, and its standard deviation; None
        if too few looks say it."""
        rows = self._usual[: min(self._count, KEPT)]
        if signal != "answers":
            rows = rows[np.abs(rows[:, 0] - math.log1p(load)) <= ALIKE]
        values = rows[:, 1 + ("answers", "ttft", "tpot").index(signal)]
        values = np.sort(values[~np.isnan(values)])
        if len(values) < LEARNED:
            return None
        median, *high = (float(values[int(q * len(values))]) for q in (0.5, *HIGH))
        shown = ((value - median) / STANDARD.inv_cdf(q) for q, value in zip(HIGH, high, strict=True))
        return median, max(DEVIATION[signal], *shown) * (1 + UNCERTAIN / len(values))

    def _learn(self, sample: Sample) -> None:
        row = [math.log1p(sample.load), _number(sample.divergence), _log(sample.ttft_s), _log(sample.tpot_s)]
        self._usual[self._count % KEPT] = row
        self._count += 1
        self._failed, self._requests = self._failed + sample.failed, self._requests + sample.requests

    def _added(self, sample: Sample) -> Mapping[Signal, float]:
        """Compute the log-likelihood ratios of a look, within their bounds."""
        ratios: dict[Signal, float] = {"errors": self._of_errors(sample)}
        times = {"answers": _number(sample.divergence), "ttft": _log(sample.ttft_s), "tpot": _log(sample.tpot_s)}
        for signal in ("answers", "ttft", "tpot"):
            value, usual = times[signal], self.usual(signal, sample.load)
            if math.isnan(value):
                continue
            if usual:
                mean, deviation = usual
                change = max(CHANGE[signal], DEVIATIONS * deviation)
                ratios[signal] = change / deviation**2 * (value - mean - change / 2)
            elif signal == "answers":
                ratios[signal] = BOUND if value > GROSS else -BOUND
        if sample.context is not None and sample.promised is not None:
            ratios["context"] = BOUND if sample.context < sample.promised else -BOUND
        most = {"errors": BOUND_OF_ERRORS}
        return {signal: max(-BOUND, min(most.get(signal, BOUND), ratio)) for signal, ratio in ratios.items()}

    def _of_errors(self, sample: Sample) -> float:
        usual = (self._failed + FAILING * PRIOR) / (self._requests + PRIOR)
        more = min(0.99, usual + MORE_FAILING)
        weight = min(1.0, MOST_REQUESTS / sample.requests) if sample.requests else 0.0
        failed, answered = weight * sample.failed, weight * (sample.requests - sample.failed)
        return failed * math.log(more / usual) + answered * math.log((1 - more) / (1 - usual))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _log(seconds: float | None) -> float:
    return math.log(seconds) if seconds else math.nan
