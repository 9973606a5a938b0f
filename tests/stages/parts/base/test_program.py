"""What a stage program leaves of its failure for whoever started it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from stages.parts.base.errors import AccessDenied
from stages.parts.base.program import (
    FAILURE,
    OUTPUTS_VARIABLE,
    RUN_VARIABLE,
    TERMINATION_BYTES,
    StageFailure,
    outcome,
    outcomes,
    version,
)
from stages.parts.base.store import ModelStore

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


def test_the_version_that_documents_name_is_the_packages():
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    assert project["version"] == version()


@pytest.fixture
def ran(tmp_path):
    """``ran(code)``: a stage program with that body, as a pod runs it."""
    (tmp_path / "termination-log").touch()

    def run(code, **environment):
        return subprocess.run(
            [sys.executable, "-c", PROGRAM.format(code), str(tmp_path / "termination-log")],
            env={**os.environ, OUTPUTS_VARIABLE: str(tmp_path), **environment},
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


PRINTS = "import os; print('made', flush=True); os.system('echo by another program >&2'); raise AccessDenied('gated')"


def test_a_pods_log_is_kept_in_the_file_that_is_named_and_continued_by_the_next_attempt(ran, tmp_path):
    log = tmp_path / "runs" / "1" / "logs" / "acquire.log"
    printed = "made\nby another program\nerror: gated\n"
    for attempt in (1, 2):
        ended = ran(PRINTS, SLIPWAY_LOG=str(log))
        assert ended.returncode == AccessDenied.exit_code
        assert ended.stdout == printed
        first, *others = log.read_text().split("\n--- another attempt")
        assert first == printed
        assert len(others) == attempt - 1
        assert all(each.endswith(f"---\n{printed}") for each in others)


def test_a_stage_that_is_killed_leaves_its_log(ran, tmp_path):
    log = tmp_path / "acquire.log"
    kill = "import os, signal; print('half way', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    assert ran(kill, SLIPWAY_LOG=str(log)).returncode == -9
    deadline = time.monotonic() + 10
    while "half way" not in log.read_text():
        assert time.monotonic() < deadline


def test_a_stage_that_is_stopped_with_everything_in_its_pod_ends_as_stopped(ran, tmp_path):
    log = tmp_path / "acquire.log"
    stop = (
        "import os, psutil, signal, time; [each.terminate() for each in psutil.Process().children()]; time.sleep(0.2); "
        "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)"
    )
    assert ran(stop, SLIPWAY_LOG=str(log)).returncode == 143
    assert "(SIGTERM)" in log.read_text()


def test_a_log_that_cannot_be_kept_does_not_end_the_stage(ran, tmp_path):
    (tmp_path / "a-file").touch()
    ended = ran("print('made')", SLIPWAY_LOG=str(tmp_path / "a-file" / "acquire.log"))
    assert (ended.returncode, ended.stdout) == (0, "made\n")
    assert "can't be kept" in ended.stderr


def test_an_outcome_keeps_why_earlier_attempts_of_the_run_failed(tmp_path, monkeypatch):
    store = ModelStore(tmp_path, "org/name")
    monkeypatch.setenv(RUN_VARIABLE, "run-1")
    for reason in ("the Hub did not answer", "the disk was full"):
        with pytest.raises(AccessDenied), outcome(store, "acquire"):
            raise AccessDenied(reason)
    with outcome(store, "acquire") as report:
        report.done("downloaded")
    (recorded,) = outcomes(store.run("run-1"))
    assert recorded.result == "done"
    assert recorded.retried == ("the Hub did not answer", "the disk was full")
    with outcome(store, "acquire") as report:
        report.reused("was there")
    assert outcomes(store.run("run-1"))[0].retried == ()
