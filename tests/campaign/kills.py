"""Kills of a run: of its programs before each call that changes the store and at random, of its engine, and of all."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from stages.parts.base.program import OUTPUTS_VARIABLE, RUN_VARIABLE
from stages.parts.base.store import STORE_VARIABLE
from tests.campaign import steps
from tests.campaign.calls import Call
from tests.campaign.steps import Hub, Place, Step
from tests.pipeline.local.local_bench import DRIVER, STORE
from tests.serving import living

KILLED: Final = {signal.SIGKILL: (-signal.SIGKILL,), signal.SIGTERM: (143, 130, -signal.SIGTERM)}
"""The exit status of a program that ended by the signal: a stage's, a command's, and before there is a handler."""
OUTPUTS: Final = "/outputs"
SLOW_S: Final = 3.0
IN_A_ROW: Final = 3
"""The most kills of a store's runs before one of them may end."""
OVER_S: Final = 60


@dataclass(frozen=True)
class Known:
    """A step, undisturbed: the store before it, its calls, how long it took, and what mattered after it."""

    step: Step
    before: Path
    calls: list[Call]
    seconds: float
    after: dict[str, str]


def undisturbed(folder: Path, hub: Hub, variants: tuple[str, ...] = ("fp16", "int8")) -> list[Known]:
    """Do everything once, in a store of its own."""
    place, known = Place(folder / "undisturbed", hub), []
    for number, step in enumerate(steps.steps(hub, variants)):
        before = folder / f"before-{number}"
        place.store.root.mkdir(parents=True, exist_ok=True)
        steps.copy(place.store.root, before)
        kept, started = folder / "calls", time.monotonic()
        status, printed = place.run(step, f"keep:{kept}")
        assert status == 0, f"{step.name}: {printed}"
        calls = [Call(*each) for each in pickle.loads(kept.read_bytes())]  # noqa: S301 - our own
        assert steps.faults(place.store) == [], step.name
        after = steps.what_matters(place.store)
        known.append(Known(step, before, calls, time.monotonic() - started, after))
    return known


@dataclass(frozen=True)
class Kill:
    """One kill of a step's program: before its call of that number, or after so many seconds."""

    known: Known
    number: int
    signal: signal.Signals
    after_s: float = 0.0

    def __str__(self) -> str:
        calls = self.known.calls
        call = (
            f"{calls[self.number - 1].kind} {self.number}" if 0 < self.number <= len(calls) else f"{self.after_s:.3f} s"
        )
        return f"{self.known.step.name}, {self.signal.name} at {call}"


def each_call(known: list[Known]) -> list[Kill]:
    """Every call of every step with SIGKILL, and every third with SIGTERM, too; of slow steps every fifth of these."""
    return [
        Kill(each, number, kind)
        for each in known
        if each.step.killed
        for number in range(1, len(each.calls) + 1)
        for kind in (signal.SIGKILL, signal.SIGTERM)
        if (kind == signal.SIGKILL or number % 3 == 0) and (each.seconds < SLOW_S or number % 5 == 0)
    ]


def at_random(known: list[Known], draw: random.Random) -> Kill:
    step = draw.choice([each for each in known if each.step.killed and each.seconds < SLOW_S])
    return Kill(step, 0, draw.choice([*KILLED]), draw.uniform(0, step.seconds))


def killed(kill: Kill, place: Place) -> tuple[bool, list[str]]:
    """Kill, look, run again. Returns whether it was killed, and what is wrong."""
    step, store = kill.known.step, place.store
    steps.copy(kill.known.before, store.root)
    if kill.number:
        status, printed = place.run(step, f"kill:{kill.number}:{kill.signal}")
    else:
        with place.start(step) as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(kill.after_s)
            process.send_signal(kill.signal)
            printed = process.communicate(timeout=steps.TIMEOUT_S)[0]
        status = process.returncode
    if status == 0:
        return False, []
    wrong = [] if status in KILLED[kill.signal] else [f"it ended with {status}: {printed[-500:]}"]
    wrong += processes_left(place.folder) + steps.faults(store)
    steps.age(store)
    return True, wrong + place.again(step, kill.known.after)


def processes_left(folder: Path, timeout_s: float = OVER_S) -> list[str]:
    """Every process with this folder in its environment, once it has had time to end."""
    deadline = time.monotonic() + timeout_s
    while left := [process for process in psutil.process_iter() if in_folder(process.pid, folder)]:
        if time.monotonic() > deadline:
            return [f"a process is left: {process}" for process in living(left)]
        time.sleep(0.05)
    return []


def in_folder(pid: int, folder: Path) -> bool:
    with suppress(OSError):
        return pid != os.getpid() and f"{folder}/".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


# The engine


def workflow(hub: Hub) -> dict[str, Any]:
    """The steps to a first release, as the engine runs them."""
    tasks = [step for step in steps.steps(hub) if step.run == "run-1"]
    names = [step.name.replace(" ", "-") for step in tasks]
    after = {
        names[0]: "",
        names[1]: names[0],
        names[2]: names[0],
        names[3]: f"{names[1]} && {names[2]}",
        names[4]: names[3],
    }
    volumes = [{"name": "store", "persistentVolumeClaim": {"claimName": "store"}}, {"name": "outputs", "emptyDir": {}}]
    mounts = [{"name": "store", "mountPath": STORE}, {"name": "outputs", "mountPath": OUTPUTS}]
    variables = {STORE_VARIABLE: STORE, OUTPUTS_VARIABLE: OUTPUTS, RUN_VARIABLE: "{{workflow.name}}"}
    env = [{"name": name, "value": value} for name, value in variables.items()]
    dag = [{"name": name, "template": name, **({"depends": of} if of else {})} for name, of in after.items()]
    programs = [
        {
            "name": name,
            "container": {"image": "none", "command": ["python", "-m", step.module], "args": [*step.arguments]}
            | {"env": env, "volumeMounts": mounts},
        }
        for name, step in zip(names, tasks, strict=True)
    ]
    templates = [{"name": "main", "dag": {"failFast": False, "tasks": dag}}, *programs]
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "WorkflowTemplate",
        "metadata": {"name": "campaign"},
        "spec": {"entrypoint": "main", "volumes": volumes, "templates": templates},
    }


class Engine:
    """Runs that workflow in one store, one run after the other."""

    def __init__(self, folder: Path, hub: Hub) -> None:
        self.place, self.runs = Place(folder, hub), 0
        folder.mkdir(parents=True)
        self.manifest = folder / "workflow.json"
        self.manifest.write_text(json.dumps(workflow(hub)))

    def start(self) -> subprocess.Popen[str]:
        self.runs += 1
        store = self.place.store
        store.root.mkdir(exist_ok=True)
        environment = self.place.environment("")
        for name in (STORE_VARIABLE, OUTPUTS_VARIABLE, RUN_VARIABLE):
            del environment[name]
        places = [self.manifest, store.root, store.run(f"run-{self.runs}"), store.root / ".engine"]
        return subprocess.Popen(
            [sys.executable, str(DRIVER), *map(str, places)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def to_its_end(self) -> list[str]:
        with self.start() as process:
            printed = process.communicate(timeout=steps.TIMEOUT_S)[1]
        return [f"the run ended with {process.returncode}: {printed[-800:]}"] if process.returncode else []

    def reset(self) -> None:
        shutil.rmtree(self.place.store.root)


VICTIMS: Final = ("a stage", "a guard", "the engine", "the engine, asked to end", "everything at once")


def kill_in_run(engine: Engine, victim: str, after_s: float, draw: random.Random) -> tuple[bool, list[str]]:
    """Start a run and kill in it. Returns whether there was anything to kill, and what is wrong."""
    with engine.start() as process:
        with suppress(subprocess.TimeoutExpired):
            process.wait(after_s)
        if process.poll() is not None:
            process.communicate()
            return False, []
        root = psutil.Process(process.pid)
        below = root.children(recursive=True)
        guards = [each for each in below if each.ppid() == process.pid]
        stages = [each for each in below if each not in guards]
        chosen = {"a stage": stages, "a guard": guards}.get(victim, [root])
        chosen = [*below, root] if victim == "everything at once" else [draw.choice(chosen)] if chosen else []
        for each in chosen:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGTERM if victim.endswith("asked to end") else signal.SIGKILL)
        process.communicate(timeout=steps.TIMEOUT_S)
    return bool(chosen), processes_left(engine.place.folder) + steps.faults(engine.place.store)


def chains(engine: Engine, draw: random.Random) -> Iterator[tuple[str, list[str]]]:
    """Kill runs of a store in a row, then let one end, and compare; yields each kill with what was wrong, for ever."""
    assert engine.to_its_end() == []  # which takes longer than all others
    engine.reset()
    started = time.monotonic()
    assert engine.to_its_end() == []
    seconds, expected = time.monotonic() - started, steps.what_matters(engine.place.store)
    while True:
        engine.reset()
        for _ in range(draw.randint(1, IN_A_ROW)):
            victim = draw.choice(VICTIMS)
            was_killed, wrong = kill_in_run(engine, victim, draw.uniform(0.1, seconds), draw)
            if was_killed:
                yield victim, wrong
        steps.age(engine.place.store)
        wrong = engine.to_its_end() + steps.faults(engine.place.store)
        wrong += [f"left: {path}" for path in steps.unreferenced(engine.place.store)]
        yield "", wrong + steps.differences(steps.what_matters(engine.place.store), expected)
