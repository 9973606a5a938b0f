"""The formats in which publishers store models, by what their config.json says, and our own checkpoints among them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from scoring.capacity.families import read_architecture
from scoring.capacity.weights import count_parameters, explained, stored_bytes
from stages.parts.base.errors import DamagedModel, UnusableModel
from stages.parts.machine.hardware import Processor
from stages.parts.model.checkpoint import SINGLE, check
from stages.parts.model.published import METHODS, PublishedFormat, format_of
from stages.parts.model.safetensors import Tensor
from tests.demo import DEMO
from tests.hub.models import CONFIG, tiny_model, write_model
from tests.published import copied, quantized

OLD = Processor(avx2=True, avx512=False, bf16=False, amx=False)
NEW = Processor(avx2=True, avx512=True, bf16=True, amx=True)
PRESETS = """
import json, sys
from compressed_tensors.quantization import preset_name_to_scheme
schemes = {name: preset_name_to_scheme(name, ["Linear"]).model_dump_json() for name in sys.argv[1:]}
print(json.dumps({name: json.loads(text) for name, text in schemes.items()}))
"""
REGISTRY = "from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS as known; print(*known)"
COMPRESSED = {
    "W8A8": ("int8", 8, ""),
    "W4A16": ("w4a16", 4, "AVX-512"),
    "W8A16": ("w8a16", 8, "a GPU"),
    "W4A8": ("w4a8", 4, ""),
    "W4AFP8": ("w4afp8", 4, "a GPU"),
    "FP8": ("fp8", 8, ""),
    "FP8_DYNAMIC": ("fp8", 8, ""),
    "FP8_BLOCK": ("fp8-block", 8, "AMX"),
    "NVFP4": ("nvfp4", 4, "a GPU"),
    "NVFP4A16": ("nvfp4a16", 4, "a GPU"),
    "MXFP4": ("mxfp4", 4, "a GPU"),
    "MXFP8": ("mxfp8", 8, "a GPU"),
}
GROUPS = {"bits": 4, "group_size": 128}
OTHERS: dict[str, tuple[dict[str, Any], str, int]] = {
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "fp8", 8),
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block", 8),
    "awq": ({"quant_method": "awq", **GROUPS}, "awq", 4),
    "gptq": ({"quant_method": "gptq", **GROUPS}, "gptq", 4),
    "gptq in 8 bit": ({"quant_method": "gptq", **GROUPS, "bits": 8}, "gptq-8bit", 8),
    "mxfp4": ({"quant_method": "mxfp4"}, "mxfp4", 4),
    "modelopt fp8": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", 8),
    "modelopt nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 4),
}


def form_of(quantization: dict[str, Any]) -> PublishedFormat:
    return format_of({"quantization_config": quantization})


def test_every_scheme_of_compressed_tensors_has_the_name_of_its_preset() -> None:
    ended = subprocess.run([sys.executable, "-c", PRESETS, *COMPRESSED], capture_output=True, text=True, check=True)
    schemes = json.loads(ended.stdout.splitlines()[-1])
    for preset, scheme in schemes.items():
        form = form_of({"quant_method": "compressed-tensors", "config_groups": {"group_0": scheme}})
        assert (form.name, form.storage.weight_bits, form.needs) == COMPRESSED[preset], preset


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods_are_named_by_what_they_store(name: str) -> None:
    quantization, expected, bits = OTHERS[name]
    form = form_of(quantization)
    assert (form.name, form.storage.weight_bits, form.method) == (expected, bits, quantization["quant_method"])
    text = {"text_config": {"quantization_config": quantization}}
    assert format_of(text) == form


def test_every_method_is_one_that_vllm_loads_and_what_it_does_not_load_is_refused_by_name() -> None:
    ended = subprocess.run([sys.executable, "-c", REGISTRY], capture_output=True, text=True, check=True)
    known = set(ended.stdout.splitlines()[-1].split())
    assert known >= METHODS.keys()
    for method in {"bitsandbytes", "gguf", "hqq", "quanto", "aqlm", "eetq", "vptq", "spqr", "higgs"} - known:
        with pytest.raises(UnusableModel, match=f"quantized by {method}, which slipway can't serve") as refused:
            form_of({"quant_method": method})
        assert "in 16 or 32 bit" in refused.value.hint


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "awq"}, "quantized by awq in a way that is not known"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "compressed-tensors in a way"),
        ({"quant_method": "modelopt", "quant_algo": "INT3"}, "modelopt in a way"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": 3}}}, "compressed-tensors in a way"),
        ([1], "quantized by an unknown method"),
    ],
)
def test_what_a_method_does_not_say_is_refused(quantization: Any, message: str) -> None:
    with pytest.raises(UnusableModel, match=message):
        format_of({"quantization_config": quantization})


def test_a_file_of_an_older_tool_beside_a_config_that_says_nothing_is_refused() -> None:
    with pytest.raises(UnusableModel, match=r"quantize_config\.json"):
        format_of({}, ["quantize_config.json"])
    assert format_of({"quantization_config": None}, ["config.json"]).name == "fp16"


def test_a_processor_without_the_instructions_is_said_before_anything_is_downloaded() -> None:
    block = form_of(OTHERS["fp8 in blocks"][0])
    assert block.missing_on_cpu({}, OLD) == "vLLM's CPU build has no fp8-block kernel for processors without AMX"
    assert not block.missing_on_cpu({}, NEW)
    assert "without AVX-512" in form_of(OTHERS["awq"][0]).missing_on_cpu({}, OLD)
    assert form_of(OTHERS["modelopt nvfp4"][0]).missing_on_cpu({}, None) == "vLLM's CPU build has no nvfp4 kernel"
    experts = {"num_local_experts": 8}
    assert "for experts on processors without AMX" in form_of(OTHERS["fp8"][0]).missing_on_cpu(experts, OLD)
    assert not form_of(OTHERS["mxfp4"][0]).missing_on_cpu(experts, NEW)


def test_packed_words_count_as_the_weights_in_them() -> None:
    def tensor(name: str, dtype: str, *shape: int) -> Tensor:
        return Tensor(Path(), name, dtype, shape, 0, 0)

    gptq, nvfp4, fp8 = (form_of(OTHERS[name][0]) for name in ("gptq", "modelopt nvfp4", "fp8"))
    assert gptq.count(tensor("model.layers.0.mlp.up_proj.qweight", "I32", 32, 768)) == 256 * 768
    assert nvfp4.count(tensor("model.layers.0.mlp.up_proj.weight", "U8", 768, 128)) == 256 * 768
    assert fp8.count(tensor("model.layers.0.mlp.up_proj.weight", "F8_E4M3", 768, 256)) == 256 * 768
    assert gptq.count(tensor("model.embed_tokens.weight", "BF16", 10, 8)) == 80
    auxiliary = ("qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale")
    for name in (*auxiliary, "weight_shape", "weight_zero_point", "weight_global_scale"):
        assert gptq.count(tensor(f"model.layers.0.mlp.up_proj.{name}", "I32", 4, 4)) == 0
        assert format_of({}).count(tensor(name, "F32", 4)) == 4


def test_our_own_int8_checkpoint_is_read_with_the_parameters_that_it_was_made_of(tmp_path: Path) -> None:
    folder = quantized("int8", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    model = read_architecture(config)
    checked = check(folder, sorted(path.name for path in folder.glob("*.safetensors")))
    assert (checked.format, checked.parameters) == ("int8", count_parameters(model).total)
    form = format_of(config)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert stored_bytes(model, form.storage) == pytest.approx(size, rel=0.01)
    assert stored_bytes(model, explained(model, form.storage, size)) == size
    claimed = copied(DEMO / "model", tmp_path / "claimed", quantization_config=config["quantization_config"])
    with pytest.raises(DamagedModel, match="says int8, but no weights are stored so"):
        check(claimed, sorted(path.name for path in claimed.glob("*.safetensors")))


def test_a_quantized_layer_without_its_scales_is_damaged(tmp_path: Path) -> None:
    config = CONFIG | {"quantization_config": {"quant_method": "gptq", **GROUPS}}
    folder = write_model(tmp_path, tiny_model(**{"config.json": json.dumps(config).encode(), SINGLE: None}))
    packed = {"layer.qweight": np.zeros((4, 8), np.int32), "layer.qzeros": np.zeros((1, 1), np.int32)}
    save_file(packed, folder / SINGLE)
    with pytest.raises(DamagedModel, match="layer has no scales"):
        check(folder, [SINGLE])
    save_file(packed | {"layer.scales": np.ones((1, 8), np.float16)}, folder / SINGLE)
    assert check(folder, [SINGLE]).parameters == 32 * 8


@pytest.mark.parametrize(
    ("dtype", "byte", "finite"),
    [("F8_E4M3", 0x7F, False), ("F8_E4M3", 0x7E, True), ("F8_E5M2", 0x7C, False), ("F8_E8M0", 0xFF, False)],
)
def test_nan_is_found_in_floats_of_8_bits(tmp_path: Path, dtype: str, byte: int, *, finite: bool) -> None:
    from stages.parts.model.safetensors import find_not_finite

    path = tmp_path / "values"
    path.write_bytes(bytes([0x30, 0x31, byte, 0x32]))
    located = find_not_finite([Tensor(path, "x", dtype, (4,), 0, 4)])
    assert (located is None) == finite
    assert finite or (located is not None and located[1] == 2)
