"""A GPU with room for one server: the next release replaces the served one, which returns if the next one fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.parts.base.files import exclusive
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import WANTED, Endpoint, Wanted, endpoint
from stages.parts.records.rollout import LOCK
from stages.parts.releases.release import METRICS, history
from stages.parts.vllm.client import answer
from tests.samples import engine
from tests.serving import (
    MODEL,
    REPOSITORY,
    ROLLOUT,
    SERVING,
    WAIT_S,
    Said,
    arguments_of,
    environment,
    living,
    one_gpu,
    processes_with,
    publish,
    stage,
    stand_in_variant,
    wait_until,
)


class Machine:
    def __init__(self, folder: Path) -> None:
        self.store = ModelStore(folder / "store", MODEL)
        self.variables = environment(self.store) | one_gpu(folder / "machine")

    def release(self, number: int, **behaviour: Any) -> str:
        return publish(self.store, number, stand_in_variant(self.store, f"fp16-{number}", number=number, **behaviour))

    def serve(self, *arguments: str) -> Said:
        flags = ["--serving", json.dumps(SERVING), "--rollout", json.dumps(ROLLOUT), *arguments]
        return stage("serve", *flags, variables=self.variables)

    def rollout(self, *arguments: str) -> Said:
        flags = ["--serving", json.dumps(SERVING), "--settings", json.dumps(ROLLOUT), *arguments]
        return stage("rollout", *flags, variables=self.variables)

    def slipway(self, *arguments: str) -> Said:
        command = [sys.executable, "-m", "pipeline", *arguments, "--store", str(self.store.root)]
        command += ["--set", "rollout.poll_s=0.1"]
        return subprocess.run(command, cwd=REPOSITORY, env=self.variables, capture_output=True, text=True, check=False)

    def endpoint(self) -> Endpoint:
        """The endpoint, which answers and serves only one release."""
        found, wanted = endpoint(self.store), Wanted.read(self.store.path / WANTED)
        assert found
        assert wanted
        assert answer(found.url, MODEL) == "!"
        assert wanted.releases() == [found.release]
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    made.serve("--stop")
    assert not living(processes_with(str(made.store.releases))), "a server is left"


def test_the_next_release_takes_the_place_of_the_served_one(machine: Machine) -> None:
    machine.release(1)
    assert machine.serve().returncode == 0
    new = machine.release(2)
    said = machine.serve()
    assert said.returncode == 0, said.stderr
    assert "two servers do not fit on the GPU" in said.stderr
    assert machine.endpoint().release == new
    assert (Wanted.read(machine.store.path / WANTED) or Wanted(stable="")).replaced is None


def test_a_release_that_does_not_come_up_leaves_the_served_one(machine: Machine) -> None:
    old = machine.release(1)
    assert machine.serve().returncode == 0
    new = machine.release(2, refuses="out of kernels")
    said = machine.serve()
    assert said.returncode == 43
    assert f"{old} is served again as before" in said.stderr
    assert f"see {machine.store.path / 'serving' / new}.log" in said.stderr
    assert machine.endpoint().release == old


def test_an_interruption_while_the_next_release_loads_brings_the_former_one_back(machine: Machine) -> None:
    old = machine.release(1)
    assert machine.serve().returncode == 0
    new = machine.release(2, never_ready=True)
    command = [sys.executable, "-m", "stages.serve", "--model", MODEL, "--serving", json.dumps(SERVING)]
    with subprocess.Popen(command, env=machine.variables) as process:
        loading = wait_until(lambda: processes_with(str(machine.store.releases / new)), "the new release's server")
        process.terminate()
        assert process.wait(WAIT_S) == 143
    assert not living(loading)
    assert machine.endpoint().release == old
    assert machine.rollout("--abort").returncode == 0
    assert machine.endpoint().release == old


def test_a_refused_rollout_leaves_the_served_release_alone(machine: Machine) -> None:
    machine.release(1)
    assert machine.serve().returncode == 0
    before = machine.endpoint()
    machine.release(2)
    with exclusive(machine.store.lock(LOCK), "the rollout"):
        assert machine.serve().returncode == 75
    assert machine.endpoint() == before


def test_a_rollout_that_is_interrupted_can_be_given_up_and_no_other_begins_meanwhile(machine: Machine) -> None:
    old = machine.release(1)
    assert machine.serve().returncode == 0
    new = machine.release(2)
    said = machine.rollout("--step", "deploy")
    assert said.returncode == 0, said.stderr
    tried = machine.endpoint()
    assert tried.release == new
    machine.release(3)
    other = machine.serve()
    assert other.returncode == 42
    assert f"the rollout of {new} is under way" in other.stderr
    assert machine.endpoint() == tried
    given_up = machine.rollout("--abort")
    assert given_up.returncode == 0, given_up.stderr
    assert machine.endpoint().release == old


def test_a_rollback_replaces_the_bad_release_or_leaves_it_if_it_fails(machine: Machine) -> None:
    old = machine.release(1)
    assert machine.serve().returncode == 0
    broken, bad = machine.release(2, refuses="out of kernels"), machine.release(3)
    assert machine.serve().returncode == 0
    failed = machine.slipway("rollback", MODEL, "--to", "2")
    assert failed.returncode == 43
    assert f"{bad} is served again as before" in failed.stderr
    assert machine.endpoint().release == bad
    said = machine.slipway("rollback", MODEL, "--to", "1")
    assert (said.returncode, said.stdout) == (0, f"{old} is in production\n"), said.stderr
    assert machine.endpoint().release == old
    moves = [(each.kind, each.release, each.result) for each in history(machine.store)]
    assert moves[-2:] == [("rollback", broken, "rolled back"), ("rollback", old, "promoted")]


def test_each_release_is_served_on_as_many_gpus_as_it_was_measured_on(machine: Machine) -> None:
    old = machine.release(1)
    measured_on(machine, old, 2)
    assert machine.serve().returncode == 0
    assert gpus_of(machine, old) == "2"
    new = machine.release(2)
    measured_on(machine, new, 1, recipe="tp1")
    said = machine.serve()
    assert said.returncode == 0, said.stderr
    assert "restarting the served release" not in said.stderr
    assert (machine.endpoint().release, gpus_of(machine, new)) == (new, "1")
    back = machine.slipway("rollback", MODEL, "--to", "1")
    assert back.returncode == 0, back.stderr
    assert (machine.endpoint().release, gpus_of(machine, old)) == (old, "2")


def measured_on(machine: Machine, release: str, gpus: int, recipe: str = "") -> None:
    """Write what the release was measured with: on so many GPUs, by a recipe if it has a name."""
    arguments = ["--tensor-parallel-size", str(gpus)] if gpus > 1 else []
    measured = {"engine": engine(None).model_dump(mode="json") | {"arguments": arguments}}
    if recipe:
        measured["recipe"] = {"description": recipe, "tensor_parallel_size": gpus}
    (machine.store.releases / release / METRICS).write_text(json.dumps(measured))


def gpus_of(machine: Machine, release: str) -> str:
    """What the release's server was told; 1 if it was told nothing."""
    (server, *_) = (
        found
        for each in living(processes_with(str(machine.store.releases / release)))
        if "serve" in (found := arguments_of(each))
    )
    name = "--tensor-parallel-size"
    return server[server.index(name) + 1] if name in server else "1"
