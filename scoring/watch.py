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
from statistics import NormalDist
from typing import Final, Literal, get_args

import numpy as np

from scoring.arrays import Floats
from scoring.closed import Closed

Level = Literal["answers", "ttft", "tpot"]
LEVELS: Final[tuple[Level, ...]] = get_args(Level)
Signal = Level | Literal["errors", "context"]
SIGNALS: Final[tuple[Signal, ...]] = (*LEVELS, "errors", "context")
LOOKS_A_MONTH: Final = 31 * 24 * 12
"""One every five minutes."""
LIMIT: Final = math.log(LOOKS_A_MONTH * len(SIGNALS))
"""Of the evidence, in nats: at most one false alarm a month, of all signals together."""
BOUND: Final = LIMIT / 2.9
"""The most that a look adds to the evidence: an alarm takes three."""
KEPT: Final = 7 * 24 * 12
"""The looks that say what is usual: a week has every hour of the day and every day of the week."""
LEARNED: Final = 6
"""Fewer looks don't say what is usual."""
USERS: Final = 4
"""Requests that a look keeps in flight itself."""
ALIKE: Final = math.log(2)
"""Two loads are alike if the logarithms of the requests in flight, the look's among them, differ by no more: a server
that is half as fast has up to twice as many."""
GROSS: Final = 0.1
"""Nats per token by which answers differ before it is known what is usual; a rollout withdraws a canary by as much."""
LEAST: Final = {"answers": (0.002, 0.005), "ttft": (0.2, math.log(2.5)), "tpot": (0.16, math.log(1.8))}
"""The least standard deviation, since looks are more alike by chance, or for some hours, than they stay; and the least
change that matters, which in noise is ``DEVIATIONS`` of these. In nats per token, and of the logarithms of times."""
DEVIATIONS: Final = 3.0
FEW: Final = 3.5
"""Divided by the number of looks: the share by which both are taken larger, since the looks of an hour are alike, and
do not show what a neighbour takes from time to time."""
HIGH: Final = 0.9
"""The quantile that shows a standard deviation: what a neighbour does from time to time is usual."""
FAILING: Final = (1, 200)
"""Failed requests, and all, before anything is known."""
MORE_FAILING: Final = 0.045
"""The growth of the share of failed requests that matters."""


class Sample(Closed):
    """What one look showed. What it could not show is None."""

    agreement: float | None
    """Of the answers with the recorded ones, 0–1 (``scoring.probes``)."""
    requests: int
    failed: int
    """Requests of clients since the look before, and the look's own."""
    ttft_ms: float | None
    tpot_ms: float | None
    """Medians of the look's own load."""
    in_flight: float
    """Requests of clients."""
    context: int | None
    promised: int | None
    """The longest request in tokens that the server takes, and that it should take."""


class Watch:
    """What the looks at one release have shown so far."""

    def __init__(self) -> None:
        self.evidence: dict[Signal, float] = dict.fromkeys(SIGNALS, 0.0)
        self.alarms: set[Signal] = set()
        """They end once nothing is left of the evidence."""
        self._usual: Floats = np.full((KEPT, 6), np.nan)
        self._count = 0
        self._doubtful: list[Floats] = []

    def see(self, sample: Sample) -> set[Signal]:
        """Add a look. Returns the signals of which there is an alarm now."""
        divergence = None if sample.agreement is None else -math.log(max(sample.agreement, 1e-9))
        times = (math.log(ms) if ms else None for ms in (sample.ttft_ms, sample.tpot_ms))
        figures = (math.log(sample.in_flight + USERS), divergence, *times, sample.failed, sample.requests)
        row = np.array(figures, dtype=np.float64)
        for signal, added in self._added(sample, row).items():
            self.evidence[signal] = min(LIMIT, max(0.0, self.evidence[signal] + max(-BOUND, min(BOUND, added))))
            if self.evidence[signal] >= LIMIT:
                self.alarms.add(signal)
                self._doubtful.clear()
            elif not self.evidence[signal]:
                self.alarms.discard(signal)
        if not self.alarms:
            self._doubtful.append(row)
            if not any(self.evidence.values()):  # what looked like a change was none
                for usual in self._doubtful:
                    self._usual[self._count % KEPT] = usual
                    self._count += 1
                self._doubtful.clear()
        return set(self.alarms)

    def usual(self, level: Level, load: float) -> tuple[float, float, float] | None:
        """Return what is usual at the logarithm *load* of the requests in flight, in nats or as a logarithm of ms, its
        standard deviation, and the change that matters; None if too few looks say it."""
        rows = self._usual[: min(self._count, KEPT)]
        alike = slice(None) if level == "answers" else np.abs(rows[:, 0] - load) <= ALIKE
        values = rows[alike, 1 + LEVELS.index(level)]
        values, (deviation, change) = np.sort(values[~np.isnan(values)]), LEAST[level]
        if len(values) < LEARNED:
            return (0.0, deviation, 2 * GROSS) if level == "answers" else None
        few = 1 + FEW / len(values)
        median, high = (float(values[int(q * len(values))]) for q in (0.5, HIGH))
        deviation = max(deviation, few * (high - median) / NormalDist().inv_cdf(HIGH))
        return median, deviation, max(few * change, DEVIATIONS * deviation)

    def _added(self, sample: Sample, row: Floats) -> dict[Signal, float]:
        """Compute the log-likelihood ratios of a look."""
        ratios: dict[Signal, float] = {}
        for level, value in zip(LEVELS, row[1:4].tolist(), strict=True):
            if not math.isnan(value) and (usual := self.usual(level, row[0])):
                mean, deviation, change = usual
                ratios[level] = change / deviation**2 * (value - mean - change / 2)
        if sample.context is not None and sample.promised is not None:
            ratios["context"] = BOUND if sample.context < sample.promised else -BOUND
        failed, requests = (np.nansum(self._usual[: self._count, 4:], axis=0) + FAILING).tolist()
        share = failed / requests
        more = min(0.99, share + MORE_FAILING)
        answered = sample.requests - sample.failed
        ratios["errors"] = sample.failed * math.log(more / share) + answered * math.log((1 - more) / (1 - share))
        return ratios
