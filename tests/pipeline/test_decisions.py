"""The commands around a decision, as a user meets them: on a store with one or two finished runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.local.state import STATE, RunState
from scoring.profile import Profile
from stages.records import VARIANT, Evaluation, Price, Variant
from stages.report.page import collect
from stages.select.selection import select
from stages.store import ModelStore, write_json
from tests.samples import MODEL, NOW, evaluation, measured_store, outcome

FIRST, SECOND = "20260102-030405-6a1b", "20260103-030405-6a1b"
VARIANTS = ["fp16", "awq", "gptq"]


def slipway(*arguments: str, store: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "SLIPWAY_RUN"}
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments, "--store", str(store)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def finish(store: ModelStore, run: str, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine and the stages from select on leave of a run."""
    monkeypatch.setenv("SLIPWAY_RUN", run)
    _, decision, _ = select(store, profile, VARIANTS, price=Price(per_hour=1.8, currency="EUR"))
    outcome(store, run, "select", "", "done", key=decision.key, why=decision.reason)
    collect(store, run, "Succeeded").write(store.run(run) / "report.json")
    state = RunState(
        name=run,
        workflow="slipway",
        phase="Succeeded",
        arguments={"model": MODEL},
        nodes=[],
        started_at=NOW,
        finished_at=NOW,
    )
    write_json(store.run(run) / STATE, state)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    store = measured_store(tmp_path, FIRST)
    finish(store, FIRST, Profile(name="balanced"), monkeypatch)
    return store


@pytest.fixture
def two_runs(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    """In the second awq is half as fast, and the profile looks at quality alone."""
    for name in VARIANTS:
        before = Evaluation.read(store.evaluation(name))
        assert before is not None
        figures = before.metrics()
        slower = 2 if name == "awq" else 1
        made = Variant.read(store.optimized(name) / VARIANT)
        assert made is not None
        measured = evaluation(
            store,
            made,
            quality=figures["quality"],
            latency_ms=figures["latency"] * slower,
            throughput=figures["throughput"] / slower,
            weights_bytes=int(figures["memory"]),
        )
        outcome(store, SECOND, "optimize", name, "done", key=made.key)
        outcome(store, SECOND, "evaluate", name, "done", key=measured.key)
    weights = {"quality": 1, "latency": 0, "throughput": 0, "memory": 0}
    finish(store, SECOND, Profile.model_validate({"name": "mine", "weights": weights}), monkeypatch)
    return store


@pytest.mark.parametrize("command", ["verify-decision", "score", "compare"])
def test_every_command_has_help_with_an_example(command, tmp_path):
    ended = slipway(command, "--help", store=tmp_path)
    assert ended.returncode == 0
    assert f"Example: slipway {command}" in " ".join(ended.stdout.split())


def test_a_verified_decision_says_so(store):
    ended = slipway("verify-decision", store=store.root)
    assert ended.returncode == 0, ended.stderr
    assert f"verified: the decision of run {FIRST} for awq follows from its samples" in ended.stdout
    told = json.loads(slipway("verify-decision", FIRST, "--json", store=store.root).stdout)
    assert (told["run"], told["winner"], told["findings"]) == (FIRST, "awq", [])


def test_a_decision_that_does_not_follow_names_everything_and_fails(store):
    (store.optimized("gptq") / "config.json").write_text("[]")
    document = json.loads(store.production_metrics.read_text())
    write_json(store.production_metrics, document | {"winner": "fp16"})
    ended = slipway("verify-decision", "latest", store=store.root)
    assert ended.returncode == 41
    assert "2 things do not agree" in ended.stderr
    assert 'production_metrics.json: winner is "fp16", recomputed "awq"' in ended.stderr
    assert "optimized/gptq/config.json was changed" in ended.stderr
    told = slipway("verify-decision", "latest", "--json", store=store.root)
    assert told.returncode == 41
    assert json.loads(told.stdout)["verified"] is False
    assert len(json.loads(told.stdout)["findings"]) == 2


def test_other_weights_score_again_without_publishing(store):
    before = sorted(path for path in store.path.rglob("*"))
    ended = slipway(
        "score", FIRST, "--set", "weights.quality=5", "--set", "profile.weights.latency=0", store=store.root
    )
    assert ended.returncode == 0, ended.stderr
    assert "nothing is published" in ended.stdout
    assert "changed: winner: awq → fp16" in ended.stdout
    assert "changed: weight of latency: 20% → 0%" in ended.stdout
    assert sorted(path for path in store.path.rglob("*")) == before


def test_a_named_profile_is_scored_with_its_own_normalization(store):
    told = json.loads(slipway("score", FIRST, "--profile", "batch", "--json", store=store.root).stdout)
    assert told["decision"]["profile"]["name"] == "batch"
    assert any(each.startswith("normalization: min-max → relative") for each in told["changes"])
    assert told["published"]["winner"] == "awq"


def test_the_same_profile_comes_to_what_was_published(store):
    told = json.loads(slipway("score", "--json", store=store.root).stdout)
    assert told["changes"] == []
    elsewhere = {"run", "release", "decided_at"}
    published = {name: value for name, value in told["published"].items() if name not in elsewhere}
    assert {name: value for name, value in told["decision"].items() if name not in elsewhere} == published


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--profile", "chatbt"], "did you mean 'chatbot'?"),
        (["--set", "weights.speed=1"], "weights.speed: unknown field"),
        (["--set", "weights.latency"], "not of the form"),
        (["--set", "weights.latency=-1"], "greater than or equal to 0"),
    ],
)
def test_a_profile_that_means_nothing_is_refused(store, arguments, said):
    ended = slipway("score", *arguments, store=store.root)
    assert ended.returncode == 2
    assert said in ended.stderr


def test_what_changed_between_two_runs_is_told_and_what_did_not_is_left_out(two_runs):
    ended = slipway("compare", FIRST, SECOND, "--json", store=two_runs.root)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert {each["what"] for each in told["settings"]} == {
        "profile.name",
        *(f"profile.weights.{each}" for each in ("quality", "latency", "throughput", "memory")),
    }
    moved = {(each["variant"], each["metric"]): each for each in told["metrics"] if each["beyond_noise"]}
    assert set(moved) == {("awq", "latency"), ("awq", "throughput")}
    assert moved["awq", "latency"]["change"] == pytest.approx(1.0)
    assert told["same_winner"] is False
    assert told["winners"][1].startswith(f"{SECOND}: fp16 has the highest score")


def test_the_comparison_is_a_table_for_people(two_runs):
    shown = slipway("compare", FIRST, SECOND, store=two_runs.root).stdout
    assert "profile.weights.latency" in shown
    assert "+100.0%" in shown
    assert f"{FIRST}: awq has the highest score" in shown


def test_a_run_compared_with_itself_has_no_changes(store):
    told = json.loads(slipway("compare", FIRST, "latest", "--json", store=store.root).stdout)
    assert told["settings"] == []
    assert told["same_winner"] is True
    assert not any(each["beyond_noise"] for each in told["metrics"])


def test_a_run_that_is_not_there_is_a_clear_error(store):
    assert slipway("compare", FIRST, "20200101-000000-0000", store=store.root).returncode == 51
    assert slipway("score", "20200101-000000-0000", store=store.root).returncode == 51
