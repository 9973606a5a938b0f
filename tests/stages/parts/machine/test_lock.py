"""The machine lock between real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.parts.machine.lock import LOCK_VARIABLE, alone

HOLD = """
import sys
from stages.parts.machine.lock import alone, together
with {how}({what!r}):
    print("mine", flush=True)
    sys.stdin.read()
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a process that holds the lock of this test's machine until its input ends."""
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "machine.lock"))
    with contextlib.ExitStack() as started:

        def process(how: str, what: str) -> subprocess.Popen[str]:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            made = subprocess.Popen([sys.executable, "-c", HOLD.format(how=how, what=what)], text=True, **pipes)
            started.enter_context(made)
            started.callback(made.kill)
            return made

        yield process


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def waiting(process: subprocess.Popen[str]) -> str:
    assert process.stderr
    return process.stderr.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.close()
    assert process.wait() == 0


@pytest.mark.parametrize(("how", "next_how"), [("alone", "alone"), ("alone", "together"), ("together", "alone")])
def test_a_measurement_waits_for_other_work_and_names_it(start: Start, how: str, next_how: str) -> None:
    first = start(how, "evaluate fp16 of org/a")
    assert said(first) == "mine"
    second = start(next_how, "evaluate fp16 of org/b")
    assert waiting(second) == f"waiting for evaluate fp16 of org/a (process {first.pid}), on this machine"
    end(first)
    assert said(second) == "mine"
    end(second)


def test_optimize_tasks_of_several_runs_work_together_and_a_measurement_waits_for_all(start: Start) -> None:
    both = [start("together", f"optimize awq of org/{name}") for name in "ab"]
    assert [said(each) for each in both] == ["mine", "mine"]
    measuring = start("alone", "evaluate fp16 of org/c")
    told = waiting(measuring)
    for name, each in zip("ab", both, strict=True):
        assert f"optimize awq of org/{name} (process {each.pid})" in told
    for each in both:
        end(each)
    assert said(measuring) == "mine"


def test_an_ended_process_is_not_named_and_a_killed_one_holds_nothing(start: Start) -> None:
    gone, killed = start("together", "optimize awq of org/a"), start("together", "optimize gptq of org/a")
    assert [said(gone), said(killed)] == ["mine", "mine"]
    end(gone)
    waits = start("alone", "evaluate fp16 of org/b")
    assert waiting(waits) == f"waiting for optimize gptq of org/a (process {killed.pid}), on this machine"
    killed.kill()
    assert said(waits) == "mine"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_waiting_process_ends_at_once_on_a_signal(start: Start, number: signal.Signals) -> None:
    with alone("evaluate fp16 of org/a"):
        waits = start("alone", "evaluate fp16 of org/b")
        assert waiting(waits) == f"waiting for evaluate fp16 of org/a (process {os.getpid()}), on this machine"
        waits.send_signal(number)
        assert waits.wait(timeout=60) != 0
