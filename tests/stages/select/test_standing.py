"""The winner of a run against the release in production: it takes that one's place, or nothing changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from scoring.names import PRODUCTION
from scoring.profile import Profile
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.serving_settings import AskedServing, ProductionServing, Recipe, Serving
from stages.parts.base.store import ModelStore
from stages.parts.machine.hardware import hardware
from stages.parts.records.acquired import Acquired, read_intact
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import Production
from stages.parts.records.variant import VARIANT, read_variant
from stages.parts.releases.pinned import MeasuredWith, moved_stack, pinned, row_of_production
from stages.parts.releases.release import candidate, current_release, headline
from stages.select.selection import select
from stages.select.verify import verify
from tests.samples import Details, evaluation, measured_store, outcome, variant

BALANCED = Profile(name="balanced")
ROWS = ["fp16", "awq", PRODUCTION]
RUN = "run-2"
SERVES = {"quality": 0.796, "latency_ms": 8.0, "throughput": 120.0, "weights_bytes": 400}
"""What is in production."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    """One release, made of awq, is in production; its variants were removed."""
    monkeypatch.setenv("SLIPWAY_RUN", "run-1")
    store = measured_store(tmp_path)
    select(store, BALANCED, ["fp16", "awq", "gptq"])
    monkeypatch.setenv("SLIPWAY_RUN", RUN)
    for folder in ("optimized", "evaluations"):
        shutil.rmtree(store.path / folder)
    return store


def acquired(store: ModelStore) -> Acquired:
    return read_intact(store.base)


def revised(store: ModelStore, **awq: float) -> Production:
    """What a run decides of a new revision, whose awq has these figures, and otherwise those of what serves."""
    quality = awq.get("quality", SERVES["quality"]) + 0.004
    figures = {"fp16": {"quality": quality, "latency_ms": 10.0, "throughput": 100.0, "weights_bytes": 1000}}
    figures |= {"awq": SERVES | awq, PRODUCTION: SERVES}
    for name, values in figures.items():
        if name != PRODUCTION:
            made = variant(store, name, acquired(store), f"other weights of {name}")
            outcome(store, RUN, "optimize", name, "done", key=made.key)
        made = read_variant(store.optimized(name))
        measured = evaluation(store, made, details=Details(name, noise=0.002), **values)  # type: ignore[arg-type]
        outcome(store, RUN, "evaluate", name, "done", key=measured.key)
    return select(store, BALANCED, ROWS).decision


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ({"quality": 0.75}, "loses 5.8% of arc (at least "),
        ({"latency_ms": 9.0, "quality": 0.82}, "latency +12."),
        ({"weights_bytes": 500, "quality": 0.82}, "memory +25.0%, beyond the margin of 1%"),
    ],
    ids=["quality", "speed", "memory"],
)
def test_a_worse_revision_is_kept_unpublished_with_what_got_worse(store, figures, reason):
    decision = revised(store, **figures)
    assert decision.standing is not None
    assert (decision.standing.relation, decision.promotion) == ("worse", "kept")
    assert any(reason in each for each in decision.standing.reasons), decision.standing.reasons
    before = decision.standing.release
    assert decision.reason.startswith(f"Not shown to be better than {before}, which is in production: awq is worse: ")
    assert (current_release(store), candidate(store)) == (decision.standing.release, None)
    assert (store.releases / decision.release / "model.safetensors").read_text() == "other weights of awq"
    assert headline(store, decision.release).endswith(f"; kept, so that {decision.standing.release} stays")
    assert verify(store.run(RUN)).findings == []


def test_a_better_revision_takes_its_place(store):
    decision = revised(store, quality=0.82)
    assert decision.standing is not None
    assert (decision.standing.relation, decision.promotion) == ("better", "promoted")
    assert current_release(store) == decision.release != decision.standing.release
    before = decision.standing.release
    assert decision.reason.startswith(f"Better than {before}, which was in production (quality +3.0%")
    assert verify(store.run(RUN)).findings == []


def test_an_equal_revision_is_equivalent_and_what_serves_stays(store):
    decision = revised(store)
    assert decision.standing is not None
    assert (decision.standing.relation, decision.promotion) == ("equivalent", "equivalent")
    assert (current_release(store), candidate(store)) == (decision.standing.release, None)
    assert verify(store.run(RUN)).findings == []


def requalified(store: ModelStore, **changed: float) -> Production:
    """What is decided of what serves, measured under another version of vLLM with these figures."""
    other = f"{PRODUCTION}+vllm-0.31.0"
    released = read_variant(store.production)
    for name, values in {PRODUCTION: SERVES, other: SERVES | changed}.items():
        details = Details(name, noise=0.002)
        measured = evaluation(store, released, details=details, **values)  # type: ignore[arg-type]
        if name == other:
            engine = measured.engine.model_copy(update={"version": "0.31.0", "stack": {"vLLM": "0.31.0"}})
            recipe = Recipe(engine_version="0.31.0")
            measured = measured.model_copy(update={"engine": engine, "recipe": recipe})
            measured.write(store.evaluation(name))
        outcome(store, RUN, "evaluate", name, "done", key=measured.key)
    profile = BALANCED.model_copy(update={"reference": PRODUCTION})
    return select(store, profile, [PRODUCTION, other]).decision


def test_the_same_weights_under_another_engine_need_not_be_better(store):
    before = current_release(store)
    decision = requalified(store)
    assert decision.standing is not None
    assert (decision.standing.relation, decision.promotion) == ("not worse", "promoted")
    assert decision.reason.startswith(f"Worse in nothing than {before}, which was in production, beyond the margins (")
    assert current_release(store) == decision.release == f"0002-{before.removeprefix('0001-')}"
    assert pinned(store, AskedServing(), decision.release).engine_version == "0.31.0"
    assert pinned(store, AskedServing(), before).engine_version == ""
    assert verify(store.run(RUN)).findings == []


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ({"quality": 0.5}, "loses 37.2% of arc (at least "),
        ({"latency_ms": 9.0}, "latency +12."),
    ],
    ids=["quality", "speed"],
)
def test_an_engine_under_which_anything_is_worse_is_kept_with_what_got_worse(store, figures, reason):
    before = current_release(store)
    decision = requalified(store, **figures)
    assert decision.standing is not None
    assert (decision.standing.relation, decision.promotion) == ("worse", "kept")
    assert any(reason in each for each in decision.standing.reasons), decision.standing.reasons
    assert (current_release(store), candidate(store)) == (before, None)
    assert verify(store.run(RUN)).findings == []


def test_what_is_in_production_wins_no_run_and_is_no_missing_variant(store):
    decision = revised(store, quality=0.75)
    (row,) = [each for each in decision.candidates if each.variant == PRODUCTION]
    assert row.excluded
    assert row.raw["quality"] == pytest.approx(0.796)
    assert (decision.winner, decision.missing, decision.outcome) == ("awq", (), "decided")


def test_what_could_not_be_measured_beside_the_winner_stays(store):
    revised(store, quality=0.82)
    outcome(store, RUN, "evaluate", PRODUCTION, "failed", why="the server did not start")
    again = select(store, BALANCED, ROWS).decision
    assert again.standing is not None
    assert (again.standing.relation, again.promotion) == ("unmeasured", "kept")
    assert "evaluate failed: the server did not start" in again.reason


def test_a_person_can_have_the_winner_published_all_the_same(store):
    decision = revised(store, quality=0.75)
    forced = select(store, BALANCED, ROWS, settings=Optimize(force_publish=True)).decision
    assert forced.standing is not None
    assert (forced.standing.relation, forced.promotion, forced.release) == ("worse", "promoted", decision.release)
    assert verify(store.run(RUN)).findings == []
    assert current_release(store) == decision.release


def test_what_is_in_production_is_a_row_of_the_run_that_made_it(store):
    serving = Serving(production=ProductionServing(release="0001"))
    released = read_variant(store.production)
    made = variant(store, "awq", acquired(store), "weights of awq")
    assert made.digest == released.digest
    assert row_of_production(store, ROWS, serving) == "awq"
    recipe = Recipe(kv_cache_dtype="fp8")
    with_recipe = serving.model_copy(update={"production": ProductionServing(release="0001", recipe=recipe)})
    assert row_of_production(store, ROWS, with_recipe) == PRODUCTION
    made.model_copy(update={"base_digest": "of another revision"}).write(store.optimized("awq") / VARIANT)
    assert row_of_production(store, ROWS, serving) == PRODUCTION


def test_an_engine_or_a_card_that_the_release_was_not_measured_on_is_noticed(store):
    here = hardware().cpu
    release, path = current_release(store), store.production / "production_metrics.json"
    text = path.read_text().replace('"a cpu"', json.dumps(here))
    path.write_text(text)
    assert moved_stack(store) == ""
    path.write_text(text.replace('"version": "0.32.0"', '"version": "0.31.0"'))
    said = f"{release}, which is in production, was measured with vLLM 0.31.0, not vLLM 0.32.0"
    assert moved_stack(store) == said
    path.write_text(text.replace('"gpus": []', '"gpus": ["NVIDIA H100, 81559 MiB"]'))
    assert f"was measured with NVIDIA H100, 81559 MiB, not {here}" in moved_stack(store)
    assert MeasuredWith.of(store.production).moved({"vLLM": "0.32.0"}, None, "float32").endswith("float32")


def test_its_evaluation_is_used_again_only_under_the_same_conditions(store):
    from stages.evaluate.results import adopt, existing

    made = variant(store, "awq", acquired(store))
    measured = evaluation(store, made, **SERVES)  # type: ignore[arg-type]
    adopt(store, "awq", "another key")
    assert not store.evaluation(PRODUCTION).exists()
    store.take_up([store.evaluation("awq").with_suffix(".samples.jsonl"), store.evaluation("awq")], measured.key, "new")
    adopt(store, "awq", measured.key)
    found = existing(store, PRODUCTION, measured.key)
    assert found == measured.model_copy(update={"variant": PRODUCTION})
    assert isinstance(found, Evaluation)
