"""The reference where it does not fit as the variants are served: asked elsewhere, or its answers kept before. By
stand-ins for vLLM and lm-eval, which note what they are asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.parts.base.store import ModelStore
from stages.parts.records.answers import all_answers
from tests.extras import need
from tests.samples import base
from tests.serving import MODEL, processes_with, stand_in_variant
from tests.stages.evaluate.test_measure import done, evaluate, evaluation, journal, results

ELSEWHERE = {"reference": {"tensor_parallel_size": 1}}
KEPT = {"reference": {"kept": True}}


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    need("vllm")
    store = ModelStore(tmp_path / "store", MODEL)
    base(store)
    for name in ("fp16", "b", "wrong"):
        stand_in_variant(store, name)
    return store


def test_it_is_asked_first_and_never_loaded_and_its_answers_are_kept(store: ModelStore) -> None:
    said = evaluate(store, "b,wrong", ELSEWHERE, quality_limit=200)
    assert said.returncode == 0, said.stderr
    moments = done(store)
    assert moments[:2] == ["start fp16", "quality fp16 0-99"]
    assert not [moment for moment in moments if moment.startswith("load fp16")]
    assert done(store, "load") == ["load b 0"]  # the only one that can be chosen
    assert moments.index("start b") > max(number for number, moment in enumerate(moments) if " fp16" in moment)
    assert results(store) == {"b": "done", "wrong": "left out"}
    assert not store.evaluation("fp16").exists()
    assert evaluation(store, "b").schedule
    (kept,) = all_answers(store)
    assert (kept.variant, kept.questions["quality_tasks"]) == ("fp16", ["questions"])
    assert kept.quality[0].items >= 100
    assert not processes_with(str(store.root))
    journal(store).unlink()
    again = evaluate(store, "b,wrong", KEPT, quality_limit=200, output_tokens=8)
    assert again.returncode == 0, again.stderr
    assert "fp16 is not served: its answers are those of vllm" in again.stderr
    assert not [moment for moment in done(store) if " fp16" in moment]
    assert results(store) == {"b": "done", "wrong": "left out"}


def test_the_answers_of_a_measured_reference_are_kept_too(store: ModelStore) -> None:
    said = evaluate(store, "fp16,b")
    assert said.returncode == 0, said.stderr
    (kept,) = all_answers(store)
    assert kept.quality == evaluation(store, "fp16").quality


def test_answers_to_other_questions_do_not_count(store: ModelStore) -> None:
    assert evaluate(store, "b", ELSEWHERE).returncode == 0
    said = evaluate(store, "b", KEPT, divergence_documents=2)
    assert said.returncode == 2
    assert "the answers of fp16 that were kept are to other questions, or of other weights" in said.stderr


def test_it_fails_the_measurement_if_it_can_not_be_asked(store: ModelStore) -> None:
    stand_in_variant(store, "broken", refuses="out of kernels")
    said = evaluate(store, "b", ELSEWHERE, profile={"reference": "broken"})
    assert said.returncode == 30
    assert "out of kernels" in said.stderr
    assert not done(store, "load")
    assert not list(all_answers(store))
