"""The load after one start of a server, as production sees it (docs/load.md): requests that arrive at random, whether
or not earlier ones are answered. Trials of rates find the capacity, at which the workload's targets just hold; a round
then measures latency at a fixed rate, the same for all variants. Where nobody waits for the answers (``slo: null``),
there is only the round, with a fixed number of requests in flight: its throughput is that of the saturated server.

The search for the highest rate that a server holds tries rates further and further apart until one holds and one does
not, then the rate closest to the capacity as far as it is known, until the two are close and the failure is confirmed.
All rates lie on a scale that is the same for all variants after their starts of the same number: servers that differ by
nothing are tried at the same rates. From start to start the scale is shifted, so that where its rates lie averages out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from stages.evaluate.bench import Call, Limits, LoadTarget, send
from stages.evaluate.trace import Trace
from stages.parts.base.errors import ConfigError, MeasurementFailed
from stages.parts.base.serving_settings import Serving
from stages.parts.base.workload import Slo, Workload
from stages.parts.model.checkpoint import config_in, stated
from stages.parts.samples.capacity import (
    LARGEST,
    SHARE,
    Tried,
    bracket,
    capacity_per_s,
    mean_capacity_per_s,
    strain_of,
    throughput_of,
    tried,
    within,
)
from stages.parts.samples.lines import LoadRun, LoadSamples, Phase, StartLoad

MORE_TRIALS: Final = 5
"""Further trials where the capacity is not enclosed yet or a failure not confirmed: a machine that was busy for some
seconds must not end a variant, nor halve its capacity."""
WIDE: Final = 4
"""Steps of the search's scale within which the capacity has to be enclosed: almost one and a half times the rate."""
RATE_SHARE: Final = 0.7
"""The share of the reference's capacity at which latency is measured: as busy as a server that still has room for peaks
usually is."""
FEWEST: Final = 20
"""Requests of a trial and of a round, so that 95 % of them is a whole number."""
RUNS: Final = 1000
"""More than the runs of one start."""
PROMPTS: Final = 1_000_000
"""More than the requests of one run."""
CLOSE: Final = 1.1
"""The ratio of neighbouring rates on the scale, where the search ends; the capacity is interpolated between them."""
SHIFT: Final = (math.sqrt(5) - 1) / 2
"""The share of a step by which the scale is shifted: the golden ratio spreads any number of starts evenly."""
LARGEST_STEPS: Final = 14
"""Almost four times the rate."""
OWN_STEPS: Final = 1
"""The first distance, around what was found at an earlier start of the same variant."""
OTHER_STEPS: Final = 3
"""Around the reference's capacity."""
FIRST_STEPS: Final = 7
"""Where nothing is known but the rate with some requests in flight: almost twice the rate."""
CONFIRMING_STEPS: Final = 2
"""Another failure confirms one if its rate is at most this far above."""
ALONE: Final = 0.5
"""Requests in flight, on average, below which most are alone on the server: at lower rates they are no faster."""


class TargetsMissed(MeasurementFailed):
    """The workload's targets hold at no rate."""


@dataclass(frozen=True)
class Search:
    """Where to begin on the scale of a start, and the distance of the first two rates, which doubles each time."""

    start: int
    begin: int
    steps: int
    expected: float = math.inf
    """Where earlier starts of the same variant had their capacity; infinite if unknown."""

    @classmethod
    def around(cls, expected_per_s: float, steps: int, start: int = 0) -> Search:
        """Make a search whose first two rates enclose the expected one."""
        return cls(start, math.floor(_place(expected_per_s, start) - (steps - 1) / 2), steps)

    @classmethod
    def again(cls, found_per_s: float, start: int) -> Search:
        """Make a search around what was found at earlier starts of the same variant."""
        return replace(cls.around(found_per_s, OWN_STEPS, start), expected=_place(found_per_s, start))

    @classmethod
    def after(cls, sent_per_s: float, start: int = 0) -> Search:
        """Make a search that begins near a rate about which nothing else is known."""
        return cls(start, round(_place(sent_per_s, start)), FIRST_STEPS)

    def following(self, trials: Sequence[Tried], close: int = 1) -> float | None:
        """Choose the next rate to try in requests/s, which may be one that failed; None once the bracket is at most
        *close* steps wide and its failure confirmed."""
        place = self._next(trials, close)
        return None if place is None else math.pow(CLOSE, place + _shift(self.start))

    def _next(self, trials: Sequence[Tried], close: int) -> int | None:
        low, high = bracket(trials)
        rates = len({trial.rate_per_s for trial in trials})
        if high is None:
            return self._place_of(low) + self._distance(low, rates) if low else self.begin
        if low is None:
            repeated = len(trials) == 1 and self._is_doubtful(high, low, trials)
            return self._place_of(high) - (0 if repeated else self._distance(high, rates))
        below, above = self._place_of(low), self._place_of(high)
        if above - below > close:
            capacity = round(_place(capacity_per_s(trials) or low.rate_per_s, self.start))
            return min(max(capacity, below + 1), above - 1)
        return above if self._is_doubtful(high, low, trials) else None

    def _distance(self, last: Tried, rates: int) -> int:
        """Count the steps to the next rate where all held or all failed: upwards not beyond that at which the strain
        would be 1 if it rose only as the rate does."""
        steps = min(self.steps << min(rates - 1, LARGEST_STEPS), LARGEST_STEPS)
        if not 1 / LARGEST < last.strain <= 1:
            return steps
        return max(1, min(steps, math.ceil(-math.log(last.strain) / math.log(CLOSE))))

    def _is_doubtful(self, high: Tried, low: Tried | None, trials: Sequence[Tried]) -> bool:
        """Whether the lowest rate that failed is to be tried again, because a pause of the machine can make any trial
        fail.

        A failure at this rate, or just above it, counts if there are two of them; one is enough where earlier starts
        had their capacity; and one more is needed if the server was far less strained just below.
        """
        place = self._place_of(high)
        jumps = low is not None and high.strain >= LARGEST**2 * low.strain
        required = 1 + (place < self.expected - 1) + jumps
        tries = [trial for trial in trials if self._place_of(trial) == place]
        failures = [self._place_of(trial) for trial in trials if not trial.held]
        confirming = [failure for failure in failures if 0 <= failure - place <= CONFIRMING_STEPS]
        return len(confirming) < required and len(tries) <= required

    def _place_of(self, trial: Tried) -> int:
        return round(_place(trial.rate_per_s, self.start))


def _place(rate_per_s: float, start: int) -> float:
    return math.log(rate_per_s) / math.log(CLOSE) - _shift(start)


def _shift(start: int) -> float:
    return start * SHIFT % 1.0


@dataclass(frozen=True)
class Pace:
    """How the servers of all variants are loaded in their rounds."""

    requests: int
    """Those that count."""
    rate_per_s: float | None
    """None if the workload's ``concurrency`` requests are in flight all the time."""

    def times(self, factor: float) -> Pace:
        return replace(self, rate_per_s=self.rate_per_s and self.rate_per_s * factor)


def check_lengths(directory: Path, workload: Workload, serving: Serving, trace: Trace | None) -> None:
    """Raise ConfigError if prompt and answer together are longer than the model or the server allows."""
    model_tokens = stated(config_in(directory), "max_position_embeddings")
    limits = [limit for limit in (serving.max_model_len, model_tokens) if isinstance(limit, int)]
    check_fits(workload, trace, min(limits, default=sys.maxsize))


def check_fits(workload: Workload, trace: Trace | None, max_model_len: int) -> None:
    """Raise ConfigError if prompt and answer together may be longer."""
    prompt, answer = workload.longest()
    if trace:
        trace.check_fits(max_model_len)
    elif prompt + answer > max_model_len:
        raise ConfigError(
            f"workload {workload.name!r} needs {prompt} + {answer} = {prompt + answer} tokens, "
            f"but the model is served with {max_model_len}",
            hint="lower prompt_tokens, output_tokens or their spread, or raise serving.max_model_len if the model "
            "allows it",
        )


def described(load: StartLoad) -> str:
    """Say in a few words what the load of a start showed."""
    count = sum(len(samples.requests) for samples in load.rounds)
    rate = f" at {load.rounds[0].run.rate_per_s:.3g} requests/s" if load.rounds[0].run.rate_per_s else ""
    capacity = mean_capacity_per_s(load)
    limit = f"capacity {capacity:.3g} requests/s, " if capacity else ""
    return f"{limit}{count} requests{rate}, {throughput_of(load):.0f} tokens/s"


class Loading:
    """The load of one start of a server, run by run, so that servers that stand side by side can take turns:
    ``search``, then ``measure``.

    Args:
        start: the number of the start, from 0.
        reference: what earlier starts of the reference have shown, the first of which fixes the pace for all variants.
        own: what earlier starts of the variant itself have shown.
    """

    def __init__(self, target: LoadTarget, start: int, reference: StartLoad, own: StartLoad) -> None:
        self.target, self.start, self._reference, self._own = target, start, reference, own
        self.rounds: list[LoadSamples] = []
        self.trials: list[LoadSamples] = []
        self._rate_per_s = target.workload.request_rate_per_s

    @property
    def found(self) -> StartLoad:
        return StartLoad(tuple(self.rounds), tuple(self.trials))

    @property
    def pace(self) -> Pace:
        """That of the reference's first rounds; or, if it has none yet, what the search has shown here."""
        if self._reference.rounds:
            first = self._reference.rounds[0]
            return Pace(len(first.requests), first.run.rate_per_s)
        workload, rate = self.target.workload, self._rate_per_s or 0.0
        return Pace(math.ceil(max(FEWEST, rate * workload.steady_s)), rate if workload.slo else None)

    def search(self) -> Iterator[LoadSamples]:
        """Find the capacity, a trial at a time; without targets, how fast the answers come, if that is unknown.

        Raises:
            MeasurementFailed: a request failed, a figure is not finite, or the targets hold at no rate (TargetsMissed).
            ServerFailed: the server ended.
        """
        slo, start = self.target.workload.slo, self.start
        own_capacity, reference = mean_capacity_per_s(self._own), mean_capacity_per_s(self._reference)
        if not own_capacity and (slo or not (self._reference.rounds or self._rate_per_s)):
            # A few requests warm up what is compiled at first use, and show with which rate to begin.
            concurrency = self.target.workload.concurrency
            first = self._run("trial", concurrency, concurrency)
            yield first
            if slo:
                self.trials.append(first)
            else:
                self._rate_per_s = _sent_per_s(first)
        if slo is None:
            return
        if own_capacity:
            search = Search.again(own_capacity, start)
        else:
            sent = _sent_per_s(self.trials[0])
            search = Search.around(reference, OTHER_STEPS, start) if reference else Search.after(sent, start)
        yield from self._try_rates(search, slo)
        capacity = self._capacity_per_s(slo)
        self._rate_per_s = self._rate_per_s or RATE_SHARE * capacity

    def measure(self, pace: Pace) -> Iterator[LoadSamples]:
        workload, rate = self.target.workload, pace.rate_per_s
        ramp = workload.concurrency if rate is None else math.ceil(rate * workload.ramp_s)
        self.rounds.append(self._run("round", ramp, pace.requests, rate))
        yield self.rounds[-1]

    def _try_rates(self, search: Search, slo: Slo) -> Iterator[LoadSamples]:
        workload, made_before = self.target.workload, len(self.trials)
        # With more in flight, as in the first trial, each request takes longer.
        slowest_per_s = ALONE * _sent_per_s(self.trials[0]) / workload.concurrency if self.trials else 0.0
        while (trials := len(self.trials) - made_before) < workload.trials + MORE_TRIALS:
            rated = [trial for trial in map(tried, self.trials) if trial]
            if (rate := search.following(rated, close=1 if trials < workload.trials else WIDE)) is None:
                return
            count = max(FEWEST, math.ceil(rate * workload.trial_s))
            self.trials.append(self._run("trial", math.ceil(rate * workload.ramp_s), count, rate, slo))
            yield self.trials[-1]
            met = any(within(request, slo.ttft_ms, slo.tpot_ms) for request in self.trials[-1].requests)
            if rate < slowest_per_s and not met:
                return

    def _capacity_per_s(self, slo: Slo) -> float:
        """Compute the capacity. Raise TargetsMissed if no rate that was tried held."""
        rated = [trial for trial in map(tried, self.trials) if trial]
        capacity = capacity_per_s(rated)
        if capacity is None:
            lowest = min(trial.rate_per_s for trial in rated)
            raise TargetsMissed(
                f"{slo.ttft_ms:g} ms to the first token and {slo.tpot_ms:g} ms per token don't hold for {SHARE:.0%} of "
                f"the requests even at {lowest:.3g} requests/s",
                hint="raise the workload's slo, or set slo: null if nobody waits for the answers",
            )
        return capacity

    def _run(
        self, phase: Phase, ramp: int, count: int, rate_per_s: float | None = None, slo: Slo | None = None
    ) -> LoadSamples:
        """Send *count* requests, and *ramp* before and after them that do not count.

        Args:
            rate_per_s: None if the workload's ``concurrency`` requests are in flight all the time.
            slo: the targets of a trial, which is ended early once its strain is certain to be more than what counts.
        """
        workload, start, end, sent = self.target.workload, self.start, ramp + count, count + 2 * ramp
        number = start if phase == "round" else start * RUNS + len(self.trials)
        allowed = count - math.ceil(SHARE * count)
        call = Call(
            requests=sent,
            seed=workload.seed + start,
            # Rounds continue a trace from start to start; prompts that trials get come after those of all rounds.
            first=start * sent if phase == "round" else (number + 1) * PROMPTS,
            rate_per_s=rate_per_s,
            concurrency=workload.concurrency if rate_per_s is None else None,
            warmups=workload.warmup_requests if phase == "trial" and not self.trials else 0,
            limits=Limits(LARGEST * slo.ttft_ms, LARGEST * slo.tpot_ms, allowed, ramp, end) if slo else None,
        )
        requests = send(self.target, call)
        label = {"restart": start, "phase": phase, "number": number}
        targets_ms = (slo.ttft_ms, slo.tpot_ms) if slo else None
        facts = label | {"rate_per_s": rate_per_s, "targets_ms": targets_ms}
        if requests is None:
            facts |= {"concurrency": 0, "duration_s": count / (rate_per_s or math.nan), "held": False}
            return LoadSamples(LoadRun.model_validate(facts), ())
        changed = label if phase == "round" else label | {"itl_ms": ()}
        samples = tuple(request.model_copy(update=changed) for request in requests[ramp:end])
        duration_s = requests[end].start_s - samples[0].start_s
        in_flight = sum(request.e2el_ms for request in samples) / 1000 / duration_s
        facts |= {"concurrency": max(1, round(in_flight)), "duration_s": duration_s}
        facts |= {"held": strain_of(samples, *targets_ms) <= 1 if targets_ms else None}
        return LoadSamples(LoadRun.model_validate(facts), samples)


def _sent_per_s(samples: LoadSamples) -> float:
    return len(samples.requests) / samples.run.duration_s
