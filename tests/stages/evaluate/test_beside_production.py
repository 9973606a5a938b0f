"""What is in production, measured beside the variants of a run. By stand-ins for vLLM and lm-eval, which note what they
are asked."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from stages.parts.base.files import write_json
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import ModelStore
from stages.parts.machine.environment import engine_of
from stages.parts.records.production import Production
from stages.parts.records.variant import VARIANT, read_variant
from stages.parts.releases.pinned import pinned
from stages.parts.releases.release import current_release
from tests.extras import need
from tests.samples import base
from tests.serving import MODEL, SERVING, publish, stage, stand_in_variant
from tests.stages.evaluate.test_measure import RUN, done, evaluate, evaluation, journal, results, surroundings


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


@pytest.mark.parametrize(
    ("recipe", "relation", "promotion"), [("vllm-9.9.9", "not worse", "promoted"), ("wrong", "worse", "kept")]
)
def test_another_engine_is_asked_and_loaded_beside_it_and_serves_if_it_is_not_worse(
    store: ModelStore, monkeypatch: pytest.MonkeyPatch, recipe: str, relation: str, promotion: str
) -> None:
    release = released(store, "b")
    monkeypatch.setenv("XDG_CACHE_HOME", str(store.root / "cache"))
    engine = engine_of("9.9.9")
    (python := engine.directory / "bin" / "python").parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    engine.lock.write_text("torch==9.0.0\ntransformers==8.0.0\n")
    serving = {"production": {"release": release}, "recipes": {recipe: {"engine_version": "9.9.9"}}}
    profile = {"reference": "production", "weights": {"quality": 1, "latency": 0, "throughput": 0, "memory": 0}}
    other = f"production+{recipe}"
    said = evaluate(store, f"production,{other}", serving, profile=profile)
    assert said.returncode == 0, said.stderr
    assert results(store) == {"production": "done", other: "done"}
    assert {f"{kind} {name}" for kind in ("quality", "load") for name in ("production", other)} <= {
        moment.rpartition(" ")[0] for moment in done(store, "quality", "load")
    }
    stack = {"vLLM": "9.9.9", "PyTorch": "9.0.0", "Transformers": "8.0.0"}
    assert evaluation(store, other).engine.stack == stack != evaluation(store, "production").engine.stack

    given = ["--profile", json.dumps({"name": "p"} | profile), "--serving", json.dumps(SERVING | serving)]
    said = stage("select", "--model", MODEL, *given, variables=surroundings(store))
    assert said.returncode == 0, said.stderr
    decision = Production.read(store.run(RUN) / "decision.json")
    assert decision
    assert decision.standing
    assert (decision.winner, decision.standing.relation, decision.promotion) == (other, relation, promotion)
    assert decision.release == release.replace("0001", "0002")
    assert current_release(store) == (decision.release if promotion == "promoted" else release)
    assert pinned(store, AskedServing(), decision.release).engine_version == "9.9.9"


def test_a_release_that_went_into_production_meanwhile_is_not_measured(store: ModelStore) -> None:
    released(store, "wrong")
    said = evaluate(store, "fp16,b,production", {"production": {"release": "0000-b-000000000000"}})
    assert said.returncode == 0, said.stderr
    assert results(store) == {"fp16": "done", "b": "done", "production": "failed"}
    assert "went into production during the run" in said.stderr
