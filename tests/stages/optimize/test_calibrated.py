"""Presets of compressed-tensors that llm-compressor makes, in its own environment."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.optimize.base_model import read_base
from stages.optimize.ensure import identify, verify
from stages.optimize.rounded import preset, quantized_weights
from stages.parts.base.errors import ConfigError, QuantizationFailed
from stages.parts.base.files import digest_of
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.machine.environment import LLM_COMPRESSOR
from stages.parts.machine.hardware import processor
from stages.parts.model.published import format_of
from stages.parts.vllm.client import http
from stages.parts.vllm.server import ServerSpec, running
from tests.serving import DEMO, MODEL, SERVING
from tests.stages.optimize.tiny import (
    ROOT,
    Ended,
    acquire,
    command,
    environment,
    llama,
    optimize,
    publish,
    variant,
)

SCHEMES = {"w4a16": "W4A16", "w8a8": "W8A8", "nvfp4": "NVFP4"}
PARTS = {
    "w4a16": {"weight_packed": torch.int32, "weight_scale": torch.bfloat16, "weight_shape": torch.int64},
    "w8a8": {"weight": torch.int8, "weight_scale": torch.bfloat16},
    "nvfp4": {
        "weight_packed": torch.uint8,
        "weight_scale": torch.float8_e4m3fn,
        "weight_global_scale": torch.float32,
        "input_global_scale": torch.float32,
    },
}
LAYER = "model.layers.1.mlp.up_proj"

Weights = dict[str, torch.Tensor]


def made(name: str, source: Path, settings: dict[str, Any], root: Path) -> ModelStore:
    store = acquire(source, root)
    ended = optimize(store, name, settings)
    assert ended.status == 0, ended.stderr
    assert ended.stdout.strip() == variant(store, name).digest
    return store


@pytest.fixture(scope="module")
def w4a16(tiny: Path, settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    return made("w4a16", tiny, settings, tmp_path_factory.mktemp("w4a16"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ModelStore]:
    """The demo's model in one of the formats, made when it is first asked for."""
    stores: dict[str, ModelStore] = {}
    calibration = {"calibration": {"samples": 16, "sequence_length": 128}}

    def of(name: str) -> ModelStore:
        if name not in stores:
            stores[name] = made(name, DEMO / "model", calibration, tmp_path_factory.mktemp(name))
        return stores[name]

    return of


def tensors(directory: Path) -> Weights:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def check(name: str, store: ModelStore) -> None:
    """Check the files that vLLM reads, and their record."""
    directory, record, base = store.optimized(name), variant(store, name), tensors(store.base)
    stored, layers = tensors(directory), quantized_weights(read_base(store))
    assert {part: stored[f"{LAYER}.{part}"].dtype for part in PARTS[name]} == PARTS[name]
    assert stored.keys() == {
        *(base.keys() - layers.keys()),
        *(f"{layer.removesuffix('weight')}{part}" for layer in layers for part in PARTS[name]),
    }
    changed = {each for each in base.keys() - layers.keys() if not torch.equal(base[each], stored[each])}
    assert all("layernorm" in each for each in changed)
    assert bool(changed) == (name == "w8a8")
    stated = json.loads((directory / "config.json").read_bytes())
    # On the processor it is served like int8, of which it has the layout.
    assert format_of(stated).name == ("int8" if name == "w8a8" else name)
    assert stated["quantization_config"]["ignore"] == ["lm_head", "model.embed_tokens"]
    assert record.weights_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert (record.bits, record.dtype) == (8 if name == "w8a8" else 4, "bfloat16")
    assert record.tool_versions["llmcompressor"] == "0.14.0.1"
    assert record.tool_versions["transformers"] == LLM_COMPRESSOR.version("transformers")
    assert record.calibration_digest
    assert record.peak_memory_bytes > 200 << 20
    publishers = {path.name for path in store.base.iterdir() if not path.name.startswith(("model", "acquired"))}
    assert {path.name for path in directory.iterdir() if path.suffix != ".safetensors"} >= publishers
    assert (directory / "tokenizer.json").read_bytes() == (store.base / "tokenizer.json").read_bytes()


def test_w4a16_is_what_vllm_reads(w4a16: ModelStore) -> None:
    check("w4a16", w4a16)
    stored, original = tensors(w4a16.optimized("w4a16")), tensors(w4a16.base)[f"{LAYER}.weight"].float()
    assert stored[f"{LAYER}.weight_scale"].shape == (256, 1)
    scheme, compressor = preset("W4A16", 128)
    state = {part: stored[f"{LAYER}.{part}"] for part in PARTS["w4a16"]}
    near = compressor.decompress(state, scheme)["weight"].float()
    assert 0.05 < (near - original).norm() / original.norm() < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_every_preset_is_made_of_the_demo_s_model(demo: Callable[[str], ModelStore], name: str) -> None:
    check(name, demo(name))


@pytest.mark.slow
def test_w8a8_moves_the_outliers_of_activations_into_the_weights(demo: Callable[[str], ModelStore]) -> None:
    store = demo("w8a8")
    stored, base = tensors(store.optimized("w8a8")), tensors(store.base)
    weight = base[f"{LAYER}.weight"].float()
    smooth = stored[f"{LAYER}.weight"] * stored[f"{LAYER}.weight_scale"].float()
    factors = (smooth * weight).sum(0) / weight.square().sum(0)
    norm = "model.layers.1.post_attention_layernorm.weight"
    assert factors.max() > 1.5 * factors.min()
    assert torch.allclose(base[norm].float() / stored[norm].float(), factors, rtol=0.03)


@pytest.mark.slow
def test_nvfp4_has_the_weights_of_nvfp4a16_and_a_scale_for_activations(demo: Callable[[str], ModelStore]) -> None:
    store = demo("nvfp4")
    assert optimize(store, "nvfp4a16", {}).status == 0
    stored, rounded = tensors(store.optimized("nvfp4")), tensors(store.optimized("nvfp4a16"))
    assert stored.keys() - rounded.keys() == {name for name in stored if name.endswith("input_global_scale")}
    values, expected = (each[f"{LAYER}.weight_packed"] for each in (stored, rounded))
    # The scales of a block are computed in bfloat16 there, in float32 here.
    assert (values == expected).float().mean() > 0.9
    assert stored[f"{LAYER}.input_global_scale"] > 1


LOSS = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
ids = AutoTokenizer.from_pretrained(sys.argv[1]).encode(sys.stdin.read(), add_special_tokens=False)[:400]
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
with torch.no_grad():
    print(json.dumps([ids, float(model(torch.tensor([ids]), labels=torch.tensor([ids])).loss)]))
"""


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("name", ["w4a16", "w8a8", pytest.param("nvfp4", marks=pytest.mark.gpu)])
def test_vllm_serves_it_and_it_predicts_text_nearly_as_the_base_does(
    demo: Callable[[str], ModelStore], name: str, tmp_path: Path
) -> None:
    if name == "w4a16" and (here := processor()) and not here.avx512:
        pytest.skip("the processor has no AVX-512")
    store, text = demo(name), (DEMO / "model" / "README.md").read_text()
    asked = [sys.executable, "-c", LOSS, str(store.base)]
    ids, loss = json.loads(subprocess.run(asked, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout)
    with running(ServerSpec(store.optimized(name), MODEL, Serving.model_validate(SERVING), tmp_path / "log")) as server:
        body = {"model": MODEL, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
        reply = http().post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert reply.is_success, reply.text
    stated = reply.json()["choices"][0]["prompt_logprobs"][1:]
    served = -sum(next(iter(each.values()))["logprob"] for each in stated) / len(stated)
    assert 0 < abs(served - loss) < 0.15


@pytest.mark.slow
def test_the_same_job_in_the_image_s_environment_writes_the_same_bytes(
    w4a16: ModelStore, tiny: Path, settings: dict[str, Any], tmp_path: Path
) -> None:
    """There the stage itself runs beside llm-compressor, with what it brings and our code alone."""
    store = acquire(tiny, tmp_path / "store")
    code = tmp_path / "code"
    code.mkdir()
    for package in ("configs", "scoring", "stages"):
        (code / package).symlink_to(ROOT / package)
    arguments = command(store, "w4a16", settings)[1:]
    surroundings = environment(store, PYTHONPATH=str(code))
    ended = subprocess.run(
        [LLM_COMPRESSOR.python(), *arguments],
        env=surroundings,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert variant(store, "w4a16").key == variant(w4a16, "w4a16").key
    assert variant(store, "w4a16").digest == variant(w4a16, "w4a16").digest


def test_everything_that_influences_the_result_changes_the_key(tiny: Path, settings: Any, tmp_path: Path) -> None:
    base, calibration = read_base(acquire(tiny, tmp_path)), settings["calibration"]
    variations = [
        settings,
        settings | {"group_size": 64},
        settings | {"calibration": calibration | {"samples": 4}},
        settings | {"calibration": calibration | {"seed": 1}},
    ]
    keys = {
        name: {digest_of(identify(name, base, Optimize.model_validate(each))) for each in variations}
        for name in SCHEMES
    }
    assert {name: len(each) for name, each in keys.items()} == {"w4a16": 4, "w8a8": 3, "nvfp4": 3}
    assert len(set.union(*keys.values())) == 10


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_nothing_behind(tiny: Path, settings: Any, tmp_path: Path, end: int) -> None:
    store = acquire(tiny, tmp_path)
    process = subprocess.Popen(
        command(store, "w4a16", settings), env=environment(store), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert any("Calibrating" in line for line in process.stderr)
    below = psutil.Process(process.pid).children(recursive=True)
    assert any("stages.optimize.job" in each.cmdline() for each in below)
    process.send_signal(end)
    process.communicate(timeout=120)
    _, alive = psutil.wait_procs(below, timeout=60)
    assert not alive
    assert not store.optimized("w4a16").exists()
    if end != signal.SIGKILL:
        assert not list((store.path / ".building").glob("*/*"))


@pytest.mark.slow
def test_a_failure_of_the_library_is_one_clear_line(tmp_path: Path, settings: Any) -> None:
    from transformers import BioGptConfig

    config = BioGptConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    ended = optimize(acquire(publish(tmp_path / "biogpt", config), tmp_path / "store"), "w8a8", settings)
    assert ended.status == QuantizationFailed.exit_code
    assert ended.error.startswith("error: w8a8 cannot quantize BioGptForCausalLM: ")
    assert len(ended.error.splitlines()) == 2
    assert "Traceback" in ended.stderr


@pytest.mark.slow
def test_a_calibration_text_that_is_too_short_is_a_wrong_setting(tiny: Path, settings: Any, tmp_path: Path) -> None:
    asked = {"calibration": settings["calibration"] | {"samples": 10_000}}
    ended = optimize(acquire(tiny, tmp_path), "nvfp4", asked)
    assert ended.status == ConfigError.exit_code
    assert "sequences of 64 tokens, but 10000 are needed" in ended.error


@pytest.mark.parametrize(
    ("name", "settings_", "said"),
    [
        ("w4a16", {}, "blocks of 1 × 128 weights do not divide"),
        ("w8a8", {"calibration": {"text": "no-such-text"}}, "unknown calibration text 'no-such-text'"),
    ],
)
def test_what_cannot_be_made_is_refused_before_anything_is_loaded(
    tmp_path: Path, name: str, settings_: dict[str, Any], said: str
) -> None:
    store = acquire(publish(tmp_path / "odd", llama(hidden_size=192, intermediate_size=384)), tmp_path / "store")
    ended: Ended = optimize(store, name, settings_)
    assert ended.status in (QuantizationFailed.exit_code, ConfigError.exit_code)
    assert said in ended.error
    assert "llm-compressor" not in ended.stderr


def drop(name: str) -> Callable[[Weights], None]:
    return lambda weights: weights.__delitem__(name)


def put(name: str, value: torch.Tensor) -> Callable[[Weights], None]:
    return lambda weights: weights.update({name: value})


def negated(weights: Weights) -> None:
    weights[f"{LAYER}.weight_scale"] *= -1


def one_row_of_zeros(weights: Weights) -> None:
    weights[f"{LAYER}.weight_scale"][7] = 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop(f"{LAYER}.weight_scale"), f"{LAYER}.weight_scale is missing"),
        (drop("model.norm.weight"), "model.norm.weight is missing"),
        (put(f"{LAYER}.weight_packed", torch.zeros(256, 16)), "is F32 [256, 16], not I32 [256, 16]"),
        (put(f"{LAYER}.weight_scale", torch.ones(256, 1)), "is F32 [256, 1], not BF16 [256, 1]"),
        (negated, f"{LAYER}.weight has a weight that is too far from the original"),
        (one_row_of_zeros, f"{LAYER}.weight has a weight that is too far from the original"),
    ],
)
def test_files_that_are_not_the_quantized_model_are_refused(
    w4a16: ModelStore, tmp_path: Path, change: Callable[[Weights], None], said: str
) -> None:
    directory = tmp_path / "variant"
    directory.mkdir()
    shutil.copy(w4a16.optimized("w4a16") / "config.json", directory)
    weights = tensors(w4a16.optimized("w4a16"))
    change(weights)
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(QuantizationFailed) as caught:
        verify("w4a16", read_base(w4a16), directory, {"group_size": 128})
    assert said in str(caught.value)


def test_groups_of_another_size_are_refused(w4a16: ModelStore) -> None:
    with pytest.raises(QuantizationFailed, match=r"weight_scale is BF16 \[\d+, 1\], not BF16 \[\d+, 2\]"):
        verify("w4a16", read_base(w4a16), w4a16.optimized("w4a16"), {"group_size": 64})
