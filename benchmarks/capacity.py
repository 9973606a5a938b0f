"""How well the search finds the ratio of two variants' capacities, by simulation with servers of known capacity.

    python -m benchmarks.capacity [--runs N]

Simulated servers stand in place of the load generator; the search, its trials and what follows from them are those of a
measurement. In each run, a reference and a variant are measured in blocks of one start each. A variant's true capacity
is the rate at which 95 % of a long stream of requests meet the targets. It is not proportional to a server's speed:
where latency rises softly with load, a server that is 1.3 times as fast has one and a half times the capacity, because
the targets stay the same.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final
from unittest.mock import patch

from pipeline.settings.config import load
from stages.evaluate import load as loads
from stages.evaluate.bench import Call, Limits, LoadTarget, lengths
from stages.evaluate.load import Loading
from stages.parts.base.workload import DEFAULT_SLO, Slo, Workload
from stages.parts.samples.capacity import mean_capacity_per_s, strain_of
from stages.parts.samples.lines import StartLoad, TimedRequest

RUNS: Final = 60
BLOCKS: Final = 3
"""The starts of each server in a run."""
RATIOS: Final = (1.0, 1.05, 1.3)
PAUSE_S: Final = 1.0
TRIAL_NOISE: Final = 0.02
"""The standard deviation of the logarithm of a server's capacity between trials."""
READ_AS: Final = 0.01
"""What reading a token of a prompt takes, in tokens of an answer."""
LONG: Final = 10_000
"""Requests of the stream that shows the truth."""
EXACT: Final = 1.001
"""The ratio of rates within which it is determined."""
CHAT: Final = load().workload
LOOSE: Final = CHAT.model_copy(update={"slo": Slo(ttft_ms=60_000, tpot_ms=1000)})
SHORT: Final = CHAT.model_copy(
    update={
        "prompt_tokens": 64,
        "prompt_spread": 0.0,
        "output_tokens": 32,
        "output_spread": 0.0,
        "concurrency": 4,
        "slo": Slo(ttft_ms=500, tpot_ms=25),
        "ramp_s": 0.5,
        "trial_s": 1.5,
        "trials": 3,
    }
)
"""As the demo's."""


@dataclass(frozen=True)
class Kind:
    """A server that answers all requests in flight at the same pace, slower the more they are."""

    name: str
    step_s: float
    """Seconds for one token of each request."""
    per_request_s: float = 0.0
    """Seconds by which each request in flight makes a step longer."""
    slots: float = math.inf
    """Requests in flight at most; others wait in the order of their arrival."""
    workload: Workload = CHAT
    gain: float = 1.0
    """The slope of the capacity over the speed, both in logarithms."""

    def faster(self, speed: float) -> Kind:
        return replace(self, step_s=self.step_s / speed, per_request_s=self.per_request_s / speed)

    def varied(self, deviation: float, chance: random.Random) -> Kind:
        """With a capacity that differs by chance; *deviation* is that of its logarithm."""
        return self.faster(math.exp(chance.gauss(0, deviation) / self.gain))


KINDS: Final = (
    Kind("soft", 0.04, 0.0006),
    Kind("steep", 0.015, 0.0008),
    Kind("hard knee", 0.03, slots=32),
    Kind("hard knee, loose targets", 0.03, slots=32, workload=LOOSE),
    Kind("soft, trials of 1.5 s", 0.01, 0.0002, workload=SHORT),
)


@dataclass(frozen=True)
class Noise:
    starts: float
    """The standard deviation of the logarithm of a server's capacity between starts."""
    pauses: float
    """The share of trials in which the server stands still for a second."""


NOISES: Final = (Noise(0.03, 0.0), Noise(0.05, 0.075))


class Simulated:
    """One start of a server, which answers the calls of the load generator."""

    def __init__(self, kind: Kind, noise: Noise, chance: random.Random) -> None:
        self.kind, self.pauses, self._chance = kind.varied(noise.starts, chance), noise.pauses, chance
        self.seconds = 0.0
        """Spent on all calls."""

    def send(self, target: LoadTarget, call: Call) -> list[TimedRequest] | None:
        kind, chance = self.kind.varied(TRIAL_NOISE, self._chance), self._chance
        asked = lengths(target.workload, call.seed, call.requests)
        if call.rate_per_s is None:
            requests = one_after_another(kind, asked, call.concurrency or 1)
        else:
            times_s = arrivals(call.seed, call.requests, call.rate_per_s)
            pause_s = chance.uniform(0, times_s[-1]) if chance.random() < self.pauses else math.inf
            requests = answered(kind, times_s, asked, pause_s)
        early_s = ended_early_s(requests, call.limits)
        self.seconds += max(map(ended_s, requests)) if early_s is None else early_s
        return requests if early_s is None else None


def arrivals(seed: int, count: int, rate_per_s: float) -> list[float]:
    """As vLLM's: a Poisson process, scaled so that its mean rate is exact."""
    chance = random.Random(seed)
    times = list(itertools.accumulate(chance.expovariate(1.0) for _ in range(count)))
    return [each * count / rate_per_s / times[-1] for each in times]


def one_after_another(kind: Kind, asked: Sequence[tuple[int, int]], concurrency: int) -> list[TimedRequest]:
    """With the same number in flight all the time, as if the others waited for a slot."""
    waiting = answered(replace(kind, slots=min(kind.slots, concurrency)), [0.0] * len(asked), asked)
    moved = [each.model_copy(update={"start_s": each.ttft_ms / 1000}) for each in waiting]
    return sorted(moved, key=lambda each: each.start_s)


def answered(
    kind: Kind, times_s: Sequence[float], asked: Sequence[tuple[int, int]], pause_s: float = math.inf
) -> list[TimedRequest]:
    """Answer the requests as the server does, in the order of their arrival.

    Args:
        pause_s: when it stands still for ``PAUSE_S``.
    """
    # The clock stands still during the pause. Work is counted in steps, of which each request in flight gets the same.
    clock_s = [at if at < pause_s else max(pause_s, at - PAUSE_S) for at in times_s]
    tokens_s: list[list[float]] = [[] for _ in clock_s]  # of each request: the first token, then the last
    events: list[tuple[float, int, float]] = []  # the step of such a token, the request, and the steps that remain
    now_s, steps, arrived, admitted, running = 0.0, 0.0, 0, 0, 0
    while arrived < len(clock_s) or events:
        step_s = kind.step_s + kind.per_request_s * running
        token_s = now_s + (events[0][0] - steps) * step_s if events else math.inf
        if arrived < len(clock_s) and clock_s[arrived] <= token_s:
            steps += (clock_s[arrived] - now_s) / step_s
            now_s = clock_s[arrived]
            arrived += 1
        else:
            now_s, (steps, place, remaining) = token_s, heapq.heappop(events)
            tokens_s[place].append(now_s if now_s < pause_s else now_s + PAUSE_S)
            if remaining:
                heapq.heappush(events, (steps + remaining, place, 0.0))
            else:
                running -= 1
        while running < kind.slots and admitted < arrived:
            prompt, answer = asked[admitted]
            heapq.heappush(events, (steps + 1 + READ_AS * prompt, admitted, answer - 1.0))
            running, admitted = running + 1, admitted + 1
    return list(map(_request, times_s, tokens_s, asked))


def _request(start_s: float, tokens_s: Sequence[float], length: tuple[int, int]) -> TimedRequest:
    first_s, last_s = tokens_s[0], tokens_s[-1]
    return TimedRequest.model_construct(  # not validated, which would take most of the time
        restart=0,
        phase="round",
        number=0,
        gpus=None,
        start_s=start_s,
        itl_ms=(),
        ttft_ms=1000 * (first_s - start_s),
        tpot_ms=1000 * (last_s - first_s) / max(1, length[1] - 1),
        e2el_ms=1000 * (last_s - start_s),
        prompt_tokens=length[0],
        output_tokens=length[1],
    )


def ended_s(request: TimedRequest) -> float:
    return request.start_s + request.e2el_ms / 1000


def ended_early_s(requests: Sequence[TimedRequest], limits: Limits | None) -> float | None:
    """When more requests than allowed had taken longer than a limit; None if that did not happen."""
    if limits is None:
        return None
    slow = sorted(
        ended_s(each)
        for each in requests[limits.first : limits.end]
        if each.ttft_ms > limits.ttft_ms or each.tpot_ms > limits.tpot_ms
    )
    return slow[limits.allowed] if len(slow) > limits.allowed else None


@cache
def true_capacity_per_s(kind: Kind) -> float:
    """Bisect the rate of a long stream, without its beginning, when the server is not yet as busy as it stays.

    No rate holds that is above what the server answers when it is never idle: the wait then grows without end, but
    where targets are loose, even a long stream is over before it exceeds them.
    """
    slo = kind.workload.slo or DEFAULT_SLO
    asked = lengths(kind.workload, 1, LONG)
    at_once = answered(kind, [0.0] * LONG, asked)
    low, high = 0.05, LONG / max(map(ended_s, at_once))
    while high > low * EXACT:
        rate = math.sqrt(low * high)
        stream = answered(kind, arrivals(1, LONG, rate), asked)
        low, high = (rate, high) if strain_of(stream[LONG // 50 :], slo.ttft_ms, slo.tpot_ms) <= 1 else (low, rate)
    return math.sqrt(low * high)


def pair(kind: Kind, ratio: float) -> tuple[Kind, Kind, float]:
    """Return the reference, a variant with about *ratio* times its capacity, and the exact ratio."""
    capacity = true_capacity_per_s(kind)
    slope = (true_capacity_per_s(kind.faster(1.1)) / capacity - 1) / 0.1  # nearly linear in the speed
    speed = 1 + (ratio - 1) / slope
    variant = replace(kind.faster(speed), gain=slope * speed / ratio)
    return replace(kind, gain=slope), variant, true_capacity_per_s(variant) / capacity


@dataclass(frozen=True)
class Searched:
    """The search after one start."""

    capacity_per_s: float
    trials: int
    seconds: float


def searched(
    kind: Kind, noise: Noise, block: int, earlier: Sequence[StartLoad], chance: random.Random
) -> tuple[StartLoad, Searched]:
    server = Simulated(kind, noise, chance)
    unused: Any = None
    target = LoadTarget(unused, unused, Path(), kind.workload, None, Path())
    loading = Loading(target, block, *earlier)
    with patch.object(loads, "send", server.send):
        list(loading.search())
    return loading.found, Searched(mean_capacity_per_s(loading.found) or math.nan, len(loading.trials), server.seconds)


def run(reference: Kind, variant: Kind, noise: Noise, seed: int) -> list[tuple[Searched, Searched]]:
    """Search for both in each block, one after the other, as on a GPU. No two have the same requests."""
    chance, workload = random.Random(seed), reference.workload.model_copy(update={"seed": 1_000_000 * seed})
    before, blocks = [StartLoad(), StartLoad()], []
    for block in range(BLOCKS):
        results = []
        for place, kind in enumerate((reference, variant)):
            earlier = before[0], before[place]
            load, found = searched(replace(kind, workload=workload), noise, block, earlier, chance)
            before[place] = before[place].plus(load)
            results.append(found)
        blocks.append((results[0], results[1]))
    return blocks


@dataclass(frozen=True)
class Found:
    """What many runs found of the ratio of the variant's capacity to the reference's."""

    true: float
    blocks: tuple[tuple[Searched, Searched], ...]

    @property
    def logs(self) -> list[float]:
        """The logarithm of the ratio in each block."""
        return [math.log(variant.capacity_per_s / reference.capacity_per_s) for reference, variant in self.blocks]

    @property
    def bias(self) -> float:
        return math.exp(fmean(self.logs)) / self.true - 1

    @property
    def error(self) -> float:
        """The standard error of the bias."""
        return self.deviation / math.sqrt(len(self.blocks))

    @property
    def deviation(self) -> float:
        """The standard deviation of the logarithm of the ratio in a block."""
        return stdev(self.logs)

    def mean(self, field: str) -> tuple[float, float]:
        """Average over the first starts, and over later ones."""
        numbered = [(number % BLOCKS, getattr(one, field)) for number, both in enumerate(self.blocks) for one in both]
        return fmean(each for block, each in numbered if not block), fmean(each for block, each in numbered if block)


def find(kind: Kind, ratio: float, noise: Noise, runs: int) -> Found:
    reference, variant, true = pair(kind, ratio)
    return Found(true, tuple(each for seed in range(runs) for each in run(reference, variant, noise, seed)))


def table(runs: int = RUNS) -> Iterator[str]:
    """Yield the rows of a Markdown table."""
    yield (
        "| server | noise of starts | trials with a pause | true ratio | measured | bias | sd in a block | trials "
        "(first start / later) | seconds |"
    )
    yield "| --- " * 9 + "|"
    for kind, ratio, noise in itertools.product(KINDS, RATIOS, NOISES):
        found = find(kind, ratio, noise, runs)
        trials, seconds = found.mean("trials"), found.mean("seconds")
        yield (
            f"| {kind.name} | {100 * noise.starts:.0f} % | {100 * noise.pauses:.1f} % | {found.true:.3f} | "
            f"{math.exp(fmean(found.logs)):.3f} | {100 * found.bias:+.1f} ± {100 * found.error:.1f} % | "
            f"{100 * found.deviation:.1f} % | {trials[0]:.1f} / {trials[1]:.1f} | {seconds[0]:.0f} / {seconds[1]:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=RUNS, help="runs of three blocks for each row")
    for line in table(parser.parse_args().runs):
        print(line, flush=True)


if __name__ == "__main__":
    main()
