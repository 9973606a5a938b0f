"""A variant is tried on fewer GPUs than the others by a recipe, by the stage programs with stand-ins for vLLM and
nvidia-smi: two GPUs, of which fp16 and awq are measured on both, and awq on one, too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from stages.parts.base.files import place_tree
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import ModelStore
from stages.parts.records.evaluation import machine_of
from stages.parts.records.production import Production
from stages.parts.releases.pinned import pinned
from stages.parts.releases.release import current_release
from stages.select.verify import verify
from tests import samples
from tests.serving import DEMO, MODEL, SERVING, Said, one_gpu, stage, variant_of
from tests.stages.evaluate.test_measure import LM_EVAL, RUN, WORKLOAD, evaluation, journal, surroundings

SLO = {"ttft_ms": 100, "tpot_ms": 100}
LIMITS = {"fp16": 10.0, "awq": 16.0}
"""Requests/s within the targets, on both GPUs."""
ON_ONE = 12.0
BY_RECIPE: dict[str, Any] = SERVING | {
    "tensor_parallel_size": 2,
    "recipes": {"tp1": {"tensor_parallel_size": 1, "variants": ["awq"], "optional": True}},
}
CARD = """\
stand-in:
  device: Stand-in
  memory_gib: 24
  bandwidth_gb_per_s: 300
  tflops: {bf16: 100}
  link: pcie
  link_gb_per_s: 64
  compute_capability: 8.9
  source: made up
"""


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    """Variants of a model that can be sized, small enough for one of the GPUs."""
    found = ModelStore(tmp_path / "store", MODEL)
    samples.base(found).model_copy(update={"digest": "b" * 64}).write(found.base / "acquired.json")
    for name in LIMITS:
        samples.outcome(found, RUN, "optimize", name, "done")
    return found


def make(store: ModelStore, **on_one: Any) -> None:
    """The variants, and how awq's server behaves on one GPU."""
    for name in LIMITS:
        _make(store, name, {"on_fewer_gpus": {"limit": ON_ONE} | on_one})


def _make(store: ModelStore, name: str, behaviour: dict[str, Any]) -> None:
    source = store.root / f"source-{name}"
    source.mkdir(parents=True)
    place_tree(DEMO / "model", source, ["config.json"])
    (source / "behaviour.json").write_text(json.dumps({"limit": LIMITS[name]} | behaviour))
    (source / "model.safetensors").write_bytes(b"weights" * (2 if name == "fp16" else 1))
    variant_of(store, name, source)


def on_two_gpus(store: ModelStore, **workload: Any) -> Said:
    asked = WORKLOAD | {"slo": SLO, "request_rate_per_s": None, "trials": 4} | workload
    arguments = {"--workload": asked, "--serving": BY_RECIPE, "--profile": {"name": "p"}}
    command = [text for name, value in arguments.items() for text in (name, json.dumps(value))]
    return stage("evaluate", "--variants", "fp16,awq,awq+tp1", *command, variables=surroundings(store, gpus(store)))


def gpus(store: ModelStore) -> dict[str, str]:
    folder = store.root.parent / "gpu"
    if not folder.exists():
        one_gpu(folder, 2)
        (folder / "cards.yaml").write_text(CARD)
    variables = {
        "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(map(str, (LM_EVAL, folder, LM_EVAL.parents[1] / "standin", Path.cwd()))),
        "CUDA_VISIBLE_DEVICES": "0,1",
        "STANDIN_GPU": str(folder / "gpu"),
    }
    return variables | {"SLIPWAY_ACCELERATORS": str(folder / "cards.yaml")}


def selected(store: ModelStore) -> Production:
    price = json.dumps({"per_hour": 2.0})
    said = stage(
        "select",
        *("--profile", json.dumps({"name": "p"}), "--optimize", json.dumps({"variants": ["fp16", "awq"]})),
        *("--price", price, "--serving", json.dumps(BY_RECIPE)),
        variables=surroundings(store, gpus(store)),
    )
    assert said.returncode == 0, said.stderr
    found = Production.read(store.production_metrics)
    assert found
    return found


def test_what_two_servers_on_one_gpu_each_do_better_is_released_for_one(store: ModelStore) -> None:
    make(store)
    assert on_two_gpus(store, budget_minutes=1).returncode == 0
    starts = [line for line in journal(store).read_text().splitlines() if line.startswith("start")]
    assert starts[:3] == ["start fp16 0 1", "start awq 0 1", "start awq+tp1 0 1"]
    fp16, both, one = (evaluation(store, name) for name in ("fp16", "awq", "awq+tp1"))
    assert (both.gpu_share, one.gpu_share) == (1, 0.5)
    assert "gpu_share" not in both.model_dump()
    assert fp16.load.rate_per_s
    assert one.load.rate_per_s == fp16.load.rate_per_s / 2
    assert one.load.requests == fp16.load.requests
    assert one.capacity
    assert one.capacity.requests_per_s == pytest.approx(ON_ONE, rel=0.02)
    assert one.metrics()["throughput"] == pytest.approx(2 * one.capacity.output_tokens_per_s)
    assert one.metrics()["throughput"] / both.metrics()["throughput"] == pytest.approx(2 * 12 / 16, rel=0.03)
    assert machine_of(one) == machine_of(both)
    assert (len(one.hardware.gpus), len(both.hardware.gpus)) == (1, 2)

    decision = selected(store)
    assert (decision.winner, decision.outcome) == ("awq+tp1", "decided")
    costs = {each.variant: each.cost.value for each in decision.candidates if each.cost}
    assert costs["awq+tp1"] / costs["awq"] == pytest.approx(16 / 24, rel=0.03)
    (note,) = (each for each in decision.notes if "GPU" in each)
    assert note.startswith("A server of awq+tp1 had 0.5 of the GPUs of the others and of their load")
    assert not verify(store.run(RUN)).findings

    for given in (AskedServing(), AskedServing(tensor_parallel_size=2)):
        assert pinned(store, given, current_release(store)).tensor_parallel_size == 1
    assert pinned(store, AskedServing(), current_release(store)).max_model_len == 1024


def test_what_does_not_start_on_one_gpu_costs_only_its_candidate(store: ModelStore) -> None:
    make(store, refuses="out of memory")
    said = on_two_gpus(store)
    assert said.returncode == 0, said.stderr
    assert "awq+tp1 is left out" in said.stderr
    decision = selected(store)
    assert (decision.winner, decision.outcome, decision.missing) == ("awq", "decided", ())
    assert "awq+tp1: evaluate failed: vLLM started but" in decision.reason
    assert pinned(store, AskedServing(), current_release(store)).tensor_parallel_size == 2
