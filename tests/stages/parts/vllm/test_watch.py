from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stages.parts.vllm.server_log import EngineWatch, Lost
from tests.serving import wait_until

Start = Callable[[str], "subprocess.Popen[bytes]"]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "vllm.log"


@pytest.fixture
def start(log: Path) -> Iterator[Start]:
    """Starts a process that the log names; one without a name is not in the log."""
    with contextlib.ExitStack() as stack:

        def run(name: str) -> subprocess.Popen[bytes]:
            process = stack.enter_context(subprocess.Popen(["sleep", "1000"]))
            stack.callback(process.kill)
            if name:
                say(log, f"({name} pid={process.pid}) INFO 01-02 03:04:05 [core.py:133] starting")
            return process

        yield run


def say(log: Path, line: str) -> None:
    with log.open("a") as file:
        file.write(f"{line}\n")


def test_a_lost_worker_is_named_and_processes_that_come_and_go_are_not_missed(log: Path, start: Start) -> None:
    _, _, second = start("EngineCore"), start("Worker_TP0"), start("Worker_TP1")
    passing = start("")
    watch = EngineWatch(log, 0)
    passing.kill()
    passing.wait()
    assert not watch.dead()
    log.write_text("")  # the endpoint's log is truncated when it is long
    say(log, "INFO:     Application startup complete.")
    assert not watch.dead()
    os.kill(second.pid, signal.SIGSEGV)
    wait_until(watch.dead, "the loss")
    assert watch.lost == Lost("Worker_TP1", signal.SIGSEGV)


def test_a_process_whose_parent_took_note_of_its_end_is_lost_without_a_signal(log: Path, start: Start) -> None:
    engine = start("EngineCore")
    watch = EngineWatch(log, 0)
    assert not watch.dead()
    engine.kill()
    engine.wait()
    assert watch.dead()
    assert watch.lost == Lost("EngineCore", None)


def test_an_engine_that_says_that_it_failed_is_dead_although_it_still_runs(log: Path, start: Start) -> None:
    start("EngineCore")
    watch = EngineWatch(log, 0)
    with log.open("a") as file:
        file.write("(APIServer pid=1) ERROR 01-02 03:04:05 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDead")
    assert not watch.dead(), "half a line"
    say(log, "Error: EngineCore encountered an issue.")
    assert watch.dead()
    assert watch.lost is None


def test_the_processes_of_an_earlier_server_in_the_same_log_do_not_count(log: Path, start: Start) -> None:
    earlier = start("EngineCore")
    earlier.kill()
    earlier.wait()
    watch = EngineWatch(log, log.stat().st_size)
    start("EngineCore")
    assert not watch.dead()
