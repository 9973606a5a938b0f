"""How often a rollout decides rightly, by simulation with known truth through the functions that decide.

    make bench-canary

Every simulated rollout goes through the state machine and the observer of real ones, by the default settings, on a
simulated clock. Its releases are servers that queue and batch; see ``benchmarks.servers``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Final, cast

from benchmarks.servers import SimulatedServer, Simulation, World
from stages.parts.base.rollout_settings import Mirror, Rollout
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Slo
from stages.parts.records.rollout import LOCAL, Counters, Journal
from stages.parts.releases.release import Split
from stages.rollout.observation import SENT_WITHIN, Observer
from stages.rollout.slices import CopiedRequest, Timing
from stages.rollout.state_machine import StateMachine
from stages.rollout.target import Target

SETTINGS: Final = Rollout(agreement=0)
"""The defaults. The simulated servers have no recorded answers."""
MIRRORED: Final = Rollout(agreement=0, mirror=Mirror())
SLO: Final = Slo(ttft_ms=1000, tpot_ms=100)
"""As the default workload's."""
WARM_S: Final = 60.0
"""Seconds of traffic before the first step."""
RUNS: Final = 150
SOUND: Final = SimulatedServer()
IDENTICAL: Final[Mapping[str, World]] = {
    "no clients": World(rate=0),
    "a request in three seconds": World(rate=0.33),
    "even, 4 requests/s": World(),
    "even, 12/s": World(rate=12),
    "bursts ×4, 4/s": World(bursts=4),
    "bursts ×4, 8/s": World(rate=8, bursts=4),
    "6/s, growing by half in six minutes": World(rate=6, growth=0.5),
    "9/s, growing by half in six minutes": World(rate=9, growth=0.5),
    "shared machine whose speed varies by 30 %": World(shared=0.3),
    "each its own neighbour, that takes 20 %": World(neighbour=0.2),
    "each its own neighbour, that takes 40 %": World(neighbour=0.4),
    "12 clients that stick": World(clients=12),
    "50 clients that stick": World(clients=50),
    "prefix caches, 97 % continue a session": World(continued=0.97),
    "2 % of requests fail at both": World(failing=0.02),
    "failures in bursts at both": World(failing=0.5, failure_bursts=True),
    "one request takes 30 s more, at both": World(outliers=1),
    "the machine pauses for 5 s a minute": World(pause_s=5.0),
}
"""What two identical releases are rolled out in."""
WORSE: Final[Mapping[str, tuple[World, SimulatedServer]]] = {
    "TTFT ×2, p95 0.11 s": (World(prefill=2), SimulatedServer(ttft=2)),
    "TTFT ×2, p95 0.3 s": (World(prefill=5), SimulatedServer(ttft=2)),
    "TTFT ×2, p95 0.11 s, bursts ×4": (World(prefill=2, bursts=4), SimulatedServer(ttft=2)),
    "TPOT ×1.25": (World(), SimulatedServer(tpot=1.25)),
    "TPOT ×1.25, 12/s": (World(rate=12), SimulatedServer(tpot=1.25)),
    "TPOT ×1.5": (World(), SimulatedServer(tpot=1.5)),
    "TPOT ×1.3, a request in three seconds": (World(rate=0.33), SimulatedServer(tpot=1.3)),
    "6 % of requests wait 5 s more": (World(), SimulatedServer(stalled=0.06)),
    "5 % of requests fail": (World(), SimulatedServer(failing=0.05)),
    "too small a batch for all the traffic": (World(rate=12), SimulatedServer(batch=12)),
}


class SimulatedTarget:
    """See ``stages.rollout.target``: what a rollout that is being observed asks for."""

    name = LOCAL

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def split(self) -> Split:
        return Split("stable", "canary", self.simulation.percent)

    def url(self, release: str) -> str:
        return release

    def prepare(self, release: str, percent: int) -> str:  # noqa: ARG002
        return ""

    def shift(self, release: str, percent: int) -> None:  # noqa: ARG002
        self.simulation.percent, self.simulation.copied = percent, 0

    def copy(self, release: str, percent: int) -> None:  # noqa: ARG002
        self.simulation.percent, self.simulation.copied = 0, percent

    def copies(self, release: str) -> list[CopiedRequest]:  # noqa: ARG002
        return self.simulation.copies()

    def counters(self, release: str) -> Counters:
        return self.simulation.servers[release].counters()


class SimulatedObserver(Observer):
    def __init__(self, rollout: SimulatedRollout) -> None:
        super().__init__(rollout.store, rollout.target, rollout.journal, rollout._elapsed_s)
        self.simulation = rollout.simulation

    def slo(self) -> Slo:
        return SLO

    def send(self, urls: Sequence[str], names: Sequence[str], tokens: int) -> list[tuple[Timing, ...]]:  # noqa: ARG002
        settings = self.journal.settings
        return self.simulation.pairs(len(names), tokens, SENT_WITHIN * settings.poll_s, settings.own_timeout_s)


class SimulatedRollout(StateMachine):
    """The state machine on the simulation's clock, with its journal in memory."""

    def __init__(self, simulation: Simulation, journal: Journal) -> None:
        target = cast(Target, SimulatedTarget(simulation))
        super().__init__(ModelStore(Path("/nonexistent"), "org/name"), target, journal)
        self.simulation = simulation

    def _now(self) -> datetime:
        return moment(self.simulation.now_s)

    def _sleep(self, seconds: float) -> None:
        self.simulation.advance(self.simulation.now_s + seconds)

    def _write(self, journal: Journal) -> None:
        self.journal = journal

    def _say(self, line: str) -> None:
        pass

    def _observer(self) -> Observer:
        return SimulatedObserver(self)


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def rollout(
    world: World, canary: SimulatedServer, seed: Sequence[int], settings: Rollout = SETTINGS
) -> tuple[Journal, float]:
    """Run a rollout. Returns its journal at its end, before the promotion or the rollback, and its seconds."""
    simulation = Simulation(world, canary, seed)
    simulation.advance(WARM_S)
    now = moment(simulation.now_s)
    journal = Journal(
        id="simulated",
        kind="rollout",
        release="canary",
        stable="stable",
        before="stable",
        target=LOCAL,
        run=None,
        settings=settings,
        steps=((0,) if settings.mirror else ()) + settings.steps,
        state="shifting",
        started_at=now,
        entered_at=now,
    )
    machine = SimulatedRollout(simulation, journal)
    while machine.journal.state in ("shifting", "observing"):
        machine.work()
    return machine.journal, simulation.now_s - WARM_S


@dataclass(frozen=True)
class VerdictShares:
    """The rollouts of a row."""

    rolled_back: float
    """Share of all."""
    unclear: float
    """Share of all that went back because the time of a step was over."""
    good_s: float
    """Median seconds of those that were promoted, or 0."""
    bad_s: float
    """Median seconds of those that were rolled back, or 0."""
    slowest_s: float
    """The longest of these."""
    unseen: float
    """Share of all that were rolled back before any client was sent to the canary."""


def tally(name: str, world: World, canary: SimulatedServer, runs: int, settings: Rollout = SETTINGS) -> VerdictShares:
    ended = [rollout(world, canary, [number, *name.encode()], settings) for number in range(runs)]
    back = [(journal.reason, seconds) for journal, seconds in ended if journal.state == "rolling back"]
    good_s = [seconds for journal, seconds in ended if journal.state == "promoting"]
    return VerdictShares(
        rolled_back=len(back) / runs,
        unclear=sum("nothing showed" in reason for reason, _ in back) / runs,
        good_s=median(good_s or [0.0]),
        bad_s=median([seconds for _, seconds in back] or [0.0]),
        slowest_s=max((seconds for _, seconds in back), default=0.0),
        unseen=sum(journal.state == "rolling back" and not journal.observed for journal, _ in ended) / runs
        if settings.mirror
        else 0.0,
    )


def table(runs: int, only: str = "") -> Iterator[str]:
    """Yield the rows of two Markdown tables.

    Args:
        only: a part of the names of the rows.
    """
    yield "| identical releases | rolled back | unclear | promoted after (median) |"
    yield "| --- " * 4 + "|"
    for name, world in IDENTICAL.items():
        if only in name:
            row = tally(name, world, SOUND, runs)
            yield f"| {name} | {row.rolled_back:.1%} | {row.unclear:.1%} | {row.good_s:.0f} s |"
    yield ""
    yield "| canary | rolled back | unclear | after (median, longest) |"
    yield "| --- " * 4 + "|"
    for name, (world, canary) in WORSE.items():
        if only in name:
            row = tally(name, world, canary, runs)
            times = f"{row.bad_s:.0f} s, {row.slowest_s:.0f} s"
            yield f"| {name} | {row.rolled_back:.1%} | {row.unclear:.1%} | {times} |"
    yield ""
    yield "| with copies first | rolled back | unclear | before any client | after (median) |"
    yield "| --- " * 5 + "|"
    for name, (world, canary) in [*((name, (world, SOUND)) for name, world in IDENTICAL.items()), *WORSE.items()]:
        if only in name:
            row = tally(name, world, canary, runs, MIRRORED)
            shares = f"{row.rolled_back:.1%} | {row.unclear:.1%} | {row.unseen:.1%}"
            yield f"| {name} | {shares} | {row.bad_s if canary != SOUND else row.good_s:.0f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=RUNS, help="rollouts of each row")
    parser.add_argument("--only", default="", help="the rows whose name contains this")
    arguments = parser.parse_args()
    began = time.monotonic()
    for line in table(arguments.runs, arguments.only):
        print(line, flush=True)
    print(f"\n{arguments.runs} rollouts a row, {(time.monotonic() - began) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
