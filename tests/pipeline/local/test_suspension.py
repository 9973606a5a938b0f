"""suspend templates: a run that waits for a time, or for a person."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hera.workflows import Suspend, Task, WorkflowTemplate

from pipeline.local.folder import read_run, resume
from pipeline.runs.state import RunState
from stages.parts.base.errors import ConfigError, MissingRun, UnknownName
from tests.pipeline.local.local_bench import Bench, dag, eventually


def approval(bench: Bench) -> WorkflowTemplate:
    with bench.workflow(on_exit="ending") as workflow:
        program = bench.program("say", "add('order', sys.argv[1])", inputs=["n"])
        program.args += ["{{inputs.parameters.n}}"]
        bench.handler("write('status', sys.argv[1])")
        Suspend(name="approve")
        with dag(name="main"):
            first = Task(name="canary", template=program, arguments={"n": "canary"})
            approve = Task(name="approval", template="approve")
            first >> approve >> Task(name="release", template=program, arguments={"n": "released"})
    return workflow


def suspended(run_dir: Path) -> RunState:
    def waits() -> bool:
        try:
            state = read_run(run_dir)
        except MissingRun:
            return False
        return state.message == "suspended at approval"

    eventually(waits, "the run is suspended")
    return read_run(run_dir)


def test_a_suspended_run_waits_until_it_is_resumed(bench: Bench) -> None:
    engine = bench.start(approval(bench))
    state = suspended(bench.run_dir)
    node = state.node("approval")
    assert (state.phase, node.phase, node.kind) == ("Running", "Running", "Suspend")
    assert node.message == "suspended; to continue: slipway resume run-1"
    assert bench.lines("order") == ["canary"]
    with pytest.raises(UnknownName, match="unknown suspended task 'release'"):
        resume(bench.run_dir, "release")
    assert resume(bench.run_dir) == ["approval"]
    assert engine.wait() == 0
    engine.communicate()
    state = read_run(bench.run_dir)
    assert (state.node("approval").phase, state.node("approval").message, state.message) == ("Succeeded", "resumed", "")
    assert bench.lines("order") == ["canary", "released"]
    with pytest.raises(MissingRun, match="run run-1 is not running: it is Succeeded"):
        resume(bench.run_dir)


def test_the_command_finds_the_run_in_a_store_and_resumes_it(bench: Bench) -> None:
    store = bench.folder / "models"
    run_dir = store / "org--name" / "runs" / "20260101-120000-ab12"
    run_dir.parent.mkdir(parents=True)
    engine = bench.start(approval(bench))
    suspended(bench.run_dir)
    run_dir.symlink_to(bench.run_dir)
    command = [
        sys.executable,
        "-m",
        "pipeline",
        "resume",
        "2026",
        "--task",
        "approval",
        "--store",
        str(store),
        "--json",
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert json.loads(said.stdout) == {"run": "20260101-120000-ab12", "resumed": ["approval"]}, said.stderr
    engine.communicate()
    assert engine.returncode == 0
    assert bench.lines("order") == ["canary", "released"]


def test_an_interrupt_ends_a_suspended_run_and_its_exit_handler_runs(bench: Bench) -> None:
    engine = bench.start(approval(bench))
    suspended(bench.run_dir)
    engine.send_signal(signal.SIGINT)
    engine.communicate()
    assert engine.returncode == 130
    state = read_run(bench.run_dir)
    assert (state.node("approval").phase, state.node("release").phase) == ("Failed", "Omitted")
    assert bench.lines("status") == ["Failed"]


def test_nothing_is_resumed_where_nothing_is_suspended(bench: Bench) -> None:
    with bench.workflow() as workflow:
        program = bench.program("say", "write('runs'); wait_for('go-on')")
        with dag(name="main"):
            Task(name="say", template=program)
    engine = bench.start(workflow)
    bench.await_file("runs")
    with pytest.raises(ConfigError, match="nothing in run run-1 is suspended"):
        resume(bench.run_dir)
    (bench.store / "go-on").touch()
    engine.communicate()
    assert engine.returncode == 0
