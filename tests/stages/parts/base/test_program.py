"""What a stage program leaves of its failure for whoever started it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from stages.parts.base.program import FAILURE, OUTPUTS_VARIABLE, TERMINATION_BYTES, StageFailure

PROGRAM = """
import sys
from pathlib import Path
from stages.parts.base import program
from stages.parts.base.errors import AccessDenied
program.TERMINATION_LOG = Path(sys.argv[1])
def stage():
    {}
program.main(stage)
"""


@pytest.fixture
def ran(tmp_path):
    """``ran(code)``: a stage program with that body, as a pod runs it."""
    (tmp_path / "termination-log").touch()

    def run(code):
        return subprocess.run(
            [sys.executable, "-c", PROGRAM.format(code), str(tmp_path / "termination-log")],
            env={**os.environ, OUTPUTS_VARIABLE: str(tmp_path)},
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.parametrize(
    ("code", "exit_code", "message", "hint"),
    [
        (
            "raise AccessDenied('org/name is gated\\n    by its owner', hint='ask')",
            12,
            "gated\n    by its owner",
            "ask",
        ),
        ("raise ValueError('no such\\nline')", 1, "ValueError: no such", ""),
        ("raise KeyboardInterrupt", 130, "interrupted", ""),
        ("import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", 143, "(SIGTERM)", ""),
    ],
)
def test_a_failure_is_left_as_json_and_as_one_line_in_the_termination_log(
    ran, tmp_path, code, exit_code, message, hint
):
    ended = ran(code)
    assert ended.returncode == exit_code, ended.stderr
    assert message in ended.stderr
    left = (tmp_path / FAILURE).read_text()
    assert (tmp_path / "termination-log").read_text() == left
    assert len(left.splitlines()) == 1
    document = json.loads(left)
    assert document["message"].endswith(message)
    assert (document["hint"], document["exit_code"]) == (hint, exit_code)


def test_a_stage_that_worked_leaves_no_failure(ran, tmp_path):
    assert ran("pass").returncode == 0
    assert not (tmp_path / FAILURE).exists()
    assert (tmp_path / "termination-log").read_text() == ""


def test_no_termination_log_is_made_where_kubernetes_made_none(ran, tmp_path):
    (tmp_path / "termination-log").unlink()
    assert ran("raise AccessDenied('no')").returncode == 12
    assert not (tmp_path / "termination-log").exists()


@pytest.mark.parametrize("letter", ["x", "é", "\n", '"'])
def test_a_failure_fits_into_a_termination_message(letter):
    line = StageFailure(message=letter * 5000, hint=letter * 5000, exit_code=2).line()
    assert len(line.encode()) <= TERMINATION_BYTES
    assert len(line.splitlines()) == 1
    assert StageFailure.parse(line, 2) is not None
    short = StageFailure(message="m", hint="h", exit_code=2)
    assert StageFailure.parse(short.line(), 2) == short


def test_the_words_of_a_program_that_was_killed_afterwards_do_not_count():
    line = StageFailure(message="m", exit_code=75).line()
    assert StageFailure.parse(line, 137) is None
