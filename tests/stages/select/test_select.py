from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scoring.constraints import AtLeast, Constraints
from scoring.profile import Profile, Weights
from stages.parts.base.errors import DamagedModel, NoWinner
from stages.parts.base.store import ModelStore
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Evaluation
from stages.parts.records.production import Production
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.releases.release import current_release
from stages.select.selection import measured_variants, select
from tests.samples import ITEMS, MODEL, base, evaluation, measured_store, outcome, variant

BALANCED = Profile(name="balanced")
VARIANTS = ["fp16", "awq", "gptq"]
RUN = "run-1"


@pytest.fixture(autouse=True)
def in_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY_RUN", RUN)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return measured_store(tmp_path)


def test_the_winner_is_published_with_its_reasons(store):
    reused, decision, placement = select(store, BALANCED, VARIANTS)
    assert (reused, decision.winner, placement) == (False, "awq", "hardlink")
    release = store.releases / decision.release
    assert store.production.resolve() == release.resolve()
    assert decision.release.startswith("0001-awq-")
    source = store.optimized("awq")
    for file in ("model.safetensors", "config.json"):
        assert (release / file).read_bytes() == (source / file).read_bytes()
        assert (release / file).stat().st_ino == (source / file).stat().st_ino
    assert Production.read(store.production_metrics) == decision


def test_the_sentence_agrees_with_the_numbers(store):
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert [each.variant for each in decision.candidates] == ["awq", "fp16", "gptq"]
    assert decision.separated
    assert decision.reason == (
        "awq has the highest score, with a probability of >99% of having it again. "
        "Against fp16: quality -2.5%, p95 latency -20.0%, throughput +20.0%, memory -60.0%."
    )


@pytest.mark.parametrize(
    ("weights", "winner"),
    [
        (Weights(quality=1, latency=0, throughput=0, memory=0), "fp16"),
        (Weights(quality=0, latency=1, throughput=0, memory=0), "awq"),
        (Weights(quality=0.85, latency=0.05, throughput=0.05, memory=0.05), "fp16"),
    ],
)
def test_the_weights_decide(store, weights, winner):
    assert select(store, Profile(name="own", weights=weights), VARIANTS)[1].winner == winner


def test_a_repeated_decision_is_reused_and_changes_nothing(store):
    _, first, _ = select(store, BALANCED, VARIANTS)
    before = store.production_metrics.read_bytes()
    reused, again, _ = select(store, BALANCED, VARIANTS)
    assert reused
    assert again == first
    assert store.production_metrics.read_bytes() == before


def test_another_winner_gets_the_next_number_and_the_old_release_stays(store):
    _, first, _ = select(store, BALANCED, VARIANTS)
    _, second, _ = select(
        store, Profile(name="own", weights=Weights(quality=1, latency=0, throughput=0, memory=0)), VARIANTS
    )
    assert second.release.startswith("0002-fp16-")
    assert {each.name for each in store.releases.iterdir()} == {first.release, second.release}
    assert current_release(store) == second.release


def test_a_release_left_by_a_crash_before_the_switch_is_taken_up(store):
    _, first, _ = select(store, BALANCED, VARIANTS)
    store.production.unlink()
    store.production_metrics.unlink()
    _, again, _ = select(store, BALANCED, VARIANTS)
    assert again.release == first.release
    assert current_release(store) == first.release


def test_a_failed_variant_cannot_win_and_is_named(store):
    outcome(store, RUN, "optimize", "awq", "failed", why="awq cannot quantize LlamaForCausalLM")
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert decision.winner != "awq"
    assert decision.candidates[-1].variant == "awq"
    assert decision.candidates[-1].excluded == "optimize failed: awq cannot quantize LlamaForCausalLM"
    assert decision.reason.endswith("Excluded: awq: optimize failed: awq cannot quantize LlamaForCausalLM.")


def test_a_variant_that_cannot_be_served_here_is_named_with_the_cause_though_an_older_one_was_measured(store):
    outcome(store, RUN, "check", "awq", "left out", why="vLLM has no 4-bit kernel for this GPU")
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert decision.candidates[-1].excluded == "vLLM has no 4-bit kernel for this GPU"


def test_if_only_fp16_is_left_it_wins_and_the_report_says_why(store):
    for name in ("awq", "gptq"):
        outcome(store, RUN, "evaluate", name, "failed", why="vLLM did not start")
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert decision.winner == "fp16"
    assert decision.reason == (
        "fp16 is the only variant that can be chosen. "
        "Excluded: awq: evaluate failed: vLLM did not start; gptq: evaluate failed: vLLM did not start."
    )


def test_a_measurement_that_is_not_finite_cannot_win(store, tmp_path):
    path = store.evaluation("awq")
    document = json.loads(path.read_text())
    document["load"]["output_tokens_per_s"] = float("inf")
    broken = Evaluation.model_validate(document)
    path.write_text(json.dumps(document))
    assert broken.metrics()["throughput"] == float("inf")
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert decision.winner != "awq"
    assert decision.candidates[-1].excluded.startswith("throughput was not measured")


def test_an_evaluation_of_an_older_variant_does_not_count(store):
    made = Variant.read(store.optimized("awq") / VARIANT)
    assert made is not None
    made.model_copy(update={"digest": "0" * 64}).write(store.optimized("awq") / VARIANT)
    acquired = base(ModelStore(store.root, "other/name"))
    measured, excluded = measured_variants(store, acquired, VARIANTS)
    assert excluded["awq"] == "was not measured"
    assert set(measured) == {"fp16", "gptq"}


def test_an_evaluation_that_this_run_did_not_make_does_not_count(store):
    outcome(store, RUN, "evaluate", "awq", "done", key="another key")
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert decision.winner != "awq"
    assert decision.candidates[-1].excluded == "was measured by another run under other conditions"


def test_raw_samples_of_another_evaluation_are_refused(store):
    samples = store.evaluation("awq").with_suffix(SAMPLES_SUFFIX)
    samples.write_text(samples.read_text().replace("evaluation of awq", "evaluation of something else"))
    with pytest.raises(DamagedModel, match="belong to another evaluation"):
        select(store, BALANCED, VARIANTS)
    samples.unlink()
    with pytest.raises(DamagedModel, match="cannot be read"):
        select(store, BALANCED, VARIANTS)


def test_a_variant_that_breaks_a_constraint_cannot_win_and_the_limit_is_named(store):
    strict = Profile(name="strict", constraints=Constraints(quality_recovery=AtLeast(min=0.99)))
    _, decision, _ = select(store, strict, VARIANTS)
    assert decision.winner == "fp16"
    assert "awq: quality_recovery 0.975 is below the minimum of 0.99" in decision.reason


def test_a_variant_that_never_finished_is_excluded(store):
    (store.run(RUN) / "outcomes" / "evaluate-gptq.json").unlink()
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert decision.candidates[-1].excluded == "evaluate did not finish"


def test_without_a_measurement_there_is_no_winner_and_production_stays(store):
    _, first, _ = select(store, BALANCED, VARIANTS)
    for name in VARIANTS:
        outcome(store, RUN, "evaluate", name, "failed", why="no")
    with pytest.raises(NoWinner, match="fp16: evaluate failed: no"):
        select(store, BALANCED, VARIANTS)
    assert current_release(store) == first.release


def test_a_damaged_winner_is_not_published(store):
    (store.optimized("awq") / "model.safetensors").unlink()
    with pytest.raises(DamagedModel, match=r"is damaged: model\.safetensors is missing"):
        select(store, BALANCED, VARIANTS)
    assert not store.production.exists()
    assert not store.production_metrics.exists()


def test_the_variants_are_compared_with_fp16_on_the_very_same_items(store):
    _, decision, _ = select(store, BALANCED, VARIANTS)
    (pair,) = next(each for each in decision.candidates if each.variant == "awq").against_fp16
    assert (pair.task, pair.lost, pair.gained) == ("arc", ITEMS * 2 // 100, 0)
    assert pair.difference == pytest.approx(-0.02)
    assert pair.low < pair.difference < pair.high < 0
    assert pair.p_value is not None
    assert pair.p_value < 1e-9
    assert next(each for each in decision.candidates if each.variant == "fp16").against_fp16 == ()


def test_two_copies_of_one_variant_are_not_separated(tmp_path):
    store = ModelStore(tmp_path, MODEL)
    acquired = base(store)
    for name in ("fp16", "awq", "gptq"):
        made = variant(store, name, acquired)
        figures = (0.5, 20.0, 9.0, 90) if name == "fp16" else (0.5, 10.0, 18.0, 40)
        quality, latency_ms, throughput, weights_bytes = figures
        measured = evaluation(
            store, made, quality=quality, latency_ms=latency_ms, throughput=throughput, weights_bytes=weights_bytes
        )
        outcome(store, RUN, "optimize", name, "done", key=made.key)
        outcome(store, RUN, "evaluate", name, "done", key=measured.key)
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert not decision.separated
    assert decision.winner in ("awq", "gptq")
    assert "the evidence does not separate them" in decision.reason


def test_the_program_prints_why_and_writes_its_outputs(store, tmp_path):
    outputs = tmp_path / "outputs"
    ended = _program(store, outputs, BALANCED.model_dump_json())
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("awq has the highest score")
    assert (outputs / "winner").read_text() == "awq"
    assert (outputs / "release").read_text() == current_release(store)
    assert "reused: awq is in production already" in _program(store, outputs, BALANCED.model_dump_json()).stderr


def test_the_program_refuses_wrong_weights_with_its_exit_code(store, tmp_path):
    ended = _program(
        store,
        tmp_path,
        '{"name": "own", "weights": {"quality": -1, "latency": 0, "throughput": 0, "memory": 1, "speed": 2}}',
    )
    assert ended.returncode == 2
    assert "2 mistakes in --profile" in ended.stderr
    assert "weights.quality: Input should be greater than or equal to 0" in ended.stderr
    assert "weights.speed: unknown field" in ended.stderr


def _program(store: ModelStore, outputs: Path, profile: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stages.select", "--model", MODEL, "--profile", profile],
        env=os.environ | {"SLIPWAY_STORE": str(store.root), "SLIPWAY_OUTPUTS": str(outputs), "SLIPWAY_RUN": RUN},
        capture_output=True,
        text=True,
        check=False,
    )
