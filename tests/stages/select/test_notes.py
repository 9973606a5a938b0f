"""What a reader is told of the measurement, and what a decision makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scoring.criteria import Weights
from scoring.profile import Profile
from stages.parts.base.store import ModelStore
from stages.parts.machine.hardware import Hardware, Processor
from stages.parts.records.evaluation import Capacity, Evaluation, Goodput, Trial, by_machine
from stages.parts.records.production import Price, Production
from stages.report.page import collect, render
from stages.select.selection import select
from tests.samples import measured_store, outcome

RUN = "run-1"
VARIANTS = ["fp16", "awq", "gptq"]
LARGER = Hardware(cpu="a cpu", cores=4, memory_bytes=16 << 30, gpus=())
LIMITED = Hardware(
    cpu="a cpu",
    cores=2,
    memory_bytes=8 << 30,
    gpus=(),
    processor=Processor(avx2=True, avx512=False, bf16=False, amx=False),
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    monkeypatch.setenv("SLIPWAY_RUN", RUN)
    return measured_store(tmp_path)


def read(store: ModelStore, name: str) -> Evaluation:
    found = Evaluation.read(store.evaluation(name))
    assert found is not None
    return found


def change(store: ModelStore, name: str, **fields: Any) -> None:
    read(store, name).model_copy(update=fields).write(store.evaluation(name))


def decided(store: ModelStore, profile: Profile | None = None, price: Price | None = None) -> Production:
    return select(store, profile or Profile(name="balanced"), VARIANTS, price=price)[1]


def test_on_different_hardware_speed_does_not_count_and_the_report_names_the_hardware(store):
    fastest = Profile(name="own", weights=Weights(quality=0.1, latency=1, throughput=1, memory=0))
    assert decided(store, fastest).winner == "awq"
    change(store, "awq", hardware=LARGER)
    decision = decided(store, fastest)
    assert decision.winner == "fp16"
    assert decision.notes == (
        "The variants were measured on different hardware (awq on 4 × a cpu; fp16, gptq on 2 × a cpu): latency and "
        "throughput are not comparable and do not count in the score.",
    )
    by_name = {each.variant: each for each in decision.candidates}
    assert set(by_name["awq"].change) == {"quality", "memory"}
    assert set(by_name["gptq"].change) == {"quality", "latency", "throughput", "memory"}
    outcome(store, RUN, "select", "", "done", key=decision.key)
    page = render(collect(store, RUN, "Succeeded"))
    assert decision.notes[0] in page
    assert "<dt>Hardware of fp16, gptq</dt><dd>2 × a cpu" in page
    assert "<dt>Hardware of awq</dt><dd>4 × a cpu, 16.00 GiB</dd>" in page


def test_a_processor_that_can_do_something_else_is_other_hardware(store):
    change(store, "awq", hardware=LIMITED)
    decision = decided(store)
    assert "awq on 2 × a cpu, AVX2; fp16, gptq on 2 × a cpu" in decision.notes[0]
    outcome(store, RUN, "select", "", "done", key=decision.key)
    assert "<dt>Hardware of awq</dt><dd>2 × a cpu, AVX2, 8.00 GiB</dd>" in render(collect(store, RUN, "Succeeded"))


def test_a_winner_on_other_hardware_than_fp16_is_not_compared_with_it_in_speed(store):
    for name in ("awq", "gptq"):
        change(store, name, hardware=LARGER)
    smallest = Profile(name="own", weights=Weights(quality=0, latency=0, throughput=0, memory=1))
    decision = decided(store, smallest)
    assert decision.winner == "awq"
    assert "latency not comparable, throughput not comparable, memory -60.0%" in decision.reason


def test_the_same_machine_with_more_memory_is_the_same_hardware(store):
    before = decided(store)
    change(store, "awq", hardware=LARGER.model_copy(update={"cores": 2}))
    after = decided(store)
    assert (after.notes, after.comparisons) == ((), before.comparisons)
    assert len(by_machine({name: read(store, name) for name in VARIANTS})) == 1


def goodput(share: float, rate: float) -> Goodput:
    return Goodput(ttft_ms=9.5, tpot_ms=9.5, share=share, requests_per_s=rate / 8, output_tokens_per_s=rate)


def test_a_variant_that_met_no_target_has_no_cost_and_a_note_says_so(store):
    for name, share, rate in (("fp16", 0.0, 0.0), ("awq", 1.0, 120.0), ("gptq", 1.0, 110.0)):
        change(store, name, goodput=goodput(share, rate))
    decision = decided(store, price=Price(per_hour=3.6))
    costs = {each.variant: each.cost for each in decision.candidates}
    assert costs["fp16"] is None
    assert {each.basis for each in costs.values() if each} == {"goodput"}
    assert decision.notes == ("No request of fp16 met the latency targets, so there is no cost of tokens within them.",)
    assert decided(store).notes == ()


def test_a_task_without_items_counts_in_no_score_and_a_note_says_so(store):
    (score,) = read(store, "awq").quality
    group = score.model_copy(update={"task": "group", "score": 0.1})
    before = decided(store)
    change(store, "awq", quality=(score, group))
    after = decided(store)
    assert after.notes == ("Not every variant has items of group: that does not count in any score.",)
    assert after.comparisons == before.comparisons


def test_a_task_that_the_model_can_not_be_asked_is_named_with_the_reason(store):
    for name in VARIANTS:
        change(store, name, not_asked={"tool_calls": "the chat template shows no tools"})
    assert "tool_calls was not asked: the chat template shows no tools." in decided(store).notes


def capacity_of(per_s: float, trials: tuple[Trial, ...] = ()) -> Capacity:
    return Capacity(
        ttft_ms=500,
        tpot_ms=50,
        requests_per_s=per_s,
        output_tokens_per_s=8 * per_s,
        low=None,
        high=None,
        starts=(8 * per_s,),
        trials=trials,
    )


def test_a_capacity_above_every_rate_that_was_tried_is_named_a_lower_bound(store):
    held = [Trial(restart=start, rate_per_s=9, requests=20, share=1.0, held=True) for start in (0, 1)]
    failed = [Trial(restart=start, rate_per_s=11, requests=0, share=None, held=False) for start in (0, 1)]
    change(store, "gptq", capacity=capacity_of(9.0, (*held, *failed)))
    change(store, "awq", capacity=capacity_of(9.0, (*held, failed[0])))
    (note,) = [each for each in decided(store).notes if "every rate held" in each]
    assert note.startswith("After a start of awq every rate held that was tried: the capacity is at least")


def test_a_single_failure_among_two_trials_of_the_highest_rate_leaves_a_lower_bound():
    rates = [(9, True), (11, False), (11, True)]
    trials = [Trial(restart=0, rate_per_s=rate, requests=20, share=1.0, held=held) for rate, held in rates]
    assert capacity_of(9.0, tuple(trials)).is_lower_bound
    assert not capacity_of(9.0, (*trials, trials[1])).is_lower_bound


def test_a_variant_that_was_loaded_beyond_its_capacity_is_named(store):
    for name, per_s in (("awq", 5.0), ("gptq", 9.0)):
        given = read(store, name)
        change(store, name, capacity=capacity_of(per_s), load=given.load.model_copy(update={"rate_per_s": 7.0}))
    (note,) = [each for each in decided(store).notes if "can serve only" in each]
    assert note.startswith(
        "awq can serve only 5 requests/s within the latency targets, and its latency was measured at 7,"
    )
