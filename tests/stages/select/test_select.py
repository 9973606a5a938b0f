from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scoring.constraints import AtLeast, Constraints
from scoring.criteria import Weights
from scoring.profile import Profile
from stages.parts.base.errors import DamagedModel, Incomplete, NoWinner
from stages.parts.base.files import place, sha256_of
from stages.parts.base.formats import quantized_formats
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.program import outcomes
from stages.parts.base.store import ModelStore
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Evaluation
from stages.parts.records.production import Production
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.releases.release import candidate, current_release
from stages.select.selection import measured_variants, select, tried
from stages.select.stored import BASIS
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


@pytest.mark.parametrize("placed", range(2 * len(VARIANTS)))
def test_a_select_that_is_killed_leaves_no_measurement_without_its_samples(store, monkeypatch, placed):
    select(store, BALANCED, VARIANTS)  # an earlier attempt of the same run
    left = iter(range(placed))

    def place_some(source: Path, target: Path) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        place(source, target)

    monkeypatch.setattr("stages.select.stored.place", place_some)
    with pytest.raises(KeyboardInterrupt):
        select(store, BALANCED, VARIANTS)
    folder = store.run(RUN) / "measurements"
    records = [path for path in folder.glob("*.json") if path.name != BASIS]
    assert len(records) == max(0, placed - len(VARIANTS))
    assert all(path.with_suffix(SAMPLES_SUFFIX).exists() for path in records)


def test_the_sentence_agrees_with_the_numbers(store):
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert [each.variant for each in decision.candidates] == ["awq", "gptq", "fp16"]
    assert (decision.outcome, decision.starts, decision.missing) == ("decided", 3, ())
    assert decision.headline == "awq: decided, better than every other"
    assert decision.reason == (
        "awq is better than gptq and fp16, with a confidence of >99%. "
        "Against fp16: quality -0.5%, latency -20.0%, throughput +20.0%, memory -60.0%."
    )


def test_what_the_outcome_follows_from_is_recorded(store):
    _, decision, _ = select(store, BALANCED, VARIANTS)
    awq, gptq, fp16 = (each.model_dump() for each in decision.candidates)
    # The reference counts 0.5; 1 would be twice as fast, or a quarter of the memory; 0 a loss at the limit, 5 %.
    better = {"latency": math.log2(1.25), "throughput": math.log2(1.2), "memory": math.log(2.5) / math.log(4)}
    counts = {"quality": -math.log(0.995) / math.log(0.95)} | better
    assert awq["normalized"] == pytest.approx({name: (1 + each) / 2 for name, each in counts.items()})
    assert fp16["normalized"] == pytest.approx(dict.fromkeys(counts, 0.5))
    assert awq["score"] == pytest.approx(sum(decision.weights[name] * each for name, each in awq["normalized"].items()))
    assert awq["score_low"] < awq["score"] < awq["score_high"]
    assert awq["chance"] > 0.99
    assert (fp16["score"], fp16["score_low"], fp16["score_high"]) == (0.5, 0.5, 0.5)
    assert awq["raw"]["latency"] / fp16["raw"]["latency"] == pytest.approx(1 + awq["change"]["latency"]["value"])
    assert [(each.other, each.relation) for each in decision.comparisons] == [("gptq", "better"), ("fp16", "better")]
    lead = decision.comparisons[0].model_dump()
    assert lead["lead"] == pytest.approx(awq["score"] - gptq["score"])
    assert lead["low"] < lead["lead"] < lead["high"]
    (loss,) = awq["losses"]
    assert (loss["task"], loss["value"], loss["limit"], loss["verdict"]) == ("arc", pytest.approx(0.005), 0.03, "pass")


def test_a_variant_more_or_less_changes_no_score_and_no_order(store):
    _, two, _ = select(store, BALANCED, ["fp16", "gptq"])
    _, three, _ = select(store, BALANCED, VARIANTS)
    alone, beside = ({each.variant: (each.score, each.normalized) for each in made.candidates} for made in (two, three))
    for name in ("gptq", "fp16"):
        assert beside[name][0] == pytest.approx(alone[name][0])
        assert beside[name][1] == pytest.approx(alone[name][1])
    assert [each.variant for each in two.candidates] == ["gptq", "fp16"]
    assert [each.variant for each in three.candidates] == ["awq", "gptq", "fp16"]


def test_after_a_single_start_the_first_is_chosen_but_nothing_is_settled(tmp_path):
    store = measured_store(tmp_path, RUN)
    for name in VARIANTS:
        on_one_server(store, name)
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert (decision.outcome, decision.winner, decision.starts) == ("unresolved", "awq", 1)
    assert decision.reason.startswith(
        "awq ranks first, but there are too few data to tell whether it is better than gptq and fp16: it is the best "
        "by what was measured, and is chosen until more is known. Each server was started only once"
    )
    assert {each.relation for each in decision.comparisons} == {"open"}
    assert all(each.low is None and each.confidence == 0.5 for each in decision.comparisons)
    assert all(each.change["latency"].low is None for each in decision.candidates if each.change)
    assert decision.candidates[0].change["quality"].low is not None
    assert decision.candidates[0].chance is None
    assert current_release(store) == decision.release


def test_a_variant_that_was_looked_at_less_often_was_beaten_by_then(store):
    for name in VARIANTS:
        found = read(store, name).model_copy(update={"looks": (0.3,) if name == "gptq" else (0.3, 0.6, 0.9)})
        found.write(store.evaluation(name))
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert [each.variant for each in decision.candidates] == ["awq", "fp16", "gptq"]
    assert [each.other for each in decision.comparisons] == ["fp16"]
    assert decision.candidates[-1].score is not None


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
    left = store.path / ".building" / f"releases-{first.release}" / "new"  # where a loss of power kept both names
    left.mkdir(parents=True)
    reused, again, _ = select(store, BALANCED, VARIANTS)
    assert reused
    assert not left.exists()
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


def read(store: ModelStore, name: str) -> Evaluation:
    found = Evaluation.read(store.evaluation(name))
    assert found is not None
    return found


def on_one_server(store: ModelStore, name: str) -> None:
    """Change the samples of a variant: all rounds were on the first start of its server."""
    path = store.evaluation(name).with_suffix(SAMPLES_SUFFIX)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(each | {"restart": 0} if "restart" in each else each) + "\n" for each in lines))
    read(store, name).model_copy(update={"samples_sha256": sha256_of(path)}).write(store.evaluation(name))


def test_a_failed_variant_cannot_win_and_is_named(store):
    outcome(store, RUN, "optimize", "awq", "failed", why="awq cannot quantize LlamaForCausalLM")
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert decision.winner != "awq"
    assert decision.candidates[-1].variant == "awq"
    assert decision.candidates[-1].excluded == "optimize failed: awq cannot quantize LlamaForCausalLM"
    assert decision.reason.startswith(
        "Incomplete: awq could not be made or measured. Of the others, gptq is better than"
    )
    assert decision.reason.endswith("Excluded: awq: optimize failed: awq cannot quantize LlamaForCausalLM.")
    assert (decision.outcome, decision.missing) == ("incomplete", ("awq",))
    assert decision.headline == "gptq: incomplete, without awq"


def test_a_variant_that_cannot_be_served_here_is_named_with_the_cause_though_an_older_one_was_measured(store):
    outcome(store, RUN, "check", "awq", "left out", why="vLLM has no 4-bit kernel for this GPU")
    _, decision, _ = select(store, BALANCED, [*VARIANTS, "awq+ngram"])
    assert {each.excluded for each in decision.candidates[-2:]} == {"vLLM has no 4-bit kernel for this GPU"}
    # That was known before anything was made: nothing is missing.
    assert (decision.outcome, decision.missing) == ("decided", ())


def test_what_auto_did_not_try_is_neither_excluded_nor_missing(store, monkeypatch):
    untried = [name for name in quantized_formats() if name not in VARIANTS]
    for name in untried:
        outcome(store, RUN, "check", name, "not tried", why="other variants come first")
    assert tried(store, Optimize(), "fp16") == ["fp16", "awq", "gptq"]
    monkeypatch.delenv("SLIPWAY_RUN")
    assert tried(store, Optimize(), "fp16") == ["fp16", "awq", "gptq"]
    assert tried(store, Optimize(variants=("auto", "int8")), "fp16") == ["fp16", "awq", "gptq", "int8"]


def test_a_variant_that_failed_a_gate_before_any_load_is_excluded_by_it_and_not_missing(store):
    outcome(store, RUN, "evaluate", "awq", "left out", why="failed before its load: loses 9% of arc")
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert decision.candidates[-1].excluded == "failed before its load: loses 9% of arc"
    assert (decision.outcome, decision.missing) == ("decided", ())


def test_if_only_fp16_is_left_it_wins_and_the_report_says_why(store):
    for name in ("awq", "gptq"):
        outcome(store, RUN, "evaluate", name, "failed", why="vLLM did not start")
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert decision.winner == "fp16"
    assert decision.reason == (
        "Incomplete: awq and gptq could not be made or measured. "
        "Of the others, fp16 is the only variant that can be chosen. "
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
    assert (decision.outcome, decision.missing) == ("incomplete", ("awq",))


def test_an_evaluation_of_an_older_variant_does_not_count(store):
    made = Variant.read(store.optimized("awq") / VARIANT)
    assert made is not None
    made.model_copy(update={"digest": "0" * 64}).write(store.optimized("awq") / VARIANT)
    acquired = base(ModelStore(store.root, "other/name"))
    measured, excluded, missing = measured_variants(store, acquired, VARIANTS)
    assert excluded["awq"] == "was not measured"
    assert missing == ("awq",)
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
    strict = Profile(name="strict", constraints=Constraints(quality_recovery=AtLeast(min=0.998)))
    _, decision, _ = select(store, strict, VARIANTS)
    assert (decision.winner, decision.outcome) == ("fp16", "decided")
    assert decision.headline == "fp16: decided, the only choice"
    assert "awq: quality_recovery 0.995 is below the minimum of 0.998" in decision.reason


def test_a_variant_that_may_lose_too_much_on_one_task_cannot_win(store):
    strict = Profile(name="strict", task_loss=0.006)
    _, decision, _ = select(store, strict, VARIANTS)
    by_name = {each.variant: each for each in decision.candidates}
    assert decision.winner == "fp16"
    assert by_name["awq"].excluded.startswith(
        "may lose more than 0.6% of arc: 0.5% by these items, up to 0.7% by chance"
    )
    assert by_name["gptq"].excluded.startswith("may lose more than 0.6% of arc: 0.8% by these items")
    assert [each.losses[0].verdict for each in (by_name["awq"], by_name["gptq"])] == ["unclear", "unclear"]


def test_fixed_values_or_another_variant_may_stand_in_for_fp16(store):
    for name in ("optimize-fp16", "evaluate-fp16"):
        (store.run(RUN) / "outcomes" / f"{name}.json").unlink()
    with pytest.raises(NoWinner, match="the reference fp16 was not measured, so nothing can be compared with it"):
        select(store, BALANCED, VARIANTS)
    values = {"quality": 0.8, "latency": 10, "throughput": 100, "memory": 1000}
    _, by_values, _ = select(store, Profile.model_validate({"name": "own", "reference": values}), VARIANTS)
    assert (by_values.outcome, by_values.winner) == ("incomplete", "awq")
    assert "Against the profile's values: quality -0.5% (within noise), latency -20.0%" in by_values.reason
    _, by_variant, _ = select(store, Profile(name="own", reference="gptq"), VARIANTS)
    assert by_variant.winner == "awq"
    assert "Against gptq: quality +0.3%" in by_variant.reason


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
    assert (pair.task, pair.lost, pair.gained) == ("arc", ITEMS * 4 // 1000, 0)
    assert pair.difference == pytest.approx(-0.004)
    assert pair.low < pair.difference < pair.high < 0
    assert pair.p_value is not None
    assert pair.p_value < 1e-4
    assert next(each for each in decision.candidates if each.variant == "fp16").against_fp16 == ()


def test_two_copies_of_one_variant_are_equivalent(tmp_path):
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
    assert (decision.outcome, decision.winner) == ("equivalent", "awq")
    assert decision.headline == "awq: equivalent to gptq, and the cheapest to run"
    assert decision.reason.startswith(
        "awq and gptq are equivalent: they differ by less than 0.5% in quality, 3% in speed and 1% in memory. "
        "Every other is worse. awq is chosen as the cheapest to run, by memory, then by speed."
    )


def test_the_program_prints_why_and_writes_its_outputs(store, tmp_path):
    outputs = tmp_path / "outputs"
    ended = _program(store, outputs, BALANCED.model_dump_json())
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("awq is better than fp16")
    assert [(outputs / name).read_text() for name in ("winner", "outcome")] == ["awq", "decided"]
    assert (outputs / "release").read_text() == current_release(store)
    assert (
        "reused: awq: decided, better than every other; it is in production already"
        in _program(store, outputs, BALANCED.model_dump_json()).stderr
    )


def test_an_incomplete_decision_is_published_but_reaches_no_client_unless_that_is_allowed(store, tmp_path):
    outcome(store, RUN, "evaluate", "awq", "failed", why="vLLM did not start")
    ended = _program(store, tmp_path / "outputs", BALANCED.model_dump_json())
    assert ended.returncode == Incomplete.exit_code == 45
    assert "error: Incomplete: awq could not be made or measured. Of the others, fp16 is the only" in ended.stderr
    assert "is published, but neither served nor put in production" in ended.stderr
    assert "hint: run again for what is missing; or with --allow-incomplete; or roll it out as it is" in ended.stderr
    assert (tmp_path / "outputs" / "outcome").read_text() == "incomplete"
    assert (current_release(store), candidate(store)) == (None, (tmp_path / "outputs" / "release").read_text())
    # Its outcome is a decision, which the report shows.
    assert [each.result for each in outcomes(store.run(RUN)) if each.stage == "select"] == ["done"]
    allowed = _program(store, tmp_path / "outputs", BALANCED.model_dump_json(), allow=True)
    assert allowed.returncode == 0, allowed.stderr
    assert "reused: fp16: incomplete, without awq; it is in production already" in allowed.stderr
    assert current_release(store) == (tmp_path / "outputs" / "release").read_text()
    again = _program(store, tmp_path / "outputs", BALANCED.model_dump_json())
    assert (again.returncode, "is in production already\n" in again.stderr) == (45, True)


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


def _program(store: ModelStore, outputs: Path, profile: str, allow: bool = False) -> subprocess.CompletedProcess[str]:
    optimize = json.dumps({"variants": VARIANTS[:2], "allow_incomplete": allow})
    return subprocess.run(
        [sys.executable, "-m", "stages.select", "--model", MODEL, "--profile", profile, "--optimize", optimize],
        env=os.environ | {"SLIPWAY_STORE": str(store.root), "SLIPWAY_OUTPUTS": str(outputs), "SLIPWAY_RUN": RUN},
        capture_output=True,
        text=True,
        check=False,
    )
