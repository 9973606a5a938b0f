"""What only a machine with a GPU shows (``make test-gpu``): each variant made by the GPU's quantizers, served by vLLM's
CUDA build, measured with its kernels, and released. Prints the table of ``tests.gpu.table``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pipeline.settings.config import load
from stages.parts.base.files import place_tree
from stages.parts.base.formats import FORMATS
from stages.parts.base.program import RUN_VARIABLE
from stages.parts.base.store import STORE_VARIABLE, ModelStore
from stages.parts.endpoint.endpoint import endpoint
from stages.parts.machine.hardware import gpus
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.production import Production
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.vllm.arguments import installed_version
from tests.demo import DEMO, MODEL
from tests.end_to_end.command_line import API_KEY, CHANGED, SETTINGS, TOKEN, Pipeline
from tests.gpu.conftest import TABLE
from tests.gpu.table import markdown
from tests.hub.server import HubServer

VARIANTS = tuple(FORMATS)
QUANTIZED = tuple(name for name in VARIANTS if name != "fp16")
CALIBRATED = ("awq", "gptq")
"""The methods that compute with the model; the others only convert its tensors."""
ON_TWO = ("fp16", "int8")
RUN = "two-gpus"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.e2e,
    pytest.mark.skipif(not gpus(), reason="needs a GPU (nvidia-smi shows none)"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[ModelStore]:
    """The store of one run with every variant, whose winner is being served."""
    assert not installed_version("vllm").endswith("+cpu"), "vLLM's CPU build is installed here: make test-gpu"
    with HubServer() as hub:
        hub.tokens[TOKEN] = {MODEL}
        hub.add_repo(MODEL, DEMO / "model", private=True)
        pipeline = Pipeline(tmp_path_factory.mktemp("store"), hub)
        try:
            ended = pipeline.run("--set", f"optimize.variants=[{','.join(VARIANTS)}]", "--json")
            assert ended.returncode == 0, ended.stderr
            request.config.stash[TABLE] = markdown(pipeline.store, VARIANTS)
            yield pipeline.store
        finally:
            pipeline.call("serve", MODEL, "--stop")


def evaluation(store: ModelStore, name: str) -> Evaluation:
    found = Evaluation.read(store.evaluation(name))
    assert found is not None
    return found


@pytest.mark.parametrize("name", CALIBRATED)
def test_the_gpu_quantizes(store: ModelStore, name: str) -> None:
    variant = Variant.read(store.optimized(name) / VARIANT)
    assert variant is not None
    assert (variant.peak_gpu_memory_bytes or 0) > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_served_by_the_gpu(store: ModelStore, name: str) -> None:
    found = evaluation(store, name)
    assert found.hardware.gpus == tuple(gpus())
    assert not found.tool_versions["vllm"].endswith("+cpu")
    assert found.engine.cores == ()
    assert (found.memory.peak_gpu_bytes or 0) > found.memory.weights_bytes


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_variant_is_measured_with_a_kernel_of_the_gpu(store: ModelStore, name: str) -> None:
    engine = evaluation(store, name).engine
    assert engine.quantization
    assert engine.kernel
    assert "CPU" not in engine.kernel
    assert engine.fallbacks == ()


def test_the_best_variant_is_released_and_answers(store: ModelStore) -> None:
    decision = Production.read(store.production_metrics)
    assert decision is not None
    assert {each.variant for each in decision.candidates} == set(VARIANTS)
    served = endpoint(store)
    assert served is not None
    body = {"model": MODEL, "prompt": "A list", "max_tokens": 8}
    reply = httpx.post(f"{served.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {API_KEY}"})
    assert reply.json()["usage"]["completion_tokens"] > 0


@pytest.fixture
def copied(store: ModelStore, tmp_path: Path) -> ModelStore:
    """The two variants that are measured on two GPUs, in a store of their own; nothing else uses the GPUs."""
    stop = [sys.executable, "-m", "pipeline", "serve", MODEL, "--stop", "--store", str(store.root)]
    subprocess.run(stop, check=True)
    found = ModelStore(tmp_path, MODEL)
    for name in ON_TWO:
        files = [path.name for path in store.optimized(name).iterdir()]
        place_tree(store.optimized(name), found.optimized(name), files)
    return found


def measure(store: ModelStore, tensor_parallel_size: int, *more: str) -> None:
    config = load(SETTINGS, assignments=[*CHANGED, "serving.recipes={tp1: {tensor_parallel_size: 1}}"])
    serving = config.serving.pinned(tensor_parallel_size=tensor_parallel_size)
    command = [sys.executable, "-m", "stages.evaluate", "--model", MODEL, "--variants", ",".join((*ON_TWO, *more))]
    command += ["--workload", config.workload.model_dump_json(), "--serving", serving.model_dump_json()]
    own = {STORE_VARIABLE: str(store.root), RUN_VARIABLE: RUN}
    subprocess.run(command, env=os.environ | own, check=True)


@pytest.mark.skipif(len(gpus()) < 2, reason="needs two GPUs")
def test_two_servers_are_measured_side_by_side_each_on_its_own_gpu(copied: ModelStore) -> None:
    measure(copied, 1)
    assert [len(evaluation(copied, name).hardware.gpus) for name in ON_TWO] == [1, 1]
    # A lane of its own for the second server.
    assert (copied.run(RUN) / "logs" / "evaluate.generator1.log").exists()


@pytest.mark.skipif(len(gpus()) < 2, reason="needs two GPUs")
def test_a_recipe_measures_a_variant_on_one_gpu_of_two(copied: ModelStore) -> None:
    measure(copied, 2, "int8+tp1")
    one, both = evaluation(copied, "int8+tp1"), evaluation(copied, "int8")
    assert "--tensor-parallel-size" not in one.engine.arguments
    assert both.load.rate_per_s
    assert one.load.rate_per_s == both.load.rate_per_s / 2
