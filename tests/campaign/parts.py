"""The parts of the campaign: each disturbs for a while and returns a table of what it did and what was wrong."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from stages.parts.base.errors import SlipwayError
from tests.campaign import faults, hosts, kills, power, rollouts, steps, visibility
from tests.campaign.steps import Place

EACH_CALL: Final = 0.8
"""The share of the kills of single programs that are at a call; the others are at random times."""
RECOVERED: Final = 0.02
"""The share of the states after a loss of power in which everything is also run again."""


@dataclass
class Result:
    """What a part did."""

    rows: Counter[str] = field(default_factory=Counter)
    """How often, by what."""
    wrong: list[str] = field(default_factory=list)

    def add(self, what: str, where: str, wrong: list[str]) -> None:
        self.rows[what] += 1
        self.wrong += [f"{where}: {each}" for each in wrong]
        if wrong:
            print(f"wrong: {where}", *wrong[:5], sep="\n    ", flush=True)


Part = Callable[[Path, random.Random, float], Result]
"""A part: its folder, its draws, and when it has to end, by ``time.monotonic``."""


def programs(folder: Path, draw: random.Random, until_s: float) -> Result:
    """Kill programs at each call that changes the store, in a random order, and at random times."""
    result = Result()
    with steps.hub() as hub:
        known = kills.undisturbed(folder, hub)
        every, place = kills.each_call(known), Place(folder / "killed", hub)
        draw.shuffle(every)
        result.rows["calls to kill at"] = len(every)
        while time.monotonic() < until_s:
            kill = every.pop() if every and draw.random() < EACH_CALL else kills.at_random(known, draw)
            was_killed, wrong = kills.killed(kill, place)
            if was_killed or wrong:
                what = "at a call" if kill.number else "at a random time"
                result.add(f"programs, {kill.signal.name} {what}", str(kill), wrong)
    return result


def engine(folder: Path, draw: random.Random, until_s: float) -> Result:
    """Kill runs of the engine, up to three in a row, then let one end."""
    result = Result()
    with steps.hub() as hub:
        for victim, wrong in kills.chains(kills.Engine(folder / "engine", hub), draw):
            result.add(f"runs, {victim} killed" if victim else "runs, let end", victim, wrong)
            if not victim and time.monotonic() > until_s:
                return result
    return result


def losses_of_power(folder: Path, draw: random.Random, until_s: float) -> Result:
    """Fail the power after each call of each step, again and again with other draws."""
    result = Result()
    with steps.hub() as hub:
        known = kills.undisturbed(folder, hub, ("fp16",))
        place = Place(folder / "left", hub)
        while True:
            for each in (each for each in known if each.step.killed):
                for failure in power.failures(each, folder / "undisturbed" / "store", place.store.root, draw):
                    wrong = power.wrong_after(each, place)
                    if failure.at_the_end:
                        wrong += power.lost_at_the_end(each, place)
                    result.add("states after a loss of power", failure.after, wrong)
                    if draw.random() < RECOVERED and each.seconds < 1:
                        steps.age(place.store)
                        wrong = place.again(each.step, each.after)
                        result.add("states after which it was run again", failure.after, wrong)
                    if time.monotonic() > until_s:
                        return result


def all_faults(folder: Path, draw: random.Random, until_s: float) -> Result:
    """Let the disk fail at calls and on a small one, and the Hub while it is asked."""
    result = Result()
    with steps.hub() as hub, faults.small_disk(folder / "disk") as change:
        known, place = kills.undisturbed(folder, hub), Place(folder / "failed", hub)
        killed = [each for each in known if each.step.killed]
        every = faults.every_call(known)
        draw.shuffle(every)
        result.rows["calls to fail at"] = len(every)
        small = Place(folder / "small", hub)
        small.folder.mkdir()
        (small.folder / "store").symlink_to(folder / "disk" / "store")
        if change is None:
            print("nobody may mount a disk here: none is too small or read-only as a whole", flush=True)
        while time.monotonic() < until_s:
            drawn = draw.random()
            if every and drawn < EACH_CALL:
                each, kind, number = every.pop()
                what, wrong = f"disk {kind} at a call", faults.at_a_call(each, place, kind, number)
            elif change and drawn < (1 + EACH_CALL) / 2:
                each, room = draw.choice(killed), draw.choice((None, draw.random(), draw.random()))
                what = "a disk that is too small" if room else "a disk that can't be written to"
                wrong = faults.on_a_small_disk(each, small, change, room)
            else:
                each = draw.choice([each for each in killed if each.step.module == "stages.acquire"])
                kind = draw.choice([*faults.HUB])
                what, wrong = f"Hub: answers {kind}", faults.of_the_hub(each, place, kind, draw)
            result.add(what, f"{each.step.name}, {what}", wrong)
    return result


def in_rollouts(folder: Path, draw: random.Random, until_s: float) -> Result:
    """Kill what takes part in rollouts, under load."""
    result, seen = Result(), dict[str, rollouts.Losses]()
    with rollouts.machine(folder) as place:
        for victim, state in rollouts.kinds(draw):
            if time.monotonic() > until_s:
                break
            losses = seen.setdefault(victim, rollouts.Losses())
            before = losses.kills
            try:
                wrong = rollouts.kill_in_rollout(place, victim, state, draw, losses)
            except (AssertionError, SlipwayError) as error:
                wrong = [f"{type(error).__name__}: {error}"]
            if losses.kills > before or wrong:
                result.add(f"rollouts, {victim} killed", f"{victim} while {state}", wrong)
    for victim, losses in seen.items():
        print(
            f"{victim}: {losses.kills} kills, {losses.requests} requests, {losses.cut} answers cut off, "
            f"{losses.refused} not answered, longest without an answer {max(losses.silent_s, default=0):.1f} s"
        )
    return result


def of_two_hosts(folder: Path, draw: random.Random, until_s: float) -> Result:
    """Let two hosts with caches of their own work on one volume, in turns and at once."""
    result = Result()
    if why := hosts.why_not():
        print(f"no two hosts: {why}", flush=True)
        return result
    with steps.hub() as hub:
        known = kills.undisturbed(folder, hub, ("fp16",))
        by_name, number = {each.step.name: each for each in known}, 0
        while time.monotonic() < until_s:
            number, seconds = number + 1, draw.choice(visibility.LATE)
            with visibility.two_hosts(folder / f"hosts-{number}", hub, known, seconds) as two:
                for what, where, wrong in visibility.drawn(two, by_name, draw):
                    result.add(f"hosts, {what}", f"{where}, late by {seconds:g} s", wrong)
                    if time.monotonic() > until_s:
                        break
    return result


PARTS: Final[Mapping[str, Part]] = {
    "programs": programs,
    "runs": engine,
    "power": losses_of_power,
    "faults": all_faults,
    "rollouts": in_rollouts,
    "visibility": of_two_hosts,
}


def table(results: Mapping[str, Result]) -> Iterator[str]:
    for result in results.values():
        yield from (f"{what:48} {count:>8,}" for what, count in sorted(result.rows.items()))
    yield f"{'wrong':48} {sum(len(result.wrong) for result in results.values()):>8,}"
