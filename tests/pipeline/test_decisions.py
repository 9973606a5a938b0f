"""The commands around a decision, as a user meets them: on a store with one or two finished runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from pipeline.commands.options import assignments_of
from pipeline.local.folder import STATE
from pipeline.runs.state import RunState
from pipeline.settings.config import load
from scoring.profile import Profile
from stages.parts.base.errors import NoWinner
from stages.parts.base.files import write_json
from stages.parts.base.serving_settings import Recipe
from stages.parts.base.store import ModelStore
from stages.parts.machine.hardware import Hardware
from stages.parts.records.acquired import ACQUIRED, Acquired
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Drift, Evaluation, Speed
from stages.parts.records.production import Price
from stages.parts.records.variant import VARIANT, Variant
from stages.report.page import collect
from stages.select.selection import select
from tests.samples import MODEL, NOW, evaluation, measured_store, outcome, variant

FIRST, SECOND = "20260102-030405-6a1b", "20260103-030405-6a1b"
VARIANTS = ["fp16", "awq", "gptq"]
MEASURED = {"fp16": (0.80, 10.0, 100.0, 1000), "awq": (0.78, 8.0, 120.0, 400), "gptq": (0.76, 9.0, 110.0, 400)}
"""Quality, latency in ms, tokens per second, bytes."""


def slipway(*arguments: str, store: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "SLIPWAY_RUN"}
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments, "--store", str(store)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def finish(
    store: ModelStore, run: str, profile: Profile, monkeypatch: pytest.MonkeyPatch, names: list[str] = VARIANTS
) -> None:
    """What the engine and the stages from select on leave of a run."""
    monkeypatch.setenv("SLIPWAY_RUN", run)
    _, decision, _ = select(store, profile, names, price=Price(per_hour=1.8, currency="EUR"))
    outcome(store, run, "select", "", "done", key=decision.key, why=decision.reason)
    end(store, run, "Succeeded")


def end(store: ModelStore, run: str, phase: Literal["Succeeded", "Failed"]) -> None:
    collect(store, run, phase).write(store.run(run) / "report.json")
    state = RunState(
        name=run,
        workflow="slipway",
        phase=phase,
        arguments={"model": MODEL},
        nodes=[],
        started_at=NOW,
        finished_at=NOW,
    )
    write_json(store.run(run) / STATE, state)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a store with one run, of which each test gets a copy."""
    store = measured_store(tmp_path_factory.mktemp("finished"), FIRST)
    with pytest.MonkeyPatch.context() as monkeypatch:
        finish(store, FIRST, Profile(name="balanced"), monkeypatch)
    return store.root


@pytest.fixture
def store(tmp_path: Path, finished: Path) -> ModelStore:
    shutil.copytree(finished, tmp_path, symlinks=True, dirs_exist_ok=True)
    return ModelStore(tmp_path, MODEL)


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


def test_a_variant_that_a_later_run_made_again_is_noted_and_still_verified(store):
    shutil.rmtree(store.optimized("awq"))
    base = Acquired.read(store.base / ACQUIRED)
    assert base is not None
    variant(store, "awq", base, content="weights by another group size")
    ended = slipway("verify-decision", FIRST, store=store.root)
    assert ended.returncode == 0, ended.stderr
    assert "note: the weights that were measured are no longer in optimized/awq" in ended.stdout


def test_a_run_without_a_winner_is_verified_with_a_message_of_its_own(tmp_path, monkeypatch):
    store = measured_store(tmp_path, FIRST)
    impossible = {"name": "strict", "constraints": {"ttft_p95_ms": {"max": 0.001}}}
    with pytest.raises(NoWinner):
        finish(store, FIRST, Profile.model_validate(impossible), monkeypatch)
    end(store, FIRST, "Failed")
    said = slipway("verify-decision", store=store.root)
    assert said.returncode == 0, said.stderr
    assert f"verified: that run {FIRST} could choose no variant (" in said.stdout
    assert "None" not in said.stdout


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


def test_a_named_profile_is_scored_with_its_own_limits(store):
    told = json.loads(slipway("score", FIRST, "--profile", "batch", "--json", store=store.root).stdout)
    assert told["decision"]["profile"]["name"] == "batch"
    assert any(each.startswith("constraints: {} → {'quality_recovery'") for each in told["changes"])
    assert told["published"]["winner"] == "awq"


def test_the_same_profile_gives_the_published_result(store):
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
def test_a_contradictory_profile_is_refused(store, arguments, said):
    ended = slipway("score", *arguments, store=store.root)
    assert ended.returncode == 2
    assert said in ended.stderr


def test_compare_lists_only_what_changed_between_two_runs(two_runs):
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
    assert told["winners"][1].startswith(f"{SECOND}: fp16 is better than")
    assert "only once" not in " ".join(told["notes"])


def again(store: ModelStore, monkeypatch: pytest.MonkeyPatch, names: list[str] = VARIANTS, **changed: Any) -> None:
    """The same measurements once more, by a second run, with fields of the evaluations changed."""
    for name in names:
        found = Evaluation.read(store.evaluation(name))
        assert found is not None
        found.model_copy(update=changed).write(store.evaluation(name))
        outcome(store, SECOND, "optimize", name, "done")
        outcome(store, SECOND, "evaluate", name, "done", key=found.key)
    finish(store, SECOND, Profile(name="balanced"), monkeypatch, names)


def compared(store: ModelStore) -> dict[str, Any]:
    ended = slipway("compare", FIRST, SECOND, "--json", store=store.root)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_equal_settings_are_not_a_change_in_a_run_of_fewer_variants(store, monkeypatch):
    again(store, monkeypatch, ["fp16"])
    assert [(each["what"], each["after"]) for each in compared(store)["settings"]] == [("measured", "fp16")]


def test_a_setting_that_changed_for_all_variants_is_listed_once_and_others_by_variant(store, monkeypatch):
    path = store.evaluation("awq")
    document = json.loads(path.read_text())
    document["engine"]["kernel"] = "MarlinKernel"
    write_json(path, document)
    again(store, monkeypatch, tool_versions={"vllm": "0.33.0"})
    found = {each["what"]: (each["before"], each["after"]) for each in compared(store)["settings"]}
    assert found == {"tool_versions.vllm": ("0.32.0", "0.33.0"), "awq.engine.kernel": ("–", "MarlinKernel")}


@pytest.mark.parametrize(("gpus", "beyond"), [((), set()), (("NVIDIA H100, 81559 MiB",), {"latency", "throughput"})])
def test_a_slower_machine_explains_changes_unless_they_are_a_gpus(tmp_path, monkeypatch, gpus, beyond):
    """All is slower by 5 % in the second run, and the machine's processor by 10 %."""
    store = measured_store(tmp_path, FIRST)
    hardware = Hardware(cpu="a cpu", cores=2, memory_bytes=8 << 30, gpus=gpus)
    for run, speed, processor in ((FIRST, 1.0, 1.0), (SECOND, 0.95, 0.9)):
        for name, (quality, latency_ms, throughput, size) in MEASURED.items():
            made = Variant.read(store.optimized(name) / VARIANT)
            assert made is not None
            latency_ms, throughput = latency_ms / speed, throughput * speed
            measured = evaluation(
                store, made, quality=quality, latency_ms=latency_ms, throughput=throughput, weights_bytes=size
            )
            probe = Speed(compute_gflop_per_s=40 * processor, memory_gib_per_s=10 * processor)
            around = Drift(before=probe, after=probe, largest_change=0.0, measured_again=0)
            changed = {"drift": around, "hardware": hardware}
            measured.model_copy(update=changed).write(store.evaluation(name))
            outcome(store, run, "optimize", name, "done", key=made.key)
            outcome(store, run, "evaluate", name, "done", key=measured.key)
        finish(store, run, Profile(name="balanced"), monkeypatch)
        for name in VARIANTS:  # else the second run's would be written over what the first kept
            store.evaluation(name).with_suffix(SAMPLES_SUFFIX).unlink()
    told = compared(store)
    assert {each["metric"] for each in told["metrics"] if each["beyond_noise"]} == beyond
    said = " ".join(told["notes"])
    assert ("10% slower for awq" in said) == (not gpus)
    assert ("that of a GPU is not probed" in said) == bool(gpus)


def test_the_comparison_is_a_table_for_people(two_runs):
    shown = slipway("compare", FIRST, SECOND, store=two_runs.root).stdout
    assert "profile.weights.latency" in shown
    assert "+100.0%" in shown
    assert f"{FIRST}: awq is better than gptq and fp16" in shown


def test_a_run_compared_with_itself_has_no_changes(store):
    told = json.loads(slipway("compare", FIRST, "latest", "--json", store=store.root).stdout)
    assert told["settings"] == []
    assert told["same_winner"] is True
    assert not any(each["beyond_noise"] for each in told["metrics"])


def test_a_copy_of_a_run_from_another_machine_is_compared_by_its_path_and_its_costs(two_runs, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / FIRST
    shutil.move(two_runs.run(FIRST), elsewhere)
    told = json.loads(slipway("compare", str(elsewhere), SECOND, "--json", store=two_runs.root).stdout)
    assert {(each["variant"], each["metric"]) for each in told["metrics"] if each["beyond_noise"]} == {
        ("awq", "latency"),
        ("awq", "throughput"),
    }
    cost = next(note for note in told["notes"] if "tokens of awq cost" in note)
    assert cost == "A million output tokens of awq cost 4.17 EUR in the first run, and 8.33 EUR in the second."


def test_another_run_s_candidates_are_measured_again_by_its_id_or_its_report(store, tmp_path_factory, monkeypatch):
    path = store.evaluation("awq")
    recipe = Recipe(description="KV cache in FP8", kv_cache_dtype="fp8", variants=("awq",))
    found = Evaluation.read(path)
    assert found is not None
    report = store.run(FIRST) / "report.json"
    document = json.loads(report.read_text())
    with_recipe = found.model_copy(update={"variant": "awq+kv-fp8", "recipe": recipe})
    document["evaluations"].append(with_recipe.model_dump(mode="json"))
    document["settings"] = {"optimize": {"candidates": ["org/name-FP8"]}}
    carried = tmp_path_factory.mktemp("elsewhere") / "report.json"
    carried.write_text(json.dumps(document))
    report.write_text(json.dumps(document))
    assert assignments_of(None, store.root) == []
    assert assignments_of(FIRST, store.root) == assignments_of(str(carried), store.root / "empty")
    config = load(assignments=assignments_of(str(carried), store.root))
    assert set(config.optimize.variants) == {"fp16", "awq", "gptq"}
    assert config.optimize.candidates == ("org/name-FP8",)
    assert config.serving.recipes == {"kv-fp8": recipe}
    assert set(config.serving.candidates_of(config.optimize.variants)) == {"fp16", "awq", "gptq", "awq+kv-fp8"}


def test_a_run_that_measured_nothing_has_no_candidates(store):
    report = store.run(FIRST) / "report.json"
    report.write_text(json.dumps(json.loads(report.read_text()) | {"evaluations": []}))
    ended = slipway("run", MODEL, "--candidates-from", FIRST, store=store.root)
    assert ended.returncode == 2
    assert f"{FIRST} measured no candidates" in ended.stderr


def test_a_run_that_is_not_there_is_a_clear_error(store):
    assert slipway("compare", FIRST, "20200101-000000-0000", store=store.root).returncode == 51
    assert slipway("score", "20200101-000000-0000", store=store.root).returncode == 51
