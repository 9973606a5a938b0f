"""suspend templates: a run that waits for a time, or for a person."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hera.workflows import DAG, Parameter, Suspend, Task, WorkflowTemplate, models
from local_bench import Bench, eventually

from pipeline.local.state import RunState, read_run
from pipeline.local.suspension import resume
from stages.parts.base.errors import ConfigError, MissingRun, UnknownName


def supplied(name: str, **default: str) -> Parameter:
    return Parameter(name=name, value_from=models.ValueFrom(supplied=models.SuppliedValueFrom(), **default))


def approval(bench: Bench, *outputs: Parameter, duration: str | None = None) -> WorkflowTemplate:
    with bench.workflow(on_exit="report") as workflow:
        program = bench.program("say", "add('order', sys.argv[1])", inputs=[Parameter(name="n", default="released")])
        program.args += ["{{inputs.parameters.n}}"]
        bench.program("report", "write('status', sys.argv[1])", arguments=["{{workflow.status}}"])
        Suspend(name="approve", duration=duration, outputs=list(outputs))
        with DAG(name="main"):
            first = Task(name="canary", template=program, arguments={"n": "canary"})
            approve = Task(name="approval", template="approve")
            given = {"n": f"{{{{tasks.approval.outputs.parameters.{outputs[0].name}}}}}"} if outputs else {}
            first >> approve >> Task(name="release", template=program, arguments=given)
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


def test_a_suspended_run_waits_until_it_is_told_to_go_on(bench: Bench) -> None:
    engine = bench.start(approval(bench))
    state = suspended(bench.run_dir)
    node = state.node("approval")
    assert (state.phase, node.phase, node.kind) == ("Running", "Running", "Suspend")
    assert node.message == "suspended; to go on: slipway resume run-1"
    assert bench.lines("order") == ["canary"]
    with pytest.raises(UnknownName, match="unknown suspended task 'release'"):
        resume(bench.run_dir, "release")
    with pytest.raises(UnknownName, match="unknown output of a suspended task 'who'"):
        resume(bench.run_dir, None, {"who": "me"})
    assert resume(bench.run_dir) == ["approval"]
    assert engine.wait() == 0
    engine.communicate()
    state = read_run(bench.run_dir)
    assert (state.node("approval").phase, state.node("approval").message, state.message) == ("Succeeded", "resumed", "")
    assert bench.lines("order") == ["canary", "released"]
    with pytest.raises(MissingRun, match="run run-1 does not run: it is Succeeded"):
        resume(bench.run_dir)


def test_whoever_resumes_gives_the_outputs_that_have_no_default(bench: Bench) -> None:
    """The command finds the run in a store, as it does for a person."""
    store = bench.folder / "models"
    run_dir = store / "org--name" / "runs" / "20260101-120000-ab12"
    run_dir.parent.mkdir(parents=True)
    engine = bench.start(approval(bench, supplied("traffic"), supplied("who", default="nobody")))
    suspended(bench.run_dir)
    run_dir.symlink_to(bench.run_dir)

    def slipway(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pipeline", "resume", *words, "--store", str(store), "--json"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    refused = slipway()
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["error"] == "no value was given for traffic"
    said = slipway("2026", "--task", "approval", "--set", "traffic=50 %")
    assert json.loads(said.stdout) == {"run": "20260101-120000-ab12", "resumed": ["approval"]}, said.stderr
    engine.communicate()
    assert engine.returncode == 0
    assert bench.lines("order") == ["canary", "50 %"]
    assert read_run(bench.run_dir).node("approval").outputs == {"traffic": "50 %", "who": "nobody"}


def test_a_suspension_with_a_duration_ends_by_itself(bench: Bench) -> None:
    state = bench.run(approval(bench, supplied("traffic", default="all"), duration="300ms"))
    assert state.phase == "Succeeded"
    assert bench.lines("order") == ["canary", "all"]
    node = state.node("approval")
    assert node.seconds is not None
    assert node.seconds >= 0.3
    assert "suspended for 0.3 s; to go on: slipway resume run-1" in bench.progress.getvalue()
    state = bench.run(approval(bench, supplied("traffic"), duration="10ms"))
    assert (state.phase, state.message) == ("Error", "approval: no value was given for traffic")


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
        with DAG(name="main"):
            Task(name="say", template=program)
    engine = bench.start(workflow)
    bench.await_file("runs")
    with pytest.raises(ConfigError, match="nothing in run run-1 is suspended"):
        resume(bench.run_dir)
    (bench.store / "go-on").touch()
    engine.communicate()
    assert engine.returncode == 0
