"""A store that version 0.2.0 made by rules 10, in ``store_of_0_2_0``, is still shown, scored, verified, served from and
rolled back."""

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
from stages.parts.records.production import RULES
from stages.parts.releases.release import before, current_release, decisions
from stages.parts.vllm.client import healthy
from stages.report.page import render
from stages.report.run_report import RunReport
from stages.select.selection import select
from stages.select.verify import verify
from tests.samples import MODEL
from tests.serving import ROLLOUT, SERVING, environment, publish, stage, stand_in_variant

FIRST, SECOND = "20260102-030405-6a1b", "20260103-030405-6a1b"
AWQ, FP16 = "0001-awq-9e2400b23bd3", "0002-fp16-c6e7a796df82"


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    shutil.copytree(Path(__file__).with_name("store_of_0_2_0"), tmp_path, dirs_exist_ok=True)
    found = ModelStore(tmp_path, MODEL)
    found.production.symlink_to(Path("releases", FP16))
    return found


def slipway(
    *arguments: str, store: ModelStore, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", *arguments, "--store", str(store.root)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def test_its_decisions_are_read_and_its_runs_listed_shown_and_reported(store: ModelStore) -> None:
    (decision,) = decisions(store)
    assert (decision.winner, decision.outcome, decision.release) == ("fp16", "unresolved", FP16)
    assert "awq     decided" in slipway("runs", store=store).stdout
    shown = slipway("show", FIRST, store=store)
    assert shown.returncode == 0, shown.stderr
    assert "profile balanced: awq: decided, better than every other" in shown.stdout
    report = RunReport.read(store.run(FIRST) / "report.json")
    assert report is not None
    assert "Ship awq <small>decided, better than every other</small>" in render(report)


@pytest.mark.parametrize(("run", "winner"), [(FIRST, "awq"), (SECOND, "fp16")])
def test_its_decisions_are_verified_as_far_as_other_rules_can_be(store: ModelStore, run: str, winner: str) -> None:
    verification = verify(store.run(run))
    assert (verification.winner, verification.findings) == (winner, [])
    assert (verification.replayed_by, verification.not_recomputed) == ("0.2.0", [])
    ended = slipway("verify-decision", run, store=store)
    assert ended.returncode == 41
    assert "was made by the rules of Slipway 0.2.0, which this version can't replay" in ended.stderr
    assert "its samples, figures, weights and documents agree" in ended.stderr
    (store.optimized("awq") / "model.safetensors").write_text("other weights")
    assert "optimized/awq/model.safetensors was changed" in slipway("verify-decision", run, store=store).stderr


def test_its_measurements_are_scored_by_the_present_rules(store: ModelStore) -> None:
    told = json.loads(slipway("score", FIRST, "--json", store=store).stdout)
    assert (told["decision"]["winner"], told["decision"]["outcome"]) == ("awq", "decided")
    assert told["decision"]["rules"] == RULES > told["published"]["rules"]
    assert [each for each in told["changes"] if not each.startswith("rules: ")] == []
    compared = json.loads(slipway("compare", FIRST, SECOND, "--json", store=store).stdout)
    assert compared["same_winner"] is False
    assert not any(each["beyond_noise"] for each in compared["metrics"])


def test_its_releases_are_served_and_rolled_back_to(store: ModelStore) -> None:
    variables = environment(store, stand_in=True)
    try:
        assert served(store, variables) == FP16
        newer = publish(store, 3, stand_in_variant(store, "newer"))
        assert served(store, variables) == newer
        rolled = slipway("rollback", MODEL, "--to", "1", store=store, variables=variables)
        assert rolled.returncode == 0, rolled.stderr
        found = endpoint(store)
        assert found
        assert found.release == current_release(store) == AWQ
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


def test_a_new_decision_replaces_its_own_and_a_rollback_returns_to_it(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY_RUN", FIRST)
    reused, decision, _ = select(store, Profile(name="balanced"), ["fp16", "awq"])
    assert (reused, decision.winner, current_release(store)) == (False, "awq", decision.release)
    (store.run(FIRST) / "report.json").unlink()  # of the decision by the earlier rules
    assert verify(store.run(FIRST)).findings == []
    assert before(store, decision.release) == FP16
    rolled = slipway("rollback", MODEL, store=store)
    assert rolled.returncode == 0, rolled.stderr
    assert current_release(store) == FP16
    assert json.loads(store.production_metrics.read_text())["rules"] == 10
