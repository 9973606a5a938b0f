"""What is in production, measured beside the variants of a run. By stand-ins for vLLM and lm-eval, which note what they
are asked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stages.parts.base.store import ModelStore, write_json
from stages.parts.records.variant import VARIANT, read_variant
from tests.extras import need
from tests.samples import base
from tests.serving import MODEL, publish, stand_in_variant
from tests.stages.evaluate.test_measure import done, evaluate, evaluation, journal, results


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    need("vllm")
    store = ModelStore(tmp_path / "store", MODEL)
    base(store)
    for name in ("fp16", "b", "wrong"):
        stand_in_variant(store, name)
    return store


def released(store: ModelStore, name: str) -> str:
    """The release of a variant, in production, which is then gone."""
    folder = store.optimized(name)
    release = publish(store, 1, read_variant(folder))
    shutil.copy(folder / VARIANT, store.production / VARIANT)
    write_json(store.production / "production_metrics.json", {"winner": name})
    shutil.rmtree(folder)
    return release


def test_it_is_loaded_in_the_same_blocks_although_it_fails_the_gates(store: ModelStore) -> None:
    release = released(store, "wrong")
    said = evaluate(store, "fp16,b,production", {"production": {"release": release}})
    assert said.returncode == 0, said.stderr
    assert results(store) == {"fp16": "done", "b": "done", "production": "done"}
    assert {"load fp16 0", "load b 0", "load production 0"} <= set(done(store, "load"))
    assert evaluation(store, "production").variant == "production"


def test_what_was_measured_under_the_same_conditions_is_not_asked_again(store: ModelStore) -> None:
    assert evaluate(store, "fp16,b").returncode == 0
    earlier = evaluation(store, "b")
    release = released(store, "b")
    shutil.rmtree(store.root / "source-b")
    stand_in_variant(store, "b", another="revision")
    journal(store).unlink()
    said = evaluate(store, "fp16,b,production", {"production": {"release": release}})
    assert said.returncode == 0, said.stderr
    assert [moment for moment in done(store, "quality") if " production" in moment] == []
    assert [moment for moment in done(store, "quality") if " b " in moment]
    assert [moment for moment in done(store, "load") if " production" in moment]
    again = evaluation(store, "production")
    assert (again.key, again.quality) == (earlier.key, earlier.quality)
    assert again.schedule == evaluation(store, "b").schedule


def test_a_release_that_went_into_production_meanwhile_is_not_measured(store: ModelStore) -> None:
    released(store, "wrong")
    said = evaluate(store, "fp16,b,production", {"production": {"release": "0000-b-000000000000"}})
    assert said.returncode == 0, said.stderr
    assert results(store) == {"fp16": "done", "b": "done", "production": "failed"}
    assert "went into production during the run" in said.stderr
