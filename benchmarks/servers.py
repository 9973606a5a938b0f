"""Two releases of a model at work, simulated: clients, queues, batches, and vLLM's own counters.

Each server batches as vLLM does: prefill and decoding share an iteration, which takes longer the more requests are in
flight. The counters have vLLM's own bounds.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

import numpy as np

from scoring.arrays import Floats
from stages.parts.records.rollout import Counters
from stages.rollout.copies import alike
from stages.rollout.slices import ANSWER_TOKENS, LOST, CopiedRequest, Timing

HORIZON_S: Final = 4 * 900 + 400
"""Longer than any rollout."""
TTFT_BOUNDS: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                      40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
TPOT_BOUNDS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                      40.0, 80.0)  # fmt: skip
BATCH: Final = 64
"""The most requests in flight; further ones wait."""
PREFILL_TOKENS: Final = 2048
"""The most tokens of prompts in an iteration."""
OVERHEAD_S: Final = 0.014
EACH_S: Final = 0.001
"""An iteration's seconds, and for each request in flight in addition."""
PREFILL_S: Final = 50e-6
"""For each token of a prompt."""


@dataclass(frozen=True)
class SimulatedServer:
    """What is true of a release's server."""

    ttft: float = 1.0
    """Factors of the time to the first token and of all that an iteration takes."""
    tpot: float = 1.0
    stalled: float = 0.0
    """Share of the requests that wait ``STALL_S`` more."""
    failing: float = 0.0
    batch: int = BATCH


STALL_S: Final = 5.0


@dataclass(frozen=True)
class World:
    """What clients and machine do, to both releases alike."""

    rate: float = 4.0
    """Requests of clients per second, on average."""
    bursts: float = 1.0
    """Within bursts, which fill a fifth of the time, that many times as many requests as on average."""
    growth: float = 0.0
    """The share by which the traffic grows in six minutes."""
    clients: int = 0
    """Number of clients whose requests all go to one release; 0: each request may go to either."""
    continued: float = 0.0
    """Share of the requests that continue a session, of which a server has cached what it has seen."""
    prefill: float = 1.0
    """Factor of the time of prefill."""
    shared: float = 0.0
    """Deviation of the logarithm of the machine's speed, which both share."""
    neighbour: float = 0.0
    """The share that a neighbour takes of each server's own machine, by turns: half of the time, ten seconds long on
    average."""
    failing: float = 0.0
    failure_bursts: bool = False
    """Whether failures come in bursts, of three seconds a minute on average, at each server."""
    pause_s: float = 0.0
    """How long the machine stops, once in a minute."""
    outliers: int = 0
    """How many requests of each server in the first five minutes take 30 s longer."""


SPEED_S: Final = 10.0
"""The time over which a varying speed is correlated."""


def varying(random: np.random.Generator, deviation: float) -> Floats:
    """Factors second by second."""
    if not deviation:
        return np.ones(HORIZON_S)
    keep = math.exp(-1 / SPEED_S)
    steps = random.standard_normal(HORIZON_S) * math.sqrt(1 - keep * keep)
    steps[0] = random.standard_normal()
    values = list(accumulate(steps, lambda last, step: keep * last + step))
    return np.exp(deviation * np.array(values))


NEIGHBOUR_S: Final = 20.0
"""How long a neighbour works, and how long it pauses, on average."""


def beside(random: np.random.Generator, taken: float) -> Floats:
    """Factors second by second beside a neighbour that takes this share of the machine by turns."""
    factors, place, works = np.ones(HORIZON_S), 0, bool(random.random() < 0.5)
    while taken and place < HORIZON_S:
        end = place + 1 + int(random.exponential(NEIGHBOUR_S))
        factors[place:end] = 1 / (1 - taken) if works else 1.0
        place, works = end, not works
    return factors


@dataclass
class SimulatedRequest:
    arrived_s: float
    prompt: int
    """Tokens to prefill, without those that are cached."""
    tokens: int
    delay_s: float = 0.0
    first_s: float = math.nan
    ended_s: float = math.nan
    failed: bool = False


@dataclass
class SimulatedServing:
    """A server at work."""

    truth: SimulatedServer
    world: World
    factors: list[float]
    """The factors by which everything takes longer, second by second."""
    failing: list[float]
    """The probability that a request fails, second by second."""
    random: np.random.Generator
    now_s: float = 0.0
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    running: list[tuple[int, int, SimulatedRequest]] = field(default_factory=list)
    count: int = 0
    answered: int = 0
    failed: int = 0
    tokens: int = 0
    prompts: int = 0
    ttft: list[int] = field(default_factory=lambda: [0] * (len(TTFT_BOUNDS) + 1))
    tpot: list[int] = field(default_factory=lambda: [0] * (len(TPOT_BOUNDS) + 1))
    ttft_s: float = 0.0
    tpot_s: float = 0.0

    def submit(self, request: SimulatedRequest) -> None:
        """Take a request, in the order of their arrival."""
        if self.random.random() < self.failing[int(request.arrived_s)]:
            request.failed, request.ended_s = True, request.arrived_s + 0.002
            self.failed += 1
            return
        if self.truth.stalled and self.random.random() < self.truth.stalled:
            request.delay_s += STALL_S
        self.waiting.append(request)

    def advance(self, until_s: float) -> None:
        """Serve up to *until_s*, or an iteration more."""
        waiting, running = self.waiting, self.running
        pause_s, truth, factors = self.world.pause_s, self.truth, self.factors
        prefill_s = PREFILL_S * self.world.prefill
        while self.now_s < until_s:
            if not running and (not waiting or waiting[0].arrived_s > self.now_s):
                if not waiting or waiting[0].arrived_s >= until_s:
                    self.now_s = until_s
                    return
                self.now_s = waiting[0].arrived_s
            admitted: list[SimulatedRequest] = []
            prompts = 0
            while (
                waiting
                and waiting[0].arrived_s <= self.now_s
                and len(running) + len(admitted) < truth.batch
                and prompts < PREFILL_TOKENS
            ):
                request = waiting.popleft()
                prompts += request.prompt
                admitted.append(request)
            took_s = (OVERHEAD_S + EACH_S * (len(running) + len(admitted)) + prefill_s * prompts) * truth.tpot
            now_s = self.now_s + took_s * factors[int(self.now_s)]
            if pause_s and int(now_s / 60) != int(self.now_s / 60):
                now_s += pause_s
            self.now_s, self.count = now_s, self.count + 1
            for request in admitted:
                self.prompts += request.prompt
                self.begin(request, now_s)
                heapq.heappush(running, (self.count + request.tokens - 1, id(request), request))
            while running and running[0][0] <= self.count:
                self.end(heapq.heappop(running)[2], now_s)

    def begin(self, request: SimulatedRequest, now_s: float) -> None:
        request.delay_s += (self.truth.ttft - 1) * (now_s - request.arrived_s)
        request.first_s = now_s + request.delay_s
        ttft_s = request.first_s - request.arrived_s
        self.ttft[bisect_left(TTFT_BOUNDS, ttft_s)] += 1
        self.ttft_s += ttft_s

    def end(self, request: SimulatedRequest, now_s: float) -> None:
        request.ended_s = now_s + request.delay_s
        self.answered += 1
        self.tokens += request.tokens
        if request.tokens > 1:
            tpot_s = (request.ended_s - request.first_s) / (request.tokens - 1)
            self.tpot[bisect_left(TPOT_BOUNDS, tpot_s)] += 1
            self.tpot_s += tpot_s

    def counters(self) -> Counters:
        return Counters(
            answered=self.answered,
            failed=self.failed,
            output_tokens=self.tokens,
            ttft_bounds=TTFT_BOUNDS,
            ttft=tuple(accumulate(self.ttft)),
            tpot_bounds=TPOT_BOUNDS,
            tpot=tuple(accumulate(self.tpot)),
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            prompt_tokens=self.prompts,
            prompts=sum(self.ttft),
            instance="one",
        )


def arrivals(world: World, random: np.random.Generator) -> Iterator[tuple[float, float, int, int, int]]:
    """Yield the clients' requests: when, the place from 0 to 1 that decides where it goes, tokens of the prompt, those
    that are not cached if the server knows the session, and tokens of the answer."""
    weights = np.exp(0.7 * random.standard_normal(max(1, world.clients)))
    long = np.exp(0.7 * random.standard_normal(max(1, world.clients)) - 0.245)
    places = random.random(max(1, world.clients))
    cumulated = np.cumsum(weights / weights.sum())
    now_s, bursting, changes_s = 0.0, False, 0.0
    sessions: list[tuple[float, int]] = []
    while world.rate:
        while world.bursts > 1 and now_s >= changes_s:
            bursting = random.random() < 0.2 if changes_s == 0 else not bursting
            changes_s = max(changes_s, now_s) + random.exponential(5.0 if bursting else 20.0)
        factor = 1.0
        if world.bursts > 1:
            factor = world.bursts if bursting else (1 - 0.2 * world.bursts) / 0.8
        rate = world.rate * factor * (1 + world.growth * now_s / 360)
        gap_s = random.exponential(1 / rate) if rate > 1e-9 else math.inf
        if world.bursts > 1 and now_s + gap_s > changes_s:
            now_s = changes_s  # without memory: drawn anew at the other rate
            continue
        now_s += gap_s
        tokens = max(2, round(40 * math.exp(0.5 * random.standard_normal() - 0.125)))
        prompt = max(8, round(300 * math.exp(0.6 * random.standard_normal() - 0.18)))
        place, new = float(random.random()), prompt
        if world.clients:
            client = int(np.searchsorted(cumulated, random.random()))
            place, prompt = float(places[client]), max(8, round(prompt * long[client]))
            new = prompt
        if world.continued:
            if sessions and random.random() < world.continued:
                number = int(random.integers(len(sessions)))
                place, turns = sessions[number]
                sessions[number] = (place, turns + 1)
            else:
                turns = 0
                sessions = [*sessions[-39:], (place, 1)]
            new, prompt = prompt // 2, prompt // 2 + 100 * min(turns, 12)
        yield now_s, place, prompt, new, tokens


class Simulation:
    """Two releases in a world, on a clock of its own."""

    def __init__(self, world: World, canary: SimulatedServer, seed: Sequence[int]) -> None:
        self.world, self.now_s, self.percent, self.copied = world, 0.0, 0, 0
        self.copying: list[tuple[SimulatedRequest, SimulatedRequest]] = []
        """Clients' requests and their copies that have not ended at both releases."""
        random = np.random.default_rng(seed)
        self.random = random
        shared = varying(random, world.shared)
        self.servers = {}
        for name, truth in (("stable", SimulatedServer()), ("canary", canary)):
            factors = (shared * beside(random, world.neighbour)).tolist()
            self.servers[name] = SimulatedServing(truth, world, factors, self.failures(truth), random)
        self.cached: dict[str, set[float]] = {"stable": set(), "canary": set()}
        self.arrivals = arrivals(world, random)
        self.coming = next(self.arrivals, None)
        self.outliers = {name: sorted(random.uniform(0, 300, world.outliers).tolist()) for name in self.servers}

    def failures(self, truth: SimulatedServer) -> list[float]:
        failing = np.full(HORIZON_S, max(truth.failing, 0 if self.world.failure_bursts else self.world.failing))
        if self.world.failure_bursts:
            for start in np.flatnonzero(self.random.random(HORIZON_S) < 1 / 60):
                failing[start : start + 3] = self.world.failing
        return failing.tolist()

    def advance(self, until_s: float) -> None:
        while self.coming and self.coming[0] <= until_s:
            arrived_s, place, prompt, new, tokens = self.coming
            name = "canary" if place < self.percent / 100 else "stable"
            request = self.submit(name, arrived_s, place, prompt, new, tokens)
            if place < self.copied / 100:
                self.copying.append((request, self.submit("canary", arrived_s, place, prompt, new, tokens)))
            self.coming = next(self.arrivals)
        for each in self.servers.values():
            each.advance(until_s)
        self.now_s = until_s

    def submit(self, name: str, arrived_s: float, place: float, prompt: int, new: int, tokens: int) -> SimulatedRequest:
        """Send a client's request to a release."""
        if self.world.continued:
            known = self.cached[name]
            prompt = new if place in known else prompt
            known.add(place)
        request = SimulatedRequest(arrived_s, prompt, tokens)
        if self.outliers[name] and arrived_s > self.outliers[name][0]:
            self.outliers[name].pop(0)
            request.delay_s = 30.0
        self.servers[name].advance(arrived_s)
        self.servers[name].submit(request)
        return request

    def copies(self) -> list[CopiedRequest]:
        """See ``stages.rollout.copies``."""
        ended = [both for both in self.copying if all(each.ended_s <= self.now_s for each in both)]
        self.copying = [both for both in self.copying if both not in ended]
        copied = []
        for original, copy in ended:
            known = not original.failed and not copy.failed and alike(original.prompt, copy.prompt)
            timings = (timed(copy, math.inf), timed(original, math.inf)) if known else None
            copied.append(CopiedRequest(copy.failed, original.failed, timings))
        return copied

    def pairs(self, count: int, tokens: int, over_s: float, timeout_s: float) -> list[tuple[Timing, ...]]:
        """See ``stages.rollout.slices``."""
        sent = []
        for turn in range(count):
            self.advance(self.now_s + (over_s / count if turn else 0.0))
            both = [SimulatedRequest(self.now_s, tokens, ANSWER_TOKENS) for _ in self.servers]
            for request, name in zip(both, ("canary", "stable"), strict=True):
                self.servers[name].submit(request)
            sent.append(both)
        began_s = self.now_s
        while any(math.isnan(each.ended_s) for both in sent for each in both) and self.now_s < began_s + timeout_s:
            self.advance(self.now_s + 0.02)
        ended_s = max(min(each.ended_s, each.arrived_s + timeout_s) for both in sent for each in both)
        self.advance(max(self.now_s, ended_s))
        return [tuple(timed(each, timeout_s) for each in both) for both in sent]


def timed(request: SimulatedRequest, timeout_s: float) -> Timing:
    if request.failed or not request.ended_s - request.arrived_s <= timeout_s:
        return LOST
    token_s = (request.ended_s - request.first_s) / (request.tokens - 1)
    return Timing(request.first_s - request.arrived_s, token_s)
