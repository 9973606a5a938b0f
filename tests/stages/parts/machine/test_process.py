from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from stages.parts.machine.process import Contained

SHELL = ("sh", "-c")


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"still waiting: {what}"
        time.sleep(0.01)


def pid_in(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"a pid in {path.name}")
    return int(path.read_text())


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def family(tmp_path: Path, last: str = "sleep 1000") -> list[str]:
    """A command with a child in its own session that outlives its parent, as daemons do."""
    child, grandchild, script = tmp_path / "child", tmp_path / "grandchild", tmp_path / "daemon.sh"
    script.write_text(f"sleep 1000 & echo $! > {grandchild}; wait\n")
    waiting = f"while [ ! -s {grandchild} ]; do sleep 0.01; done"
    return [*SHELL, f"setsid sh {script} & echo $! > {child}; {waiting}; {last}"]


@pytest.mark.parametrize(("command", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 137)])
def test_the_exit_status_is_that_of_the_command(command: str, status: int) -> None:
    process = Contained([*SHELL, command])
    assert process.wait(60) == status
    assert process.stop() == status == process.poll()


def test_the_error_names_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log, Contained(["/no/such/program"], output=log) as process:
        assert process.wait(60) == 127
    assert "cannot start /no/such/program: No such file or directory" in (tmp_path / "log").read_text()


def test_the_command_gets_its_output_environment_and_directory(tmp_path: Path) -> None:
    with (
        (tmp_path / "log").open("wb") as log,
        Contained(
            [*SHELL, "pwd; echo $WHAT; echo oops >&2"],
            output=log,
            environment={"WHAT": "this", "PATH": os.environ["PATH"]},
            directory=tmp_path,
        ) as process,
    ):
        assert process.wait(60) == 0
    assert (tmp_path / "log").read_text().split() == [str(tmp_path), "this", "oops"]


def test_leaving_the_block_ends_all_processes_even_in_other_sessions(tmp_path: Path) -> None:
    with Contained(family(tmp_path)) as process:
        pids = [process.pid, pid_in(tmp_path / "child"), pid_in(tmp_path / "grandchild")]
        assert all(is_running(pid) for pid in pids)
    assert not any(is_running(pid) for pid in pids)


def test_an_error_in_the_block_ends_all_processes(tmp_path: Path) -> None:
    def fail() -> None:
        with Contained(family(tmp_path)):
            pid_in(tmp_path / "grandchild")
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert not is_running(pid_in(tmp_path / "grandchild"))


def test_a_failed_command_leaves_nothing_behind(tmp_path: Path) -> None:
    process = Contained(family(tmp_path, last="exit 7"))
    assert process.wait(60) == 7
    assert not is_running(pid_in(tmp_path / "grandchild"))
    process.stop()


def test_a_command_that_succeeds_may_leave_a_daemon(tmp_path: Path) -> None:
    with Contained(family(tmp_path, last="exit 0")) as process:
        assert process.wait(60) == 0
    pid = pid_in(tmp_path / "grandchild")
    assert is_running(pid)
    os.kill(pid, signal.SIGKILL)


def test_a_command_can_clean_up_before_its_children_end(tmp_path: Path) -> None:
    said, ready = tmp_path / "said", tmp_path / "ready"
    command = f"trap 'echo goodbye > {said}; exit 5' TERM; echo 1 > {ready}; while :; do sleep 0.01; done"
    process = Contained([*SHELL, command])
    pid_in(ready)
    assert process.stop() == 5
    assert said.read_text() == "goodbye\n"


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    command = f"trap '' TERM; echo $$ > {tmp_path / 'stubborn'}; while :; do sleep 0.01; done"
    process = Contained([*SHELL, command], grace_s=0.2)
    pid = pid_in(tmp_path / "stubborn")
    assert process.stop() == 137
    assert not is_running(pid)


def test_a_command_can_be_stopped_twice(tmp_path: Path) -> None:
    process = Contained(["sleep", "1000"])
    assert process.stop() == process.stop()


def test_a_program_that_is_stopped_while_it_starts_leaves_nothing() -> None:
    for delay_s in (0.0, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04):
        process = Contained(["sleep", "1000"], grace_s=60)
        time.sleep(delay_s)
        assert process.stop() == 143


def test_waiting_ends_after_the_timeout() -> None:
    with Contained(["sleep", "1000"]) as process:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_death_of_the_caller_ends_all_processes(tmp_path: Path, number: signal.Signals) -> None:
    program = f"from stages.parts.machine.process import Contained; Contained({family(tmp_path)!r}).wait()"
    with subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[4]) as caller:
        try:
            pids = [pid_in(tmp_path / "child"), pid_in(tmp_path / "grandchild")]
        finally:
            caller.send_signal(number)
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the end of the caller's processes")


def test_the_death_of_the_guard_ends_the_command(tmp_path: Path) -> None:
    command = tmp_path / "command"
    process = Contained([*SHELL, f"echo $$ > {command}; exec sleep 1000"])
    pid = pid_in(command)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(60) == 137
    wait_until(lambda: not is_running(pid), "the end of the command")
    process.stop()


def test_many_commands_at_once_do_not_block_each_other() -> None:
    processes = [Contained(["sleep", "1000"]) for _ in range(8)]
    first = processes.pop()
    assert first.stop() == 143
    assert all(process.poll() is None for process in processes)
    for process in processes:
        process.terminate()
    assert {process.stop() for process in processes} == {143}
