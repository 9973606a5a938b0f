"""A program in a fork sees, does and leaves what it would if it were started as ever."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import preloaded
from tests.preloaded import ForkingPopen
from tests.serving import wait_until

COMMAND = [sys.executable, "-m", "tests.own_surroundings"]
PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def started(kind: Any, argument: str, **given: Any) -> tuple[int, Any, str]:
    """The exit status, what the program saw, and the last line that it wrote to stderr."""
    variables = {"env": dict(os.environ)} | given
    with kind([*COMMAND, argument, "two words"], **PIPES, **variables) as process:
        output, errors = process.communicate("to stdin")
    return process.returncode, json.loads(output), errors.splitlines()[-1]


@pytest.fixture(autouse=True)
def _can_fork() -> None:
    if not preloaded.parent().suits(os.environ):
        pytest.skip("this kernel lets no process set its own command line")


@pytest.mark.parametrize("ending", ["0", "3", "kill", "raise", "say"])
def test_a_fork_cannot_tell_that_it_is_one(ending: str) -> None:
    forked, usual = started(ForkingPopen, ending), started(preloaded.USUAL, ending)
    assert forked[1] == usual[1]
    assert forked == usual
    seen = forked[1]
    assert seen["parent"] == os.getpid()
    assert seen["shown"][0] == [*COMMAND, ending, "two words"]
    assert seen["read"] == "to stdin"


def test_a_fork_gets_the_directory_the_variables_and_the_session_that_are_asked_for(tmp_path: Path) -> None:
    given = {"cwd": tmp_path, "env": os.environ | {"A": "b", "PYTHONPATH": str(preloaded.REPOSITORY)}}
    for more in ({}, {"start_new_session": True}):
        seen = started(ForkingPopen, "0", **given, **more)[1]
        assert seen == started(preloaded.USUAL, "0", **given, **more)[1]
        assert (seen["directory"], seen["environment"]["A"]) == (str(tmp_path), "b")
        assert seen["session_of_its_own"] == bool(more)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_a_signal_reaches_a_fork_and_ends_it(number: signal.Signals) -> None:
    with ForkingPopen([*COMMAND, "0"], **PIPES) as process:
        shown = psutil.Process(process.pid)
        wait_until(lambda: shown.cmdline() == [*COMMAND, "0"] and shown.status() == "sleeping", "it reads stdin")
        process.send_signal(number)
        process.communicate()
    assert process.returncode == -number


@pytest.mark.parametrize(
    "variables", [{"PYTHONPROFILEIMPORTTIME": "1"}, {"PYTHONPATH": "{folder}:{repository}"}], ids=["option", "shadowed"]
)
def test_a_program_that_would_import_otherwise_is_started_as_ever(variables: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "psutil.py").write_text("import sys; sys.exit('another psutil')")
    places = {"folder": tmp_path, "repository": preloaded.REPOSITORY}
    given = {name: text.format(**places) for name, text in variables.items()}
    ended = subprocess.run([*COMMAND, "0"], env=os.environ | given, capture_output=True, text=True, input="")
    assert "import time:" in ended.stderr if "PYTHONPATH" not in given else ended.stderr == "another psutil\n"


def test_what_was_imported_before_a_fork_starts_no_thread_and_reads_no_variable() -> None:
    assert psutil.Process(preloaded.parent().pid).num_threads() == 1
