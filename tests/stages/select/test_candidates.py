"""What a decision says of each candidate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from scoring.lead import Lead
from scoring.profile import Profile
from stages.parts.base.store import ModelStore
from stages.parts.records.evaluation import Evaluation, Goodput
from stages.parts.records.production import Price
from stages.select.candidates import cost_of, recovery
from stages.select.selection import select
from tests.samples import measured_store

BALANCED = Profile(name="balanced")
VARIANTS = ["fp16", "awq", "gptq"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setenv("SLIPWAY_RUN", "run-1")
    return measured_store(tmp_path)


def read(store: ModelStore, name: str) -> Evaluation:
    found = Evaluation.read(store.evaluation(name))
    assert found is not None
    return found


def change(store: ModelStore, name: str, **fields: Any) -> None:
    read(store, name).model_copy(update=fields).write(store.evaluation(name))


def test_without_targets_the_cost_is_at_the_measured_throughput(store):
    _, decision, _ = select(store, BALANCED, VARIANTS, price=Price(per_hour=3.6, currency="EUR"))
    costs = {each.variant: each.cost for each in decision.candidates}
    assert costs["fp16"] is not None
    assert (costs["fp16"].value, costs["fp16"].currency, costs["fp16"].basis) == (10.0, "EUR", "throughput")
    assert costs["awq"] is not None
    assert costs["awq"].value == pytest.approx(10 * 100 / 120)
    assert costs["awq"].high is not None
    assert costs["awq"].low <= costs["awq"].value <= costs["awq"].high


def test_with_targets_the_cost_is_at_the_goodput(store):
    change(
        store,
        "fp16",
        goodput=Goodput(ttft_ms=50, tpot_ms=50, share=1.0, requests_per_s=12.5, output_tokens_per_s=100.0),
    )
    _, decision, _ = select(store, BALANCED, VARIANTS, price=Price(per_hour=3.6))
    costs = {each.variant: each.cost for each in decision.candidates}
    assert costs["fp16"] is not None
    assert (costs["fp16"].basis, costs["fp16"].tokens_per_s) == ("goodput", 100.0)


def test_the_interval_of_the_cost_is_that_of_the_rate(store):
    cost = cost_of(
        read(store, "awq"), Price(per_hour=3.6), Lead(math.log(120), math.log(1.1) ** 2, 0.0, math.inf), 250.0
    )
    assert cost is not None
    factor = 1.1**1.959964
    assert (cost.low, cost.high) == pytest.approx((cost.value / factor, cost.value * factor))
    unknown = cost_of(read(store, "awq"), Price(per_hour=3.6), Lead.of_starts([math.log(120)]), None)
    assert unknown is not None
    assert unknown.low == unknown.value == unknown.high
    assert cost.answers == pytest.approx(cost.value / 4), "a thousand of 250 tokens are a quarter of a million"
    assert unknown.answers is None


def test_without_a_price_there_is_no_cost_and_with_another_price_another_decision(store):
    _, without, _ = select(store, BALANCED, VARIANTS)
    assert without.price is None
    assert all(each.cost is None for each in without.candidates)
    reused, priced, _ = select(store, BALANCED, VARIANTS, price=Price(per_hour=1))
    assert not reused
    assert select(store, BALANCED, VARIANTS, price=Price(per_hour=1))[0]
    assert priced.key != without.key


def test_recovery_is_computed_task_by_task(store):
    whole = read(store, "fp16")
    bits = whole.quality[0].model_copy(update={"task": "text", "kind": "perplexity", "value": 1.0, "score": 0.5})
    whole = whole.model_copy(update={"quality": (*whole.quality, bits)})
    worse = bits.model_copy(update={"value": 1.1, "score": 2**-1.1})
    accuracy = whole.quality[0].model_copy(update={"value": 0.78, "score": 0.78})
    other = read(store, "awq").model_copy(update={"quality": (accuracy, worse)})
    assert recovery(other, whole.quality) == pytest.approx({"arc": 0.78 / 0.8, "text": 2**-0.1})
    assert recovery(whole, whole.quality) == {"arc": 1.0, "text": 1.0}
    assert recovery(other, ()) == recovery(None, whole.quality) == {}


def test_a_reference_score_of_zero_gives_no_recovery(store):
    whole = read(store, "fp16")
    nothing = whole.quality[0].model_copy(update={"score": 0.0})
    assert recovery(read(store, "awq"), (nothing,)) == {}
