"""An engine that is interrupted, killed, or out of disk leaves no process and a run that tells the truth."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from hera.workflows import Resources, Task, WorkflowTemplate, models

from pipeline.local.folder import read_run
from pipeline.runs.state import RunState
from stages.parts.base.errors import ConfigError, MissingRun
from tests.pipeline.local.local_bench import Bench, dag, eventually, retries

FAMILY = """
import subprocess
child = "import time; time.sleep(600)"
subprocess.Popen([sys.executable, "-S", "-c", child, sys.argv[1]], start_new_session=True)
write("started")
time.sleep(600)
"""
Living = Callable[[str], list[int]]


def long_run(bench: Bench, marker: str, handler: str = "write('status', sys.argv[1])") -> WorkflowTemplate:
    with bench.workflow(on_exit="ending") as workflow:
        bench.handler(handler)
        work = bench.program("work", FAMILY, arguments=[marker], retry_strategy=retries(limit=3))
        with dag(name="main"):
            Task(name="work", template=work) >> Task(name="next", template=work)
    return workflow


def phases(state: RunState) -> dict[str, str]:
    return {node.name: node.phase for node in state.nodes}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_stops_its_tasks_and_runs_its_exit_handler(
    bench: Bench, living: Living, number: signal.Signals
) -> None:
    marker = f"marker-{uuid4().hex}"
    engine = bench.start(long_run(bench, marker))
    bench.await_file("started")
    assert len(living(marker)) >= 2
    engine.send_signal(number)
    said = engine.communicate()[1]
    assert engine.returncode == 130
    assert "error: interrupted; every task was stopped" in said
    assert living(marker) == []
    assert bench.lines("status") == ["Failed"]
    state = read_run(bench.run_dir)
    assert (state.phase, state.message) == ("Failed", "interrupted")
    assert phases(state) == {
        "work": "Failed",
        "next": "Omitted",
        "onExit": "Succeeded",
        "onExit.report": "Succeeded",
    }
    assert (state.node("work").message, state.node("work").attempts) == ("interrupted", 1)


def test_an_interrupt_reaches_into_inner_dags(bench: Bench, living: Living) -> None:
    marker = f"marker-{uuid4().hex}"
    with bench.workflow() as workflow:
        work = bench.program("work", FAMILY, arguments=[marker], resources=Resources(cpu_request=4))  # one at a time
        with dag(name="inner"):
            Task(name="a", template=work) >> Task(name="next", template=work)
            Task(name="b", template=work)
        with dag(name="main"):
            Task(name="outer", template="inner")
    engine = bench.start(workflow)
    bench.await_file("started")
    engine.send_signal(signal.SIGINT)
    engine.communicate()
    assert engine.returncode == 130
    assert living(marker) == []
    assert phases(read_run(bench.run_dir)) == {
        "outer": "Failed",
        "outer.a": "Failed",
        "outer.b": "Omitted",
        "outer.next": "Omitted",
    }


def test_a_second_interrupt_stops_the_exit_handler(bench: Bench, living: Living) -> None:
    marker = f"marker-{uuid4().hex}"
    engine = bench.start(long_run(bench, marker, "write('handler-runs'); time.sleep(600)"))
    bench.await_file("started")
    engine.send_signal(signal.SIGINT)
    bench.await_file("handler-runs")
    engine.send_signal(signal.SIGINT)
    engine.communicate()
    assert engine.returncode == 130
    assert living(marker) == []
    assert read_run(bench.run_dir).node("onExit.report").message == "interrupted"


def test_a_second_interrupt_before_the_exit_handler_skips_it(bench: Bench) -> None:
    slow_to_end = """
import signal
def slowly(*_):
    write("ending"); wait_for("go-on"); sys.exit(1)
signal.signal(signal.SIGTERM, slowly)
write("started")
time.sleep(600)
"""
    with bench.workflow(on_exit="ending") as workflow:
        bench.handler("write('handler-runs')")
        work = bench.program("work", slow_to_end)
        with dag(name="main"):
            Task(name="work", template=work)
    engine = bench.start(workflow)
    bench.await_file("started")
    engine.send_signal(signal.SIGINT)
    bench.await_file("ending")
    engine.send_signal(signal.SIGINT)
    time.sleep(0.3)  # the signal is taken before the task ends
    (bench.store / "go-on").touch()
    engine.communicate()
    assert engine.returncode == 130
    assert not (bench.store / "handler-runs").exists()
    assert phases(read_run(bench.run_dir)) == {"work": "Failed", "onExit": "Omitted"}


def test_a_run_interrupted_while_it_waits_for_its_mutex_never_starts(bench: Bench) -> None:
    mutex = models.Synchronization(mutexes=[models.Mutex(name="model")])
    with bench.workflow(synchronization=mutex, on_exit="ending") as workflow:
        bench.handler("")
        work = bench.program("work", "add('starts', 1); wait_for('go-on')")
        with dag(name="main"):
            Task(name="work", template=work)
    holder = bench.start(workflow)
    eventually(lambda: bench.lines("starts"), "the first run holds the mutex")
    waiter = bench.start(workflow)
    assert waiter.stderr is not None
    assert "waiting for mutex model" in waiter.stderr.readline()
    waiter.send_signal(signal.SIGINT)
    waiter.communicate()
    assert waiter.returncode == 130
    state = read_run(bench.run_dir)
    assert (state.phase, state.message, state.started_at) == ("Failed", "interrupted", None)
    assert len(bench.lines("starts")) == 1
    (bench.store / "go-on").touch()
    holder.communicate()
    assert holder.returncode == 0


def test_a_killed_engine_leaves_no_process_and_an_interrupted_run(bench: Bench, living: Living) -> None:
    marker = f"marker-{uuid4().hex}"
    engine = bench.start(long_run(bench, marker))
    bench.await_file("started")
    assert read_run(bench.run_dir).phase == "Running"
    eventually(lambda: read_run(bench.run_dir).node("work").phase == "Running", "so is its task")
    assert len(living(marker)) >= 2
    engine.kill()
    engine.communicate()
    eventually(lambda: not living(marker), "every process of the killed engine ends")
    state = read_run(bench.run_dir)
    assert (state.phase, state.message) == ("Interrupted", "the engine ended before the run did")
    assert (state.node("work").phase, state.node("work").message) == ("Error", "interrupted")


def test_the_state_can_be_read_at_any_moment(bench: Bench) -> None:
    with bench.workflow() as workflow:
        code = "wait_for('read-' + sys.argv[1])"  # the reader has seen that so many have ended
        work = bench.program("work", code, inputs=["n"], arguments=["{{inputs.parameters.n}}"])
        with dag(name="main"):
            tasks = [Task(name=f"t{n}", template=work, arguments={"n": n}) for n in range(8)]
            for before, after in itertools.pairwise(tasks):
                before >> after
    engine = bench.start(workflow)
    seen: list[RunState] = []
    finished: list[int] = []
    while engine.poll() is None:
        try:
            seen.append(read_run(bench.run_dir))
        except MissingRun:
            assert not seen  # only before the run is there
            continue
        finished.append(sum(node.finished for node in seen[-1].nodes))
        (bench.store / f"read-{finished[-1]}").touch()
    engine.communicate()
    assert engine.returncode == 0
    assert finished == sorted(finished)
    assert set(finished) >= set(range(8))
    assert read_run(bench.run_dir).phase == "Succeeded"
    assert {state.phase for state in seen} <= {"Pending", "Running", "Succeeded"}


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"name": "x"')
    for folder in (tmp_path, tmp_path / "missing", tmp_path / "run.json"):
        with pytest.raises(MissingRun, match="there is no run in"):
            read_run(folder)


def small(bench: Bench, code: str) -> WorkflowTemplate:
    with bench.workflow() as workflow:
        work = bench.program("work", code)
        with dag(name="main"):
            Task(name="work", template=work)
    return workflow


def test_a_runs_folder_is_not_used_twice(bench: Bench) -> None:
    bench.run(small(bench, ""))
    bench.runs = 0
    with pytest.raises(ConfigError, match="run-1 holds a run already"):
        bench.run(small(bench, ""))


def test_a_folder_that_cannot_be_written_is_a_clear_error(bench: Bench) -> None:
    (bench.folder / "runs").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=r"cannot use .*run-1 as the run's folder: (Not a directory|File exists)"):
        bench.run(small(bench, ""))


def can_mount() -> bool:
    unshare = shutil.which("unshare")
    return unshare is not None and subprocess.run([unshare, "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a small file system (unshare -m)")
def test_a_full_disk_stops_the_run_with_a_clear_error(bench: Bench, living: Living) -> None:
    """The run's folder lies on a file system of 400 KiB, which one task fills while another runs."""
    marker = f"marker-{uuid4().hex}"
    runs = bench.folder / "runs"
    runs.mkdir()
    with bench.workflow() as workflow:
        fill = bench.program("fill", "wait_for('started')\nwhile True: print('x' * 4096, flush=True)")
        work = bench.program("work", FAMILY, arguments=[marker])
        with dag(name="main"):
            Task(name="work", template=work)
            Task(name="fill", template=fill)
    mount = 'mount -t tmpfs -o size=400k small "$0" && exec "$@"'
    engine = bench.start(workflow, before=["unshare", "-m", "sh", "-c", mount, str(runs)])
    said = engine.communicate()[1]
    assert engine.returncode == 15, said
    assert f"error: no space left on the volume of {bench.run_dir}" in said
    assert living(marker) == []


def test_a_terminal_shows_a_live_tree(bench: Bench) -> None:
    with bench.workflow(name="tree") as workflow:
        good = bench.program(
            "good", "print('downloading\\r 50 %\\r\\x1b[31m99 %\\x1b[0m', flush=True); wait_for('go-on')"
        )
        bad = bench.program("bad", "fail(1, 'told to', 'do not')")
        with dag(name="main"):
            Task(name="acquire", template=good)
            Task(name="optimize", template=bad) >> Task(name="evaluate", template=good)
            Task(name="many", template="inner")
        with dag(name="inner"):
            Task(name="more", template="innermost")
        with dag(name="innermost"):
            Task(name="say", template=good)
    ours, theirs = os.openpty()
    engine = bench.start(workflow, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 65536)
        except OSError:  # the terminal's other end is closed
            break
        if b"99 %" in seen:
            (bench.store / "go-on").touch()
    os.close(ours)
    assert engine.wait() == 1
    text = seen.decode()
    assert "✔ " in text
    assert "✘ " in text
    assert "told to" in text
    assert "do not" in text
    assert "99 %" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert re.search(r"├── . many .*\r?\n│ +└── . more .*\r?\n│ +└── . say", plain), plain
    assert "\x1b[?25h" in text  # the cursor is back
