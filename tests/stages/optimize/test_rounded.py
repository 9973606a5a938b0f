from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.optimize.base_model import read_base
from stages.optimize.ensure import ensure, verify
from stages.optimize.rounded import INT8, quantized_weights, unquantized_layers
from stages.optimize.shards import layout
from stages.parts.base.errors import QuantizationFailed
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.store import ModelStore
from stages.parts.model.published import format_of
from tests.stages.optimize.tiny import ROOT, acquire, llama, optimize, publish, record_base, variant

LAYERS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LAYERS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
QUANTIZED = {f"model.layers.{block}.{layer}.weight" for block in range(2) for layer in LAYERS}
LAYER = "model.layers.1.mlp.up_proj.weight"
SCALE = f"{LAYER}_scale"
MIB = 1 << 20

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def int8(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    store = acquire(tiny, tmp_path_factory.mktemp("int8"))
    ended = optimize(store, "int8", {})
    assert ended.status == 0, ended.stderr
    assert ended.stdout.strip() == variant(store, "int8").digest
    return store


def tensors(directory: Path) -> Weights:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def with_weights(source: Path, root: Path, weights: Weights) -> ModelStore:
    """The model of *source* with these weights in one file."""
    store = acquire(source, root)
    for path in store.base.glob("model*"):
        path.unlink()
    save_file(weights, store.base / "model.safetensors", {"format": "pt"})
    record_base(store)
    return store


def quantization(store: ModelStore) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((store.optimized("int8") / "config.json").read_bytes())["quantization_config"]
    return config


def test_every_weight_is_within_half_a_step_of_the_bases(int8: ModelStore) -> None:
    originals, made = tensors(int8.base), tensors(int8.optimized("int8"))
    assert {name for name, tensor in made.items() if tensor.dtype == torch.int8} == QUANTIZED
    for name in QUANTIZED:
        scale, original = made[f"{name}_scale"], originals[name].float()
        assert scale.dtype == torch.float32
        assert torch.equal(scale, original.abs().amax(1, keepdim=True) / 127.5)
        assert ((made[name] * scale - original).abs() <= 0.5001 * scale).all()
    for name in originals.keys() - QUANTIZED:
        assert torch.equal(made[name], originals[name])
        assert made[name].dtype == originals[name].dtype


def test_the_record_the_config_and_the_index_say_what_was_made(int8: ModelStore) -> None:
    record, directory = variant(int8, "int8"), int8.optimized("int8")
    made = tensors(directory)
    assert (record.bits, record.dtype, record.calibration_digest) == (8, "bfloat16", None)
    assert record.tool_versions.keys() == {"compressed-tensors", "torch"}
    assert record.weights_bytes == sum(tensor.nbytes for tensor in made.values())
    assert int8.optimized("int8").joinpath("LICENSE").read_bytes() == (int8.base / "LICENSE").read_bytes()
    index = json.loads((directory / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == record.weights_bytes
    assert index["weight_map"].keys() == made.keys()
    assert all(name in load_file(directory / file) for name, file in index["weight_map"].items())
    stated = quantization(int8)
    assert (stated["quant_method"], stated["format"]) == ("compressed-tensors", "int-quantized")
    assert stated["ignore"] == ["lm_head", "model.embed_tokens"]


def test_transformers_loads_it_and_answers_nearly_as_the_base_does(int8: ModelStore) -> None:
    from transformers import AutoModelForCausalLM

    quantized = AutoModelForCausalLM.from_pretrained(int8.optimized("int8"))
    assert quantized.model.layers[0].mlp.up_proj.weight.dtype == torch.int8
    base = AutoModelForCausalLM.from_pretrained(int8.base)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected, found = base(ids).logits.float(), quantized(ids).logits.float()
    assert not torch.equal(found, expected)
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_a_repeated_run_finds_the_variant_without_loading_anything(int8: ModelStore) -> None:
    again = optimize(int8, "int8", {}, "-X", "importtime")
    assert again.status == 0
    assert "reused: int8: 8 bit" in again.stderr
    assert not {"torch", "transformers", "compressed_tensors", "numpy"} & {
        line.rpartition("|")[2].strip().partition(".")[0] for line in again.stderr.splitlines()
    }


def test_the_same_base_gives_the_same_bytes_in_blocks_of_any_size(
    int8: ModelStore, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stages.optimize.rounded.BLOCK_BYTES", 1000)
    store = acquire(tiny, tmp_path)
    record, made = ensure(store, "int8", Optimize())
    assert made
    assert record.digest == variant(int8, "int8").digest


def test_a_wide_base_becomes_bfloat16_and_a_narrow_one_keeps_its_types(tiny: Path, tmp_path: Path) -> None:
    wide = acquire(publish(tmp_path / "wide", llama(), dtype="float32", shard_size="1GB"), tmp_path / "a")
    ensure(wide, "int8", Optimize())
    made = tensors(wide.optimized("int8"))
    assert {tensor.dtype for tensor in made.values()} == {torch.int8, torch.float32, torch.bfloat16}
    assert {name for name, tensor in made.items() if tensor.dtype == torch.float32} == {f"{n}_scale" for n in QUANTIZED}
    assert torch.equal(made["model.norm.weight"], tensors(wide.base)["model.norm.weight"].bfloat16())
    assert json.loads((wide.optimized("int8") / "config.json").read_bytes())["dtype"] == "bfloat16"
    odd = {"model.layers.0.mlp.bias_correction": torch.rand(4), "ids": torch.arange(5), "empty": torch.zeros(0, 4)}
    narrow = with_weights(tiny, tmp_path / "b", tensors(tiny) | odd)
    ensure(narrow, "int8", Optimize())
    made = tensors(narrow.optimized("int8"))
    assert all(torch.equal(made[name], tensor) and made[name].dtype == tensor.dtype for name, tensor in odd.items())


def test_a_channel_of_zeros_stays_zero(tiny: Path, tmp_path: Path) -> None:
    weights = tensors(tiny)
    weights[LAYER][3] = 0
    store = with_weights(tiny, tmp_path, weights)
    ensure(store, "int8", Optimize())
    made = tensors(store.optimized("int8"))
    assert not made[LAYER][3].any()
    assert made[SCALE][3] > 0


def test_the_memory_does_not_grow_with_the_file_or_its_matrices(int8: ModelStore, tiny: Path, tmp_path: Path) -> None:
    store = acquire(tiny, tmp_path)
    for path in store.base.glob("model*"):
        path.unlink()
    shape = (512, 300 << 10)
    names = [f"model.layers.{block}.mlp.up_proj.weight" for block in range(2)]
    header, starts = layout((name, "BF16", shape) for name in names)
    with (store.base / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(starts[names[1]] + 2 * math.prod(shape))  # zeros that take no space
    record_base(store)
    assert (store.base / "model.safetensors").stat().st_size == 600 * MIB + len(header)
    program = (
        "import sys; from pathlib import Path; from stages.optimize.ensure import ensure; "
        "from stages.parts.base.optimize_settings import Optimize; from stages.parts.base.store import ModelStore; "
        "from stages.parts.machine.process import peak_resident_bytes; "
        "ensure(ModelStore(Path(sys.argv[1]), 'test/tiny'), 'int8', Optimize()); print(peak_resident_bytes())"
    )
    peak = subprocess.check_output([sys.executable, "-c", program, str(store.root)], cwd=ROOT)
    assert int(peak) - variant(int8, "int8").peak_memory_bytes < 200 * MIB
    shutil.rmtree(store.path)


def edited(name: str, value: torch.Tensor) -> Callable[[Weights], None]:
    return lambda weights: weights.update({name: value})


def experts_in_one_tensor(weights: Weights) -> None:
    weights["model.layers.0.mlp.experts.gate_up_proj"] = torch.rand(8, 128, 512)


def first_generation_mixers(weights: Weights) -> None:
    for name in [name for name in weights if "self_attn" in name]:
        del weights[name]
    for name, shape in {
        "in_proj": (512, 128),
        "x_proj": (24, 256),
        "dt_proj": (256, 8),
        "out_proj": (128, 256),
    }.items():
        weights[f"model.layers.0.mamba.{name}.weight"] = torch.rand(shape)


def no_layers(weights: Weights) -> None:
    for name in QUANTIZED:
        del weights[name]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edited(f"{LAYER.removesuffix('weight')}bias", torch.rand(128)), f"{LAYER} is stored as (inputs, outputs)"),
        (experts_in_one_tensor, "stored as one tensor (model.layers.0.mlp.experts.gate_up_proj), which can't be"),
        (first_generation_mixers, "model.layers.0.mamba.in_proj.weight [512, 128] is no linear layer that vLLM"),
        (no_layers, "it has no linear layers that vLLM serves in int8"),
        (edited(LAYER, torch.full((256, 128), torch.nan)), f"{LAYER}: it holds NaN or infinity"),
    ],
)
def test_a_base_that_cannot_be_made_is_refused_by_name(
    tiny: Path, tmp_path: Path, change: Callable[[Weights], None], said: str
) -> None:
    weights = tensors(tiny)
    change(weights)
    store = with_weights(tiny, tmp_path, weights)
    with pytest.raises(QuantizationFailed) as caught:
        ensure(store, "int8", Optimize())
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint
    assert not store.optimized("int8").exists()
    assert not list((store.path / ".building").glob("*/*"))


def test_a_mixtures_experts_are_quantized_and_its_routers_are_not(tiny: Path, tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in tensors(tiny).items() if ".mlp." not in name}
    for block in range(2):
        layer = f"model.layers.{block}.mlp"
        weights |= {
            f"{layer}.gate.weight": torch.rand(4, 128),
            f"{layer}.shared_expert_gate.weight": torch.rand(1, 128),
        }
        for expert in range(4):
            weights[f"{layer}.experts.{expert}.gate_proj.weight"] = torch.rand(64, 128)
    base = read_base(with_weights(tiny, tmp_path, weights))
    assert len(quantized_weights(base)) == 2 * (4 + 4)
    routers = [f"model.layers.{block}.mlp.{name}" for block in range(2) for name in ("gate", "shared_expert_gate")]
    assert unquantized_layers(base) == ["lm_head", "model.embed_tokens", *routers]
    INT8.quantizer.check(Optimize(), base)


def drop(name: str) -> Callable[[Weights], None]:
    return lambda weights: weights.__delitem__(name)


def one_value_off(weights: Weights) -> None:
    weights[LAYER][7, 7] += 1 if weights[LAYER][7, 7] < 0 else -1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop(SCALE), f"{SCALE} is missing"),
        (drop("model.norm.weight"), "model.norm.weight is missing"),
        (edited(LAYER, torch.zeros(256, 128)), f"{LAYER} is F32 [256, 128], not I8 [256, 128]"),
        (edited("model.norm.weight", torch.ones(128)), "model.norm.weight is F32 [128], not BF16 [128]"),
        (edited(SCALE, torch.ones(128, 1)), f"{SCALE} is F32 [128, 1], not F32 [256, 1]"),
        (edited(SCALE, torch.zeros(256, 1)), f"{LAYER} has a weight that is too far from the original"),
        (edited(SCALE, torch.full((256, 1), torch.nan)), f"{LAYER} has a weight that is too far from the original"),
        (one_value_off, f"{LAYER} has a weight that is too far from the original"),
        (edited("model.norm.weight", torch.full((128,), torch.inf).bfloat16()), "holds NaN or infinity"),
    ],
)
def test_files_that_are_not_the_quantized_model_are_refused(
    int8: ModelStore, tmp_path: Path, change: Callable[[Weights], None], said: str
) -> None:
    directory = tmp_path / "variant"
    directory.mkdir()
    shutil.copy(int8.optimized("int8") / "config.json", directory)
    weights = tensors(int8.optimized("int8"))
    change(weights)
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(QuantizationFailed) as caught:
        verify("int8", read_base(int8), directory, {})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["format"], "pack-quantized", "config.json says format 'pack-quantized', not 'int-quantized'"),
        (["ignore"], [], "config.json says ignore [], not ['lm_head', 'model.embed_tokens']"),
        (["config_groups", "group_0", "weights", "num_bits"], 4, "config.json says num_bits 4, not 8"),
        (["config_groups", "group_0", "input_activations"], None, "config.json says num_bits None, not 8"),
    ],
)
def test_a_config_that_states_another_scheme_is_refused(
    int8: ModelStore, tmp_path: Path, path: list[str], value: Any, said: str
) -> None:
    directory = tmp_path / "variant"
    shutil.copytree(int8.optimized("int8"), directory)
    config = json.loads((directory / "config.json").read_bytes())
    place = config["quantization_config"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantizationFailed) as caught:
        verify("int8", read_base(int8), directory, {})
    assert said in str(caught.value)


DEMO = ROOT / "tests" / "demo" / "model"
PRESETS = {"fp8": "FP8_DYNAMIC", "fp8-block": "FP8_BLOCK", "mxfp4": "MXFP4", "nvfp4a16": "NVFP4A16"}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    """The demo's model in each of the formats in floating point."""
    store = acquire(DEMO, tmp_path_factory.mktemp("presets"))
    for name in PRESETS:
        ensure(store, name, Optimize())
    return store


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_what_a_publisher_of_it_would_write(demo: ModelStore, name: str) -> None:
    directory, record = demo.optimized(name), variant(demo, name)
    config = json.loads((directory / "config.json").read_bytes())
    assert format_of(config).name == name
    assert record.bits == (8 if name.startswith("fp8") else 4)
    made, before = tensors(directory), tensors(demo.base)
    assert record.weights_bytes == sum(tensor.nbytes for tensor in made.values())
    layers = [each.removesuffix(".weight") for each in before if ".layers." in each and before[each].ndim == 2]
    parts = {"weight_packed", "weight_scale"} if record.bits == 4 else {"weight", "weight_scale"}
    parts |= {"weight_global_scale"} if name == "nvfp4a16" else set()
    assert made.keys() == before.keys() - {f"{layer}.weight" for layer in layers} | {
        f"{layer}.{part}" for layer in layers for part in parts
    }


@pytest.mark.parametrize("name", PRESETS)
def test_matrices_of_many_blocks_give_the_same_bytes(
    demo: ModelStore, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a real model: then a layer's one scale has fewer bytes than a matrix has blocks."""
    monkeypatch.setattr("stages.optimize.rounded.BLOCK_BYTES", 1000)
    store = acquire(DEMO, tmp_path)
    record, _ = ensure(store, name, Optimize())
    assert record.digest == variant(demo, name).digest


def test_layers_that_vllm_merges_share_a_global_scale(demo: ModelStore) -> None:
    made, before = tensors(demo.optimized("nvfp4a16")), tensors(demo.base)
    merged = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    largest = max(before[f"{layer}.weight"].abs().max().float() for layer in merged)
    assert [made[f"{layer}.weight_global_scale"] for layer in merged] == [448 * 6 / largest] * 3
    assert made["model.layers.0.self_attn.o_proj.weight_global_scale"] != 448 * 6 / largest


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("part", ["weight", "weight_scale"])
def test_a_byte_that_was_changed_is_found(demo: ModelStore, name: str, part: str, tmp_path: Path) -> None:
    directory = tmp_path / "variant"
    directory.mkdir()
    shutil.copy(demo.optimized(name) / "config.json", directory)
    weights = tensors(demo.optimized(name))
    (changed,) = {f"{LAYER.removesuffix('weight')}{part}{packed}" for packed in ("", "_packed")} & weights.keys()
    values = weights[changed].view(torch.uint8)
    if part == "weight":
        values[-1, -1] = 0x7E if name.startswith("fp8") else 0xF7  # the largest values
    else:
        values[-1, -1] ^= 0x40
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(QuantizationFailed, match=f"{LAYER} has a weight that is too far from the original"):
        verify(name, read_base(demo), directory, {})


def test_blocks_that_do_not_divide_a_layer_are_refused_by_its_name(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(
        QuantizationFailed, match=r"blocks of 128 × 128 weights do not divide .*k_proj.weight \[64, 128\]"
    ):
        ensure(acquire(tiny, tmp_path), "fp8-block", Optimize())


@pytest.mark.parametrize("name", PRESETS)
def test_groups_of_zeros_and_of_tiny_weights_can_be_made(tmp_path: Path, name: str) -> None:
    weights = tensors(DEMO)
    weights[LAYER][:128] = 0
    weights[LAYER][128:256, :128] *= 1e-5
    store = with_weights(DEMO, tmp_path, weights)
    assert ensure(store, name, Optimize())[1]


ONESHOT = """
import sys
import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from transformers import AutoModelForCausalLM

source, target, *schemes = sys.argv[1:]
for scheme in schemes:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]))
    model.save_pretrained(f"{target}/{scheme}")
"""
RELEASE = "llmcompressor==0.14.0.1"


@pytest.mark.slow
def test_the_tensors_and_the_config_are_those_that_llm_compressor_writes(demo: ModelStore, tmp_path: Path) -> None:
    python, uv = tmp_path / "venv" / "bin" / "python", [sys.executable, "-m", "uv", "--quiet"]
    subprocess.run([*uv, "venv", "--python", sys.executable, tmp_path / "venv"], check=True)
    installed = subprocess.run([*uv, "pip", "install", "--python", python, "torch==2.13.0+cpu", RELEASE], check=False)
    if installed.returncode:
        pytest.skip(f"{RELEASE} can't be installed here")
    ensure(demo, "int8", Optimize())
    schemes = PRESETS | {"int8": "W8A8"}
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    subprocess.run([python, "-c", ONESHOT, DEMO, tmp_path, *schemes.values()], check=True, env=offline)
    for name, scheme in schemes.items():
        made, theirs = tensors(demo.optimized(name)), tensors(tmp_path / scheme)
        assert made.keys() == theirs.keys()
        quantized = [each for each in made if ".layers." in each and made[each].ndim == 2]
        for each in quantized:
            assert made[each].dtype == theirs[each].dtype
            assert torch.equal(made[each].view(torch.uint8), theirs[each].view(torch.uint8))
        configs = (demo.optimized(name), tmp_path / scheme)
        ours, other = (json.loads((each / "config.json").read_bytes())["quantization_config"] for each in configs)
        differ = {field for field in ours if ours[field] != other[field]}
        assert differ == {"version", "ignore"}  # the embeddings, too, are named
