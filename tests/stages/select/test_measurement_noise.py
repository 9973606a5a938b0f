from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scoring.profile import Profile
from stages.parts.base.store import ModelStore
from stages.parts.machine.hardware import Hardware
from stages.parts.records.evaluation import Drift, Evaluation, Speed
from stages.parts.records.production import Production
from stages.parts.samples.figures import pooled_load
from stages.parts.samples.lines import Samples, read_samples, write_samples
from stages.select.selection import select
from stages.select.sentences import machine_speeds, slower_machine
from tests.samples import measured_store, samples_path

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


def samples_of(store: ModelStore, name: str) -> Samples:
    return read_samples(samples_path(store, name), read(store, name))


def change(store: ModelStore, name: str, **fields: Any) -> None:
    read(store, name).model_copy(update=fields).write(store.evaluation(name))


def drift(speed: float, change: float = 0.0) -> Drift:
    before = Speed(compute_gflop_per_s=speed, memory_gib_per_s=speed / 10)
    return Drift(before=before, after=before, largest_change=change, measured_again=0)


def test_a_machine_that_was_slower_for_one_variant_is_noted(store):
    _, before, _ = select(store, BALANCED, VARIANTS)
    assert before.notes == ()
    for name, speed in (("fp16", 40.0), ("awq", 50.0), ("gptq", 50.0)):
        change(store, name, drift=drift(speed))
    _, after, _ = select(store, BALANCED, VARIANTS)
    assert after.notes[0].startswith("The machine itself was 20% slower for fp16 than for awq")
    latency = {each.variant: each.raw["latency"] for each in after.candidates}
    assert latency == pytest.approx({"fp16": 10.0, "awq": 8.0, "gptq": 9.0})


def test_a_drifting_machine_and_a_shared_one_are_noted(store):
    change(store, "awq", drift=drift(50.0, change=0.31), beside=("org/other",))
    change(store, "gptq", drift=drift(50.0, change=0.31))
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert decision.notes == (
        "The speed of the machine changed by 31% while the load of awq, gptq was measured.",
        "The machine was serving org/other while awq was measured.",
    )


def test_a_limit_that_the_noise_crosses_is_noted(store):
    samples = samples_of(store, "awq")
    first, *others = samples.rounds
    slow = tuple(each.model_copy(update={"ttft_ms": 20.0}) for each in first.requests[:2])
    changed = replace(samples, rounds=(replace(first, requests=slow + first.requests[2:]), *others))
    sha256 = write_samples(samples_path(store, "awq"), read(store, "awq").key, changed)
    change(store, "awq", load=pooled_load(changed.rounds), samples_sha256=sha256)
    limit = read(store, "awq").load.ttft_ms.p95
    speed = {"quality": 0, "latency": 1, "throughput": 0, "memory": 0}
    profile = Profile.model_validate({"name": "own", "weights": speed, "constraints": {"ttft_p95_ms": {"max": limit}}})
    _, decision, _ = select(store, profile, VARIANTS)
    assert decision.winner == "awq"
    assert decision.notes[0].startswith(f"awq meets the maximum of {limit:.12g} for ttft_p95_ms with")


def width(decision: Production) -> float:
    """The width of the interval of awq's quality relative to fp16's."""
    (awq,) = [each.change["quality"] for each in decision.candidates if each.variant == "awq"]
    assert awq.low is not None
    assert awq.high is not None
    return awq.high - awq.low


def hash_items(store: ModelStore, name: str, *, others: int = 0) -> None:
    """Give the items of a variant hashes of their documents; *others* of the first are of other documents."""
    samples = samples_of(store, name)
    hashed = tuple(
        each.model_copy(update={"doc_hash": f"{each.doc_id}{' of another text' * (each.doc_id < others)}"})
        for each in samples.items
    )
    write_samples(samples_path(store, name), read(store, name).key, replace(samples, items=hashed))


def test_items_of_the_same_number_but_of_another_document_are_different_questions(store):
    _, by_number, _ = select(store, BALANCED, VARIANTS)
    for name in VARIANTS:
        hash_items(store, name)
    (store.path / "production_metrics.json").unlink()
    _, by_hash, _ = select(store, BALANCED, VARIANTS)
    hash_items(store, "awq", others=3000)
    (store.path / "production_metrics.json").unlink()
    _, apart, _ = select(store, BALANCED, VARIANTS)
    assert by_number.comparisons == by_hash.comparisons
    assert by_hash.notes == by_number.notes
    assert width(apart) > 1.5 * width(by_hash)
    assert any(
        each.startswith("Only 1000 of 4000 questions of arc are the same for all variants") for each in apart.notes
    )
    # fp16 is right in the first 3200 of 4000, awq in the first 3184; both are asked the last 1000.
    (lost,) = [each.against_fp16[0].lost for each in apart.candidates if each.variant == "awq"]
    assert lost == 16
    (difference,) = [each.against_fp16[0].difference for each in apart.candidates if each.variant == "awq"]
    assert difference == pytest.approx(-16 / 1000)


def test_samples_without_hashes_are_paired_by_number_with_those_that_have_them(store):
    _, before, _ = select(store, BALANCED, VARIANTS)
    hash_items(store, "awq", others=3000)
    (store.path / "production_metrics.json").unlink()
    _, after, _ = select(store, BALANCED, VARIANTS)
    assert (after.comparisons, after.notes) == (before.comparisons, before.notes)


def test_the_speed_of_the_cpu_says_nothing_of_measurements_on_a_gpu(store):
    hardware = Hardware(cpu="a cpu", cores=2, memory_bytes=8 << 30, gpus=("NVIDIA H100, 81559 MiB",))
    for name, speed in (("fp16", 40.0), ("awq", 50.0), ("gptq", 50.0)):
        change(store, name, drift=drift(speed, change=0.4), hardware=hardware)
    _, decision, _ = select(store, BALANCED, VARIANTS)
    assert decision.notes == ()


def test_the_machines_speed_is_the_mean_of_the_probes_of_all_starts(store):
    fast, slow = (Speed(compute_gflop_per_s=each, memory_gib_per_s=each) for each in (40.0, 10.0))
    around = Drift(before=fast, between=(slow, slow), after=fast, largest_change=0.75, measured_again=0)
    change(store, "awq", drift=around)
    assert machine_speeds({"awq": read(store, "awq")})["awq"] == pytest.approx(20.0)


def test_the_difference_between_the_machines_is_noted_with_its_number():
    (note,) = slower_machine({"fp16": 50.0, "awq": 44.0, "gptq": 49.0})
    assert note.startswith("The machine itself was 12% slower for awq than for fp16")
    assert list(slower_machine({"fp16": 50.0, "awq": 50.0})) == []
    assert list(slower_machine({})) == []
