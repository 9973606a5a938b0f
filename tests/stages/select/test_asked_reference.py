"""A reference that does not fit where the variants are served: it was asked the questions, here or elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from scoring.constraints import AtLeast, Constraints
from scoring.profile import Profile
from stages.parts.base.errors import ConfigError, NoWinner
from stages.parts.base.store import ModelStore
from stages.parts.records.answers import all_answers, answers_paths, are_kept
from stages.parts.records.evaluation import SAMPLES_SUFFIX, Evaluation
from stages.parts.samples.lines import export_answers, import_answers
from stages.report.page import collect, render
from stages.select.selection import select
from stages.select.verify import verify
from tests.samples import answers, measured_store, outcome

RUN = "20260102-030405-6a1b"
VARIANTS = ["fp16", "awq", "gptq"]
TOO_LARGE = "fp16 needs 140.0 GiB for weights and KV cache, and this machine has 24.0"
PROFILE = Profile(name="balanced")


def without_fp16(root: Path, *, kept: bool = True) -> ModelStore:
    """A store in which awq and gptq were measured, and of fp16 at most the answers were kept."""
    store = measured_store(root, RUN)
    evaluation = Evaluation.read(store.evaluation("fp16"))
    assert evaluation
    if kept:
        answers(store, evaluation)
    for path in (store.evaluation("fp16"), store.evaluation("fp16").with_suffix(SAMPLES_SUFFIX)):
        path.unlink()
    outcome(store, RUN, "check", "fp16", "left out", why=TOO_LARGE)
    return store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setenv("SLIPWAY_RUN", RUN)
    return without_fp16(tmp_path)


def test_losses_are_judged_by_its_answers_and_the_rest_by_the_first_variant(store: ModelStore) -> None:
    _, decision, _ = select(store, PROFILE, VARIANTS)
    assert (decision.winner, decision.outcome, decision.anchor) == ("awq", "decided", "awq")
    assert decision.reason == (
        f"awq is better than gptq, with a confidence of >99%. Against fp16: quality -0.5%. Excluded: fp16: {TOO_LARGE}."
    )
    assert decision.notes[0] == (
        "fp16 was asked the questions and not loaded, because it does not fit as the variants are served: its answers "
        "are those of vllm 0.32.0 on an H200, 2026-01-02."
    )
    gptq = next(candidate for candidate in decision.candidates if candidate.variant == "gptq")
    assert gptq.change["latency"].value == pytest.approx(9 / 8 - 1)
    assert gptq.change["quality"].value == pytest.approx(0.794 / 0.8 - 1)
    assert gptq.losses
    assert gptq.divergence


def test_the_leads_are_those_that_a_loaded_reference_gives(store: ModelStore, tmp_path: Path) -> None:
    _, decision, _ = select(store, PROFILE, VARIANTS)
    _, whole, _ = select(measured_store(tmp_path / "whole", RUN), PROFILE, VARIANTS)
    comparisons = {comparison.other: comparison for comparison in whole.comparisons}
    # Nothing is beyond its anchors, so that the scale shifts all scores alike.
    assert decision.comparisons[0].lead == pytest.approx(comparisons["gptq"].lead, abs=1e-6)
    assert decision.comparisons[0].relation == comparisons["gptq"].relation


def test_a_gate_needs_the_answers(store: ModelStore) -> None:
    strict = Profile(name="strict", constraints=Constraints(quality_recovery=AtLeast(min=0.994)))
    _, decision, _ = select(store, strict, VARIANTS)
    excluded = {candidate.variant: candidate.excluded for candidate in decision.candidates}
    assert excluded["awq"] is None
    assert "quality_recovery" in str(excluded["gptq"])


def test_without_its_answers_nothing_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPWAY_RUN", RUN)
    with pytest.raises(NoWinner, match="the reference fp16 was not measured"):
        select(without_fp16(tmp_path, kept=False), PROFILE, VARIANTS)


def test_the_decision_is_verified_with_the_answers(store: ModelStore) -> None:
    select(store, PROFILE, VARIANTS)
    collect(store, RUN, "Succeeded").write(store.run(RUN) / "report.json")
    verdict = verify(store.run(RUN))
    assert (verdict.winner, verdict.findings) == ("awq", [])
    path = store.run(RUN) / "measurements" / f"answers{SAMPLES_SUFFIX}"
    text = path.read_text()
    path.unlink()
    path.write_text(text.replace('"correct":0.0', '"correct":1.0', 10))
    findings = verify(store.run(RUN)).findings
    assert any("answers.samples.jsonl has sha256" in finding for finding in findings)
    assert any(finding.startswith("answers of fp16: arc is 0.8, the samples give") for finding in findings), findings
    assert any("quality" in finding and "decision.json" in finding for finding in findings), findings


def test_the_report_says_what_is_compared_with_what(store: ModelStore) -> None:
    _, decision, _ = select(store, PROFILE, VARIANTS)
    outcome(store, RUN, "select", "", "done", key=decision.key, why=decision.reason)
    page = render(collect(store, RUN, "Succeeded"))
    assert "Changes are relative to fp16 in quality, and awq in speed and memory" in page
    assert "fp16 was asked the questions and not loaded" in page


def test_another_reference_leaves_the_loss_against_16_bit_unknown(store: ModelStore) -> None:
    _, decision, _ = select(store, Profile(name="balanced", reference="awq"), ["awq", "gptq"])
    assert decision.reason.startswith("The loss against 16 bit is not known: awq took the place of fp16. awq is better")


def test_answers_are_carried_to_another_store(store: ModelStore, tmp_path: Path) -> None:
    text, other = export_answers(store), without_fp16(tmp_path / "other", kept=False)
    assert not are_kept(other, "fp16", None, ("arc",))
    (kept,) = import_answers(other.root, text)
    assert list(all_answers(other)) == [kept] == list(all_answers(store))
    _, decision, _ = select(other, PROFILE, VARIANTS)
    assert decision.winner == "awq"


@pytest.mark.parametrize("wrong", ["", "{}\n", "not JSON\n", '{"model": 3}\n'])
def test_what_is_no_answers_is_refused(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ConfigError, match="no answers of a reference"):
        import_answers(tmp_path, wrong)
    assert not list(tmp_path.iterdir())


def test_changed_answers_are_refused(store: ModelStore, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="were changed"):
        import_answers(tmp_path / "other", export_answers(store).replace('"correct":0.0', '"correct":1.0', 1))


def test_answers_count_for_their_weights_and_tasks_alone(store: ModelStore) -> None:
    (kept,) = all_answers(store)
    assert are_kept(store, "fp16", kept.commit, ("arc",))
    assert not are_kept(store, "fp16", "d" * 40, ("arc",))
    assert not are_kept(store, "fp16", kept.commit, ("arc", "text"))
    assert not are_kept(store, "int8", kept.commit, ("arc",))
    record, samples = answers_paths(store, kept.key)
    assert record.is_file()
    assert samples.is_file()
