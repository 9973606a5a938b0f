"""A store that version 0.1.0 made, in ``store_of_0_1_0``, is still shown, scored, served from and rolled back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scoring.profile import Profile
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import endpoint
from stages.parts.records.production import Production
from stages.parts.releases.release import before, current_release, decisions, promote
from stages.parts.vllm.client import healthy
from stages.report.page import render
from stages.report.run_report import RunReport
from stages.select.selection import select
from tests.samples import MODEL
from tests.serving import ROLLOUT, SERVING, environment, publish, stage, stand_in_variant

RUN = "20260102-030405-6a1b"
RELEASE = "0001-awq-9e2400b23bd3"
SAID = "awq has the highest score, with a probability of >99% of having it again."


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    shutil.copytree(Path(__file__).with_name("store_of_0_1_0"), tmp_path, dirs_exist_ok=True)
    found = ModelStore(tmp_path, MODEL)
    found.production.symlink_to(Path("releases", RELEASE))
    return found


def slipway(
    *arguments: str, store: ModelStore, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", *arguments, "--store", str(store.root)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def test_its_decision_is_read_with_the_outcome_that_it_had(store: ModelStore) -> None:
    (decision,) = decisions(store)
    assert (decision.winner, decision.outcome, decision.rules, decision.slipway) == ("awq", "decided", 5, "0.1.0")
    assert decision.reason.startswith(SAID)
    assert (decision.candidates[0].chance, decision.candidates[0].score) == (1.0, 1.0)
    older = json.loads(store.production_metrics.read_text()) | {"separated": False}
    assert Production.model_validate(older).outcome == "unresolved"


def test_its_runs_are_listed_and_shown(store: ModelStore) -> None:
    assert "awq     decided" in slipway("runs", store=store).stdout
    shown = slipway("show", RUN, store=store)
    assert shown.returncode == 0, shown.stderr
    assert "profile balanced: awq: decided, better than every other" in shown.stdout
    assert SAID in shown.stdout
    report = RunReport.read(store.run(RUN) / "report.json")
    assert report is not None
    page = render(report)
    assert "Ship awq <small>decided, better than every other</small>" in page
    assert "What the outcome follows from" not in page


def test_its_decision_is_verified_as_far_as_this_version_can_and_names_the_one_that_replays_it(
    store: ModelStore,
) -> None:
    ended = slipway("verify-decision", RUN, store=store)
    assert ended.returncode == 41
    assert "was made by the rules of Slipway 0.1.0, which this version can't replay" in ended.stderr
    assert "its samples, figures, weights and documents agree" in ended.stderr
    assert "hint: install Slipway 0.1.0, and verify it with that version" in ended.stderr
    weights = store.optimized("awq") / "model.safetensors"
    weights.write_text("other weights")
    assert "optimized/awq/model.safetensors was changed" in slipway("verify-decision", RUN, store=store).stderr


def test_its_measurements_are_scored_by_the_present_rules(store: ModelStore) -> None:
    told = json.loads(slipway("score", RUN, "--set", "task_loss=0.2", "--json", store=store).stdout)
    assert (told["decision"]["winner"], told["decision"]["outcome"]) == ("awq", "unresolved")
    assert "outcome: decided → unresolved" in told["changes"]
    assert "rules: those of Slipway 0.1.0 → those of 0.2.0" in told["changes"]


def test_its_release_is_served_and_a_rollback_from_a_newer_one_serves_it_again(store: ModelStore) -> None:
    variables = environment(store, stand_in=True)
    try:
        assert served(store, variables) == RELEASE
        newer = publish(store, 2, stand_in_variant(store, "newer"))
        assert served(store, variables) == newer
        rolled = slipway("rollback", MODEL, "--to", "1", store=store, variables=variables)
        assert rolled.returncode == 0, rolled.stderr
        found = endpoint(store)
        assert found
        assert found.release == current_release(store) == RELEASE
        assert healthy(found.url)
    finally:
        stage("serve", "--stop", variables=variables)


def served(store: ModelStore, variables: dict[str, str]) -> str:
    """The release that answers once the stage has put in service what is in production."""
    flags = ["--serving", json.dumps(SERVING), "--rollout", json.dumps(ROLLOUT)]
    said = stage("serve", *flags, variables=variables)
    assert said.returncode == 0, said.stderr
    found = endpoint(store)
    assert found
    assert healthy(found.url)
    return found.release


def test_a_new_decision_replaces_it_and_a_rollback_returns_to_it(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY_RUN", RUN)
    reused, decision, _ = select(store, Profile.model_validate({"name": "strict", "task_loss": 0.01}), ["fp16", "awq"])
    assert (reused, decision.winner, current_release(store)) == (False, "fp16", decision.release)
    assert before(store, decision.release) == RELEASE
    rolled = slipway("rollback", MODEL, store=store)
    assert rolled.returncode == 0, rolled.stderr
    assert current_release(store) == RELEASE
    assert json.loads(store.production_metrics.read_text())["schema_version"] == 1
    promote(store, RELEASE)
    assert [each.release for each in decisions(store)] == [RELEASE]
