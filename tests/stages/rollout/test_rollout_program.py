"""``python -m stages.rollout`` as a workflow calls it, on this machine's endpoint with stand-in servers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.parts.base.files import swap_link
from stages.parts.base.program import OUTPUTS_VARIABLE, RUN_VARIABLE, outcomes
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import endpoint
from stages.parts.records.rollout import read_journal
from stages.parts.releases import release as releases
from tests.serving import MODEL, ROLLOUT, SERVING, Said, environment, publish, stage, stand_in_variant

SETTINGS = ROLLOUT | {"steps": [10, 50, 100], "min_requests": 10, "step_timeout_s": 60}
SETTINGS |= {
    "ttft_slack_ms": 2000,
    "tpot_slack_ms": 2000,
}  # on a busy machine the canary is not worse


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ModelStore]:
    place = ModelStore(tmp_path / "store", MODEL)
    yield place
    stage("serve", "--stop", variables=environment(place, stand_in=True))


def rollout(store: ModelStore, *arguments: str, run: str = "run-1", **variables: str) -> Said:
    given = ["--serving", json.dumps(SERVING), "--settings", json.dumps(SETTINGS)]
    return stage(
        "rollout", *given, *arguments, variables=environment(store, stand_in=True, **{RUN_VARIABLE: run}, **variables)
    )


def candidate(store: ModelStore, number: int, name: str, **behaviour: object) -> str:
    """A release that is published and waits for its rollout."""
    before = releases.current_release(store)
    release = publish(store, number, stand_in_variant(store, name, token_s=0.01, **behaviour))
    swap_link(store.path / releases.CANDIDATE, Path("releases") / release)
    if before:
        swap_link(store.production, Path("releases") / before)
    return release


def test_each_step_is_a_task_and_the_last_one_prints_the_address(store: ModelStore, tmp_path: Path) -> None:
    first = candidate(store, 1, "fp16")
    assert rollout(store, **{OUTPUTS_VARIABLE: str(tmp_path / "first")}).returncode == 0
    assert (tmp_path / "first" / "compared").read_text() == "false"
    second = candidate(store, 2, "awq", another="model")
    states, compared = [], []
    for step in ("deploy", "10", "50", "100", "promote"):
        said = rollout(store, "--step", step, run="run-2", **{OUTPUTS_VARIABLE: str(tmp_path / step)})
        assert said.returncode == 0, said.stderr
        states.append((tmp_path / step / "state").read_text())
        compared.append((tmp_path / step / "compared").read_text())
    assert compared == ["true", "true", "true", "true", "false"]
    assert states == ["shifting", "shifting", "shifting", "promoting", "promoted"]
    found = endpoint(store)
    assert found
    assert (found.release, found.standby) == (second, first)
    assert said.stdout.strip() == found.url == (tmp_path / "promote" / "url").read_text()
    said_of = {each.variant: each.reason for each in outcomes(store.run("run-2"))}
    assert list(said_of) == ["deploy", "10", "50", "100", ""]
    assert said_of[""].startswith(f"{second} is now what clients get")
    back = subprocess.run(
        [sys.executable, "-m", "pipeline", "rollback", MODEL, "--store", str(store.root)],
        env=environment(store, stand_in=True),
        capture_output=True,
        text=True,
        check=False,
    )
    assert back.stdout == f"{first} is in production\n", "without repeating how it is served"
    swap_link(store.path / releases.CANDIDATE, Path("releases") / second)
    assert rollout(store, run="run-2b").stdout == said.stdout
    again = rollout(store, run="run-3")
    assert again.stdout == said.stdout
    assert f"reused: {second} is still what clients get" in again.stderr


@pytest.mark.slow
def test_a_failed_workflow_gives_up_its_own_rollout_and_no_other(store: ModelStore) -> None:
    first = candidate(store, 1, "fp16")
    assert rollout(store).returncode == 0
    second = candidate(store, 2, "awq", another="model")
    assert rollout(store, "--step", "10", run="run-2").returncode == 0
    for status, run in (("Succeeded", "run-2"), ("Failed", "run-3")):
        said = rollout(store, "--abort", "--status", status, run=run)
        assert (said.returncode, said.stderr) == (0, "no rollout to give up\n")
    said = rollout(store, "--abort", "--status", "Failed", run="run-2")
    assert said.returncode == 0, said.stderr
    assert said.stderr.endswith(f"gave up {second}\n")
    journal, found = read_journal(store), endpoint(store)
    assert journal
    assert found
    assert (journal.state, journal.reason) == ("rolled back", "the workflow failed")
    assert (found.release, found.canary) == (first, None)
    assert releases.current_release(store) == first
    assert releases.candidate(store) is None


@pytest.mark.slow
def test_a_canary_that_is_worse_fails_the_task_with_an_exit_code_of_its_own(store: ModelStore) -> None:
    candidate(store, 1, "fp16")
    assert rollout(store).returncode == 0
    candidate(store, 2, "awq", fails_every=2)
    said = rollout(store, run="run-2")
    assert said.returncode == 43
    assert "requests failed (stable release: 0 of" in said.stderr.splitlines()[-2]
    assert outcomes(store.run("run-2"))[0].result == "failed"


def test_a_step_that_the_settings_do_not_have_is_named(store: ModelStore) -> None:
    said = rollout(store, "--step", "25")
    assert said.returncode == 2
    assert "unknown step '25'" in said.stderr


def test_without_a_published_release_there_is_nothing_to_roll_out(store: ModelStore) -> None:
    said = rollout(store)
    assert said.returncode == 33
    assert f"slipway run {MODEL}" in said.stderr
