"""How often ``slipway watch`` raises a false alarm, and after how many looks it notices a change, by simulation with
known truth through the functions that decide.

    make bench-watch

A look every five minutes. Sound endpoints are watched for months, in worlds less tidy than the tests assume; changes
begin after a day, or after a few looks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from scoring.watch import LOOKS_A_MONTH, Sample, Watch

DAY: Final = 24 * 12
"""Looks."""
MONTHS: Final = 3
CHANGES: Final = 200
LONGEST: Final = DAY
"""After so many looks a change is not noticed."""
OWN: Final = 200
"""Requests of a look."""
TTFT_MS: Final = 100.0
TPOT_MS: Final = 20.0
CONTEXT: Final = 4096


@dataclass(frozen=True)
class World:
    """What a sound endpoint is watched in. Deviations are of logarithms."""

    noise: float = 0.05
    """Of each look."""
    slow: float = 0.0
    """Of what looks have in common that are near each other,"""
    slow_looks: float = 12.0
    """and over how many they are."""
    rate: float = 2.0
    """Clients' requests in flight, on average."""
    daily: float = 0.0
    """The logarithm of the most requests in flight of a day, relative to the mean; the fewest are as far below it."""
    bursts: float = 1.0
    """In a burst, that many times as many. They last for an hour, and come thrice a day."""
    per_request: float = 0.02
    """By what share each request in flight slows the others."""
    drift: float = 0.0
    """By how much the machine is slower at noon than at midnight, load apart."""
    neighbour: float = 0.0
    """The share that a neighbour takes, for ten minutes, twice an hour."""
    outliers: float = 0.0
    """Share of the looks that are five times as slow."""
    restarts: float = 0.0
    """How many a day: the look after one is three times as slow, and every tenth request fails in it."""
    failing: float = 0.0
    """Share of the requests that fail."""
    failure_bursts: float = 0.0
    """How many looks a day in which a third of the requests fails."""
    divergence: float = 0.001
    """Of the answers, as a standard deviation: batches change the last bits."""


SOUND: Final[Mapping[str, World]] = {
    "quiet": World(rate=0, noise=0.02),
    "noise of 5 %": World(),
    "noise of 15 %": World(noise=0.15),
    "noise of 25 %": World(noise=0.25),
    "noise of 10 %, and 10 % that lasts an hour": World(noise=0.1, slow=0.1),
    "noise of 10 %, and 10 % that lasts a day": World(noise=0.1, slow=0.1, slow_looks=DAY),
    "clients by day and night, 1 to 7": World(daily=1.0),
    "clients by day and night, and bursts ×4": World(daily=1.0, bursts=4),
    "a queue: bursts ×10, each request slows by 5 %": World(bursts=10, per_request=0.05),
    "a machine that is 20 % slower at noon": World(drift=0.2, noise=0.1),
    "a neighbour that takes 20 %": World(neighbour=0.2),
    "a neighbour that takes 40 %": World(neighbour=0.4),
    "2 % of the looks five times as slow": World(outliers=0.02),
    "restarts, twice a day": World(restarts=2),
    "1 % of the requests fail": World(failing=0.01),
    "failures in a burst, once a day": World(failure_bursts=1),
    "answers that differ by chance, 0.01 nats": World(divergence=0.01),
}


@dataclass(frozen=True)
class Fault:
    """What changes. Factors of times."""

    ttft: float = 1.0
    tpot: float = 1.0
    failing: float = 0.0
    divergence: float = 0.0
    context: int = CONTEXT
    after: int = DAY
    """Looks before it."""


IDLE: Final = World(rate=0)
FAULTS: Final[Mapping[str, tuple[World, Fault]]] = {
    "1 % of the weights are zero (0.2 nats)": (World(), Fault(divergence=0.2)),
    "another dtype (0.0097 nats)": (World(), Fault(divergence=0.0097)),
    "another dtype, answers differ by chance": (World(divergence=0.003), Fault(divergence=0.0097)),
    "half as fast": (World(), Fault(ttft=2, tpot=2)),
    "half as fast, noise of 25 %": (World(noise=0.25), Fault(ttft=2, tpot=2)),
    "half as fast, clients by day and night, bursts ×4": (World(daily=1.0, bursts=4), Fault(ttft=2, tpot=2)),
    "TPOT ×1.5": (World(), Fault(tpot=1.5)),
    "TPOT ×1.3": (World(), Fault(tpot=1.3)),
    "TTFT ×3": (World(), Fault(ttft=3)),
    "5 % of the requests fail": (World(), Fault(failing=0.05)),
    "5 % more of the requests, of which 1 % did, fail": (World(failing=0.01), Fault(failing=0.05)),
    "2 % of the requests fail": (World(), Fault(failing=0.02)),
    "a shorter context": (World(), Fault(context=CONTEXT // 2)),
    "another dtype, after 8 looks": (IDLE, Fault(divergence=0.0097, after=8)),
    "half as fast, after 8 looks": (IDLE, Fault(ttft=2, tpot=2, after=8)),
    "half as fast, after 12 looks": (IDLE, Fault(ttft=2, tpot=2, after=12)),
    "half as fast, noise of 10 %, after 8 looks": (World(rate=0, noise=0.1), Fault(ttft=2, tpot=2, after=8)),
    "half as fast, noise of 10 %, after 24 looks": (World(rate=0, noise=0.1), Fault(ttft=2, tpot=2, after=24)),
    "half as fast, 2 clients, after 24 looks": (World(), Fault(ttft=2, tpot=2, after=24)),
}


def samples(world: World, looks: int, random: np.random.Generator) -> list[Sample]:
    """Draw the looks at a sound endpoint."""
    result, keep = [], math.exp(-1 / world.slow_looks)
    slow = world.slow * random.standard_normal()
    begins = random.integers(DAY)
    burst = neighbour = 0
    for look in range(looks):
        hour = 2 * math.pi * (begins + look) / DAY
        slow = keep * slow + world.slow * math.sqrt(1 - keep * keep) * random.standard_normal()
        burst = burst - 1 if burst > 0 else int(random.random() < 3 / DAY) * 12
        neighbour = neighbour - 1 if neighbour > 0 else int(random.random() < 1 / 6) * 2
        rate = world.rate * math.exp(world.daily * math.sin(hour)) * (world.bursts if burst else 1.0)
        load = float(random.poisson(rate))  # at the moment of the look
        level = slow + world.drift * math.sin(hour) + math.log1p(world.per_request * rate)
        level -= math.log(1 - world.neighbour) if neighbour else 0.0
        level += math.log(5) if random.random() < world.outliers else 0.0
        failing = 1 / 3 if random.random() < world.failure_bursts / DAY else world.failing
        if random.random() < world.restarts / DAY:
            level, failing = level + math.log(3), 0.1
        noise = world.noise * random.standard_normal(2)
        requests = int(OWN + random.poisson(20 * rate))
        result.append(
            Sample(
                agreement=math.exp(-abs(world.divergence * float(random.standard_normal()))),
                requests=requests,
                failed=int(random.binomial(requests, failing)),
                ttft_ms=TTFT_MS * math.exp(level + 2 * noise[0]),
                tpot_ms=TPOT_MS * math.exp(level + noise[1]),
                in_flight=load,
                context=CONTEXT,
                promised=CONTEXT,
            )
        )
    return result


def with_fault(sample: Sample, fault: Fault, random: np.random.Generator) -> Sample:
    answered = sample.requests - sample.failed
    changed = {
        "agreement": (sample.agreement or 0.0) * math.exp(-fault.divergence),
        "failed": sample.failed + int(random.binomial(answered, fault.failing)),
        "ttft_ms": (sample.ttft_ms or 0.0) * fault.ttft,
        "tpot_ms": (sample.tpot_ms or 0.0) * fault.tpot,
        "in_flight": sample.in_flight * fault.tpot,  # Little's law
        "context": fault.context,
    }
    return sample.model_copy(update=changed)


def false_alarms(world: World, months: int, seed: Sequence[int]) -> int:
    """Count the alarms of that many months, watched one by one."""
    count = 0
    for month in range(months):
        watch, before = Watch(), False
        for sample in samples(world, LOOKS_A_MONTH, np.random.default_rng([month, *seed])):
            now = bool(watch.see(sample))
            count += now and not before
            before = now
    return count


def delay(world: World, fault: Fault, seed: Sequence[int]) -> int:
    """Count the looks from a change to its alarm, at most ``LONGEST``."""
    random, watch = np.random.default_rng(seed), Watch()
    drawn = samples(world, fault.after + LONGEST, random)
    for sample in drawn[: fault.after]:
        watch.see(sample)
    watch.alarms.clear()
    for looks, sample in enumerate(drawn[fault.after :], 1):
        if watch.see(with_fault(sample, fault, random)):
            return looks
    return LONGEST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--months", type=int, default=MONTHS, help="of each sound endpoint")
    parser.add_argument("--changes", type=int, default=CHANGES, help="of each kind")
    parser.add_argument("--only", default="", help="rows whose name contains this text")
    asked = parser.parse_args()
    print("| sound endpoint | false alarms a month |\n| --- | --- |")
    for name, world in SOUND.items():
        if asked.only in name:
            alarms = false_alarms(world, asked.months, list(name.encode()))
            print(f"| {name} | {alarms / asked.months:.2f} |", flush=True)
    print("\n| change | within three looks | median of looks | 95 % within |\n| --- | --- | --- | --- |")
    for name, (world, fault) in FAULTS.items():
        if asked.only in name:
            delays = sorted(delay(world, fault, [run, *name.encode()]) for run in range(asked.changes))
            soon, last = sum(looks <= 3 for looks in delays) / len(delays), delays[int(0.95 * len(delays)) - 1]
            later = f"more than {LONGEST - 1}" if last == LONGEST else last
            print(f"| {name} | {soon:.0%} | {median(delays):g} | {later} |", flush=True)


if __name__ == "__main__":
    main()
