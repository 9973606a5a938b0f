"""How far variants diverge from fp16, and that a variant that diverges too far cannot win."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from scoring.profile import Profile
from scoring.results import divergence_measures
from stages.parts.base.errors import DamagedModel
from stages.parts.base.settings import CONFIGS
from stages.parts.base.store import ModelStore
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.samples.evidence import divergences
from stages.parts.samples.lines import Samples, read_samples, write_samples
from stages.select.selection import select
from tests.samples import MODEL, Details, base, evaluation, held_out, samples_path, variant

BALANCED = CONFIGS / "profiles" / "balanced.yaml"
PLAIN: dict[str, Any] = {"latency_ms": 10.0, "throughput": 100.0, "weights_bytes": 1000}
BETTER: dict[str, Any] = {"latency_ms": 5.0, "throughput": 200.0, "weights_bytes": 400}
VARIANTS = ["fp16", "awq", "gptq"]


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path, MODEL)


def measured(store: ModelStore, **likeliest: float) -> dict[str, Evaluation]:
    """The probability of one token for each variant (fp16: 0.7). All scores are alike; 4-bit is faster and smaller."""
    acquired = base(store)
    return {
        name: evaluation(
            store,
            variant(store, name, acquired),
            quality=0.8,
            details=Details(likeliest=each),
            **(PLAIN if name == "fp16" else BETTER),
        )
        for name, each in ({"fp16": 0.7} | likeliest).items()
    }


def samples(store: ModelStore, evaluations: dict[str, Evaluation]) -> dict[str, Samples]:
    return {name: read_samples(samples_path(store, name), each) for name, each in evaluations.items()}


def test_a_variant_is_compared_with_fp16_place_by_place(store: ModelStore) -> None:
    evaluations = measured(store, awq=0.6, gptq=0.7)
    found = divergences(samples(store, evaluations), "fp16")
    assert set(found) == {"awq", "gptq"}
    assert found["gptq"].kl == 0.0
    # 0.7 ln(0.7/0.6) + 0.2 ln(0.2/0.3) + 0.1 ln 1
    assert found["awq"].kl == pytest.approx(0.7 * math.log(7 / 6) + 0.2 * math.log(2 / 3), abs=1e-6)
    assert (found["awq"].documents, found["awq"].tokens, found["awq"].top1_agreement) == (4, 8, 1.0)


def test_greedy_answers_are_compared_where_both_have_them(store: ModelStore) -> None:
    given = samples(store, measured(store, awq=0.6))
    ours = with_documents(given["fp16"], continued=(1, 2, 3, 4))
    first, *others = ours.held_out
    theirs = replace(ours, held_out=(first.model_copy(update={"continued": (1, 2, 9, 9)}), *others))
    told = divergences({"fp16": ours, "awq": theirs}, "fp16")["awq"]
    assert (told.greedy_agreement, told.greedy_prefix) == (0.75, 0.875)
    assert told.greedy_low is not None
    assert told.greedy_low < 0.75
    older = divergences({"fp16": ours, "awq": given["awq"]}, "fp16")["awq"]
    assert older.greedy_agreement is None


def with_documents(samples: Samples, **changed: Any) -> Samples:
    return replace(samples, held_out=tuple(each.model_copy(update=changed) for each in samples.held_out))


def test_without_the_reference_or_on_another_text_nothing_is_known(store: ModelStore) -> None:
    given = samples(store, measured(store, awq=0.6))
    assert divergences({"awq": given["awq"]}, "fp16") == {}
    assert divergences(given | {"awq": with_documents(given["awq"], tokens=(9, 9, 9))}, "fp16") == {}
    assert divergences(given | {"awq": replace(given["awq"], held_out=())}, "fp16") == {}
    nothing = {"kl_divergence": None, "top1_agreement": None, "greedy_agreement": None}
    assert divergence_measures(None, is_reference=False) == nothing
    assert divergence_measures(None, is_reference=True) == {
        "kl_divergence": 0.0,
        "top1_agreement": 1.0,
        "greedy_agreement": 1.0,
    }


@pytest.mark.parametrize("logprobs", [(), ((-1.0,), (-1.0,)), ((-1.0,), (-1.0, -2.0)), ((-2.0, -1.0),) * 2])
def test_invalid_distributions_are_damage(store: ModelStore, logprobs: Any) -> None:
    given = samples(store, measured(store, awq=0.6))
    broken = with_documents(given["awq"], logprobs=logprobs)
    with pytest.raises(DamagedModel, match="awq"):
        divergences(given | {"awq": broken}, "fp16")


def test_a_damaged_variant_cannot_win_under_balanced_even_if_no_task_shows_it(store: ModelStore) -> None:
    measured(store, awq=0.2, gptq=0.68)
    profile = Profile.model_validate({"name": "balanced"} | yaml.safe_load(BALANCED.read_text()))
    _, decision, _ = select(store, profile, VARIANTS)
    assert decision.winner == "gptq"
    by_name = {each.variant: each for each in decision.candidates}
    assert by_name["awq"].excluded is not None
    assert "kl_divergence 0.62" in by_name["awq"].excluded
    assert "above the maximum of 0.1" in by_name["awq"].excluded
    assert by_name["awq"].divergence is not None
    assert by_name["gptq"].divergence is not None
    assert by_name["gptq"].divergence.kl < 0.01
    assert by_name["fp16"].divergence is None


def test_a_variant_that_cannot_win_dominates_no_other(store: ModelStore) -> None:
    evaluations = measured(store, awq=0.2, gptq=0.68)
    made = Variant.read(store.optimized("awq") / VARIANT)
    assert made is not None
    figures = {name: value / 2 for name, value in evaluations["awq"].metrics().items()}
    evaluation(
        store,
        made,
        quality=0.8,
        latency_ms=figures["latency"],
        throughput=1000.0,
        weights_bytes=int(figures["memory"]),
        details=Details(likeliest=0.2),
    )
    profile = Profile.model_validate({"name": "balanced"} | yaml.safe_load(BALANCED.read_text()))
    _, decision, _ = select(store, profile, VARIANTS)
    assert decision.winner == "gptq"
    assert {each.variant: each.pareto for each in decision.candidates} == {"gptq": True, "fp16": False, "awq": None}


def test_a_divergence_that_may_exceed_its_limit_is_noted(store: ModelStore) -> None:
    evaluations = measured(store, awq=0.6)
    given = samples(store, evaluations)["awq"]
    half = tuple(held_out(each.document, 0.7) for each in given.held_out[:2])  # like fp16's
    changed = replace(given, held_out=half + given.held_out[2:])
    write_samples(samples_path(store, "awq"), evaluations["awq"].key, changed)
    apart = divergences(samples(store, evaluations), "fp16")["awq"]
    limit = 1.2 * apart.kl
    assert limit < apart.kl_high
    profile = Profile.model_validate({"name": "own", "constraints": {"kl_divergence": {"max": limit}}})
    _, decision, _ = select(store, profile, ["fp16", "awq"])
    assert decision.winner == "awq"
    assert decision.notes[0].startswith(f"awq meets the maximum of {limit:.12g} for kl_divergence with")


def test_the_decision_is_kept_with_divergence_and_recovery(store: ModelStore) -> None:
    measured(store, awq=0.69, gptq=0.68)
    select(store, Profile.model_validate({"name": "mine"}), VARIANTS)
    written = json.loads(store.production_metrics.read_text())
    awq = next(each for each in written["candidates"] if each["variant"] == "awq")
    assert awq["recovery"] == {"arc": 1.0}
    assert awq["divergence"]["kl"] > 0
    assert samples_path(store, "awq").exists()
