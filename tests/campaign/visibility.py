"""Two hosts on one store, each of which sees late what the other one does: see ``hosts``.

A host *looks* at every path that will ever be there, so that it knows what is there and what is not, before the other
host changes it; then the first one acts at once.
"""

from __future__ import annotations

import os
import random
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pipeline.local.folder import LOCK, opened, read_run
from pipeline.runs.state import RunState
from stages.parts.base.errors import Busy, NothingToServe
from stages.parts.base.files import holder
from stages.parts.endpoint import clients
from stages.parts.endpoint.endpoint import supervising, supervisor
from stages.parts.releases.release import CANDIDATE, current_release, history
from tests.campaign import steps
from tests.campaign.hosts import mounted_twice
from tests.campaign.kills import Known
from tests.campaign.steps import Hub, Place, Step
from tests.samples import MODEL

LATE_S: Final = 60.0
"""Longer than anything here takes: what a host does not ask for, it does not hear of."""
LATE: Final = (0.3, 1.0, 3.0, LATE_S)
TRIALS: Final = 12
"""Of each kind, before the volume is mounted anew."""
OTHER_RUN: Final = "run-of-b"
RUN: Final = "run-9"


@dataclass
class Hosts:
    """Two hosts, and the volume itself."""

    a: Place
    b: Place
    volume: Place
    roots: tuple[Path, Path, Path]
    stores: int = 0
    paths: set[Path] = field(default_factory=set)
    """All that was ever in a store of a model, in its folder."""

    def take(self, store: Path) -> None:
        """Let the hosts have a copy of a store, and nothing else."""
        self.stores += 1
        name = f"store-{self.stores}"
        steps.copy(store, self.roots[2] / name)
        for place, root in zip((self.a, self.b, self.volume), self.roots, strict=True):
            (place.folder / "store").unlink(missing_ok=True)
            (place.folder / "store").symlink_to(root / name)

    def look(self, *places: Place) -> None:
        """Let hosts know of each path whether it is there."""
        for place in places:
            for path in sorted(self.paths):
                with suppress(OSError):
                    (place.store.path / path).stat()
                with suppress(OSError):
                    (place.store.path / path).readlink()


@contextmanager
def two_hosts(folder: Path, hub: Hub, known: list[Known], seconds: float = LATE_S) -> Iterator[Hosts]:
    with mounted_twice(folder / "volume", seconds) as mounts:
        a, b, volume = (Place(folder / name, hub) for name in ("host-a", "host-b", "itself"))
        for place in (a, b, volume):
            place.folder.mkdir()
        hosts = Hosts(a, b, volume, (*mounts, folder / "volume"))
        for each in known:
            for store in each.before.glob("*--*"):
                hosts.paths |= {path.relative_to(store) for path in store.rglob("*")}
            hosts.paths |= {Path(path) for path in each.after}
        yield hosts


def ended(name: str, status: int, printed: str, *others: int) -> list[str]:
    """What is wrong with how a program ended: with none of these statuses, or with an error that is not ours."""
    well = status in (0, *others) and "Traceback" not in printed
    return [] if well else [f"{name} ended with {status}: {printed[-900:]}"]


def wrong_on(hosts: Hosts, known: Known) -> list[str]:
    """What is wrong with the store itself after a step."""
    different = steps.differences(steps.but_for_aside(hosts.volume.store), steps.without_aside(known.after))
    return steps.faults(hosts.volume.store) + different


def relayed(hosts: Hosts, known: list[Known]) -> Iterator[tuple[str, list[str]]]:
    """Let the hosts take turns, each one step right after the other's. Yields each step with what is wrong."""
    hosts.take(known[0].before)
    here, there = hosts.a, hosts.b
    for each in known:
        hosts.look(there)
        yield each.step.name, ended(each.step.name, *here.run(each.step)) + wrong_on(hosts, each)
        here, there = there, here


def at_once(hosts: Hosts, known: Known) -> list[str]:
    """Let both hosts do a step at the same time, each for a run of its own. Returns what is wrong."""
    hosts.take(known.before)
    run = hosts.volume.store.run(known.step.run)
    if run.exists():
        steps.copy(run, run.with_name(OTHER_RUN))
    hosts.look(hosts.a, hosts.b)
    processes = [hosts.a.start(known.step), hosts.b.start(known.step._replace(run=OTHER_RUN))]
    printed = [process.communicate(timeout=steps.TIMEOUT_S)[0] for process in processes]
    wrong = [
        line
        for host, process, text in zip("ab", processes, printed, strict=True)
        for line in ended(f"{known.step.name} on {host}", process.returncode, text)
    ]
    return wrong + wrong_on(hosts, known)


def read_meanwhile(hosts: Hosts, known: Known) -> tuple[int, list[str]]:
    """Read the store on one host while the other one does a step. Returns how often, and what was wrong."""
    hosts.take(known.before)
    hosts.look(hosts.b)
    wrong, looks, is_over = list[str](), 0, threading.Event()

    def read() -> None:
        nonlocal looks
        while not is_over.is_set():
            try:
                seen = steps.faults(hosts.b.store)
            except Exception as error:
                seen = ["".join(traceback.format_exception(error)[-6:])]
            wrong.extend(f"while {known.step.name}: {each}" for each in seen)
            looks += 1

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wrong += ended(known.step.name, *hosts.a.run(known.step))
    finally:
        is_over.set()
        reader.join()
    return looks, wrong + steps.faults(hosts.b.store)


def command(*arguments: str) -> Step:
    return Step(" ".join(arguments), "pipeline", (*arguments, "--store", "."))


BACK: Final = command("rollback", MODEL)
PRUNE: Final = command("store", "prune", MODEL, "--keep", "1")
UPKEEP: Final = (
    PRUNE,
    command("store", "prune", MODEL, "--keep", "1", "--others", "--older", "0m"),
    command("store", "check", MODEL),
    command("store", "du"),
    command("releases", MODEL),
    command("store", "backup", "BACKUP"),
    BACK,
)
"""What a person does on one host while the other one works."""


def beside(hosts: Hosts, known: Known, done: Step, draw: random.Random) -> list[str]:
    """Do a step on one host, and something else on the other at the same time, a little before or after. Returns what
    is wrong."""
    hosts.take(known.before)
    hosts.look(hosts.a, hosts.b)
    backup = str(hosts.b.folder / f"backup-{hosts.stores}")
    done = done._replace(arguments=tuple(backup if each == "BACKUP" else each for each in done.arguments))
    first, second = draw.sample([(hosts.a, known.step), (hosts.b, done)], 2)
    process = first[0].start(first[1])
    with suppress(subprocess.TimeoutExpired):
        process.wait(draw.uniform(0, 1.2 * known.seconds))
    status, printed = second[0].run(second[1])
    printed_first = process.communicate(timeout=steps.TIMEOUT_S)[0]
    in_turn = [(first[1], process.returncode, printed_first), (second[1], status, printed)]
    refused = Busy.exit_code, NothingToServe.exit_code  # of two that go back, the second may have nowhere to go
    return [
        line for step, status, printed in in_turn for line in ended(step.name, status, printed, *refused)
    ] + steps.faults(hosts.volume.store)


def prune_after_rollback(hosts: Hosts, known: Mapping[str, Known]) -> list[str]:
    """Of three releases A goes back to the first, and B removes all that is not in use."""
    hosts.take(known["go back"].before)
    publish = known["publish"].step._replace(run="run-3")
    for step in (known["measure"].step._replace(run="run-3"), publish):
        assert hosts.volume.run(step)[0] == 0, step.name
    hosts.look(hosts.b)
    wrong = ended("rollback", *hosts.a.run(command("rollback", MODEL, "--to", "1")))
    return wrong + ended("prune", *hosts.b.run(PRUNE)) + steps.faults(hosts.volume.store)


def rollback_after_publish(hosts: Hosts, known: Mapping[str, Known]) -> list[str]:
    """A publishes another release, and B goes back from it."""
    hosts.take(known["publish another"].before)
    first = current_release(hosts.volume.store)
    hosts.look(hosts.b)
    wrong = ended("publish", *hosts.a.run(known["publish another"].step)) + ended("rollback", *hosts.b.run(BACK))
    moves = [move.kind for move in history(hosts.volume.store)]
    if (current_release(hosts.volume.store), moves) != (first, ["publish", "publish", "rollback"]):
        wrong.append(f"{current_release(hosts.volume.store)} is in production after {moves}")
    return wrong + steps.faults(hosts.volume.store)


def clients_of_both(hosts: Hosts, known: Mapping[str, Known]) -> list[str]:
    """Both hosts let a client in."""
    hosts.take(known["acquire"].before)
    root = hosts.b.store.root
    assert clients.read_clients(root) is None
    clients.add(hosts.a.store.root, clients.unlimited("first"))
    clients.add(root, clients.unlimited("second"))
    names = sorted(client.name for client in clients.read_clients(hosts.volume.store.root).clients)
    return [f"of two clients there are {names}"] if names != ["first", "second"] else []


def locked_elsewhere(hosts: Hosts, known: Mapping[str, Known]) -> list[str]:
    """B looks for a run and an endpoint, which A begins, and looks again."""
    hosts.take(known["make fp16"].before)
    state = RunState(name=RUN, workflow="", phase="Running", arguments={}, nodes=[], started_at=datetime.now(UTC))
    run, store = hosts.b.store.run(RUN), hosts.b.store
    run.mkdir(parents=True)
    assert (holder(run / LOCK), supervisor(store), supervisor(hosts.a.store)) == (None, None, None)
    with opened(hosts.a.store.run(RUN), {}, state), supervising(hosts.a.store):
        seen = read_run(run).phase, supervisor(store)
    return [f"a run and an endpoint of A are {seen}"] if seen != ("Running", os.getpid()) else []


def taken_up(hosts: Hosts, known: Mapping[str, Known]) -> list[str]:
    """A puts a variant aside, and B takes it up again."""
    hosts.take(known["put aside"].before)
    hosts.look(hosts.b)
    wrong = [
        line for name in ("put aside", "acquire the first") for line in ended(name, *hosts.a.run(known[name].step))
    ]
    status, printed = hosts.b.run(known["take up"].step)
    made = [] if "reused: " in printed else [f"it was made again: {printed[-300:]}"]
    return wrong + ended("take up", status, printed) + made


def removed_aside(hosts: Hosts, known: Mapping[str, Known]) -> list[str]:
    """A removes what was put aside, and B wants it."""
    hosts.take(known["take up"].before)
    hosts.look(hosts.b)
    wrong = ended("prune", *hosts.a.run(command("store", "prune", MODEL, "--others")))
    return wrong + ended("take up", *hosts.b.run(known["take up"].step)) + wrong_on(hosts, known["take up"])


def checked_after_publish(hosts: Hosts, known: Mapping[str, Known]) -> list[str]:
    """A publishes a release that waits for its rollout, and B checks the store."""
    hosts.take(known["publish"].before)
    hosts.look(hosts.b)
    wrong = ended("publish", *hosts.a.run(known["publish"].step))
    hosts.volume.store.production.rename(hosts.volume.store.path / CANDIDATE)
    return wrong + ended("check", *hosts.b.run(command("store", "check", MODEL)))


SCENES: Final[Mapping[str, Callable[[Hosts, Mapping[str, Known]], list[str]]]] = {
    "prune after a rollback": prune_after_rollback,
    "rollback after a publication": rollback_after_publish,
    "clients from both hosts": clients_of_both,
    "a run and an endpoint": locked_elsewhere,
    "check after a publication": checked_after_publish,
    "a variant that was put aside": taken_up,
    "a variant that was removed aside": removed_aside,
}


def drawn(hosts: Hosts, known: Mapping[str, Known], draw: random.Random) -> Iterator[tuple[str, str, list[str]]]:
    """Do all of it once, in a random order. Yields what was done, with which step, and what was wrong."""
    changing = [each for each in known.values() if each.step.killed]
    yield from (("in turns", name, wrong) for name, wrong in relayed(hosts, [*known.values()]))
    for name in draw.sample([*SCENES], len(SCENES)):
        yield "one after the other", name, SCENES[name](hosts, known)
    for each in draw.choices([each for each in changing if each.step.repeats], k=TRIALS):
        yield "the same at once", each.step.name, at_once(hosts, each)
    for each in draw.choices(changing[1:], k=TRIALS):
        done = draw.choice(UPKEEP)
        yield "something else at once", f"{each.step.name} and {done.name}", beside(hosts, each, done, draw)
    for each in draw.choices(changing, k=TRIALS):
        yield "read meanwhile", each.step.name, read_meanwhile(hosts, each)[1]
