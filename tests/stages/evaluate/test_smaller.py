"""The variant that leads is measured once more on fewer GPUs, by the stage programs with stand-ins for vLLM and
nvidia-smi: two GPUs, of which fp16 and awq are measured on both."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import ModelStore, place_tree
from stages.parts.records.production import FewerGpus, Production
from stages.parts.releases.pinned import pinned
from stages.parts.releases.release import current_release
from stages.select.verify import verify
from tests import samples
from tests.serving import DEMO, MODEL, SERVING, Said, one_gpu, stage, variant_of, wait_until
from tests.stages.evaluate.test_measure import LM_EVAL, RUN, WORKLOAD, done, evaluation, journal, surroundings

SLO = {"ttft_ms": 100, "tpot_ms": 100}
LIMITS = {"fp16": 10.0, "awq": 16.0}
"""Requests/s within the targets, on both GPUs."""
ON_ONE = 12.0
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


def on_two_gpus(store: ModelStore, size: int = 2, **workload: Any) -> Said:
    command = ["--variants", "fp16,awq", *given(size, **workload)]
    return stage("evaluate", *command, variables=surroundings(store, gpus(store)))


def given(size: int = 2, **workload: Any) -> list[str]:
    asked = WORKLOAD | {"slo": SLO, "request_rate_per_s": None, "trials": 4} | workload
    serving = SERVING | {"tensor_parallel_size": size}
    arguments = {"--workload": asked, "--serving": serving, "--profile": {"name": "p"}}
    return [text for name, value in arguments.items() for text in (name, json.dumps(value))]


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
        *("--price", price),
        variables=surroundings(store, gpus(store)),
    )
    assert said.returncode == 0, said.stderr
    found = Production.read(store.production_metrics)
    assert found
    return found


def layout_of(decision: Production) -> FewerGpus:
    assert decision.layout
    return decision.layout


def test_what_is_cheaper_per_gpu_hour_on_one_gpu_is_released_for_one(store: ModelStore) -> None:
    make(store)
    said = on_two_gpus(store, budget_minutes=1)
    assert said.returncode == 0, said.stderr
    starts = [line for line in journal(store).read_text().splitlines() if line.startswith("start")]
    assert starts[:4] == ["start fp16 0 1", "start awq 0 1", "start awq 0 1", "start fp16 0 1"]
    assert starts[4:] == ["start awq-tp1 0", "start awq-tp1 0"]
    assert evaluation(store, "fp16").smaller is None
    smaller = evaluation(store, "awq").smaller
    assert smaller
    assert (smaller.tensor_parallel_size, smaller.instead_of, smaller.failure) == (1, 2, "")
    assert smaller.capacity
    assert smaller.capacity.requests_per_s == pytest.approx(ON_ONE, rel=0.02)
    assert smaller.load
    assert smaller.load.rate_per_s == evaluation(store, "awq").load.rate_per_s

    decision = selected(store)
    layout = layout_of(decision)
    assert (layout.requests_per_s, layout.requests_per_s_before) == pytest.approx((12, 8), rel=0.02)
    assert layout.cost
    assert layout.cost.value == pytest.approx(8 / 12 - 1, abs=0.02)
    assert layout.cost.high
    assert layout.cost.high < 0
    assert layout.against == ()
    (note,) = (each for each in decision.notes if "GPU" in each)
    assert note.startswith("awq on 1 GPU: 12 requests/s per GPU, on 2 GPUs 8: 1 GPU costs 33% less per request (33% to")
    assert "USD for a million output tokens. It is served on 1 GPU unless serving.tensor_parallel_size" in note
    assert not verify(store.run(RUN)).findings

    release = current_release(store)
    assert pinned(store, AskedServing(), release).tensor_parallel_size == 1
    assert pinned(store, AskedServing(), release).max_model_len == 1024
    assert pinned(store, AskedServing(tensor_parallel_size=2), release).tensor_parallel_size == 2

    journal(store).unlink()
    assert on_two_gpus(store, budget_minutes=1).returncode == 0
    assert done(store) == []


def test_a_layout_that_does_not_start_is_a_note_and_the_release_stays_on_as_many_gpus_as_before(
    store: ModelStore,
) -> None:
    make(store, refuses="out of memory")
    said = on_two_gpus(store)
    assert said.returncode == 0, said.stderr
    smaller = evaluation(store, "awq").smaller
    assert smaller
    assert (smaller.load, smaller.capacity, smaller.rounds) == (None, None, ())
    assert "out of memory" in smaller.failure
    decision = selected(store)
    assert layout_of(decision).cost is None
    (note,) = (each for each in decision.notes if "GPU" in each)
    assert note.startswith("awq fits on 1 GPU by calculation, but is served on 2 GPUs: vLLM started but")
    assert pinned(store, AskedServing(), current_release(store)).tensor_parallel_size == 2
    assert not verify(store.run(RUN)).findings


@pytest.mark.slow
def test_one_start_suffices_where_the_budget_is_spent_and_a_rate_that_is_not_held_stays_on_both(
    store: ModelStore,
) -> None:
    make(store, limit=6.0)
    said = on_two_gpus(store)
    assert said.returncode == 0, said.stderr
    assert done(store, "start")[4:] == ["start awq-tp1 0"]
    decision = selected(store)
    assert layout_of(decision).against[0].startswith("it holds the latency targets up to 6 requests/s, not at 7")
    assert pinned(store, AskedServing(), current_release(store)).tensor_parallel_size == 2


@pytest.mark.slow
def test_an_interruption_on_fewer_gpus_loses_no_block_and_is_made_up_for(store: ModelStore) -> None:
    go = store.root / "go"
    make(store, starts_after=str(go))
    command = [sys.executable, "-m", "stages.evaluate", "--model", MODEL, "--variants", "fp16,awq"]
    with subprocess.Popen([*command, *given()], env=surroundings(store, gpus(store))) as process:
        log = store.run(RUN) / "logs" / "evaluate-awq-tp1.vllm.log"
        wait_until(log.exists, "the server on one GPU")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    before = evaluation(store, "awq")
    assert (len(before.rounds), before.smaller) == (2, None)
    assert before.schedule
    assert before.schedule.ended == ""
    go.touch()
    journal(store).unlink()
    said = on_two_gpus(store)
    assert said.returncode == 0, said.stderr
    assert done(store, "start") == ["start awq-tp1 0"]
    after = evaluation(store, "awq")
    assert after.smaller
    assert after.rounds == before.rounds
    assert after.schedule
    assert after.schedule.ended == "settled"


@pytest.mark.slow
def test_on_a_single_gpu_each_there_is_nothing_smaller(store: ModelStore) -> None:
    make(store)
    assert on_two_gpus(store, size=1).returncode == 0
    assert evaluation(store, "awq").smaller is None
    assert selected(store).layout is None
