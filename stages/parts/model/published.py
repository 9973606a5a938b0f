"""The formats in which publishers store models: how config.json names each, how it stores weights, what vLLM needs to
compute it, and how such a checkpoint becomes a variant.

Methods are named as ``quant_method`` in config.json, which vLLM reads as well; a test compares them with its registry.
``check`` asks vLLM itself for its kernels (``stages.parts.vllm.support``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from scoring.capacity.reader import EXPERTS
from scoring.capacity.storage import MARLIN, SIXTEEN_BIT, Scales, Storage
from scoring.names import REFERENCE
from stages.parts.base.errors import UnusableModel
from stages.parts.base.files import place_tree
from stages.parts.base.formats import FORMATS, Peak, storage_of
from stages.parts.base.optimize_settings import Optimize
from stages.parts.machine.hardware import Processor
from stages.parts.machine.process import peak_resident_bytes
from stages.parts.model.safetensors import BITS, Tensor, read_headers
from stages.parts.records.variant import Variant

Config = Mapping[str, Any]
Arithmetic = Literal["bf16", "fp8"]

ELSEWHERE: Final = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Where older tools wrote how a model is quantized."""
INSTEAD: Final = (
    "name the model from which it was made, in 16 or 32 bit, or one in FP8, AWQ, GPTQ, MXFP4, NVFP4 or a format of "
    "compressed-tensors"
)
AUXILIARY: Final = re.compile(r"(^|[._])(q?zeros|zero_point|scales?|scale_inv|scale_\d|g_idx|shape|amax)$")
"""Names of tensors that hold no weights: scales, zero points, indices, shapes."""
PACKED: Final = ("U8", "I32")
"""Types that hold several weights in each value."""
QUANTIZED: Final = (*PACKED, "I8", "F4", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")


@dataclass(frozen=True)
class PublishedFormat:
    name: str
    """That of the variant."""
    storage: Storage
    needs: str = ""
    """What vLLM needs for linear layers: AVX-512, AMX, a GPU, or nothing of these."""
    method: str = ""
    """``quant_method`` in config.json; empty for 16 or 32 bit."""

    def missing_on_cpu(self, config: Config, here: Processor | None, *, lora: bool = False) -> str:
        """Say why vLLM's CPU build can't serve such a model, with *lora* and adapters; empty if it may. *here* is None
        if it is not known."""
        kernel = f"vLLM's CPU build has no {self.name} kernel"
        if self.needs == "a GPU":
            return kernel
        if not self.method or here is None:
            return ""
        if not {"AVX-512": here.avx512, "AMX": here.amx}.get(self.needs, True):
            return f"{kernel} for processors without {self.needs}"
        if lora and self.name == "int8" and not here.amx:
            return "vLLM's CPU build computes no LoRA adapters of int8 layers on processors without AMX"
        text = config.get("text_config") or config
        experts = any(isinstance(text.get(name), int) and text[name] > 1 for name in EXPERTS)
        return f"{kernel} for experts on processors without AMX" if experts and not here.amx else ""

    def count(self, tensor: Tensor) -> int:
        """Count the weights that a tensor holds, which are not its values if they are packed."""
        if self.method and AUXILIARY.search(tensor.name):
            return 0
        packed = self.method and tensor.dtype in PACKED
        return tensor.count * BITS[tensor.dtype] // self.storage.weight_bits if packed else tensor.count

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse, with ValueError, tensors that are not stored as config.json says, or lack their scales."""
        stored, scaled = set(), set()
        for name, tensor in tensors.items():
            layer, _, part = name.rpartition(".")
            scaled |= {layer} if "scale" in part else set()
            quantized = tensor.dtype in QUANTIZED and part.endswith(("weight", "weight_packed", "blocks"))
            stored |= {layer} if quantized else set()
        if self.method and not stored:
            raise ValueError(f"config.json says {self.name}, but no weights are stored so")
        if self.method and stored - scaled:
            raise ValueError(f"{min(stored - scaled)} has no scales")

    @property
    def parameters(self) -> dict[str, Any]:
        """Those of a variant that is stored so."""
        return {"quant_method": self.method, "format": self.name, "bits": self.storage.weight_bits}


class AsPublished:
    """Makes a variant of a published checkpoint: links its files and changes nothing."""

    tools: ClassVar[tuple[str, ...]] = ()
    calibrated: ClassVar[bool] = False

    def parameters(self, settings: Optimize, base: Any) -> dict[str, Any]:  # noqa: ARG002
        return format_of(base.config).parameters

    def check(self, settings: Optimize, base: Any) -> None:
        """There is nothing to check before the weights are read."""

    def quantize(self, settings: Optimize, base: Any, target: Path) -> Peak:  # noqa: ARG002
        files = {file.path for file in base.record.files}
        place_tree(base.directory, target, files.difference(base.record.carried))
        return Peak(peak_resident_bytes())

    def verify(self, base: Any, directory: Path, parameters: Mapping[str, Any]) -> int:
        """Check that all tensors are stored as config.json says."""
        format_of(base.config).check(read_headers(directory.glob("*.safetensors")))
        return int(parameters["bits"])


def storage_of_variant(variant: Variant, directory: Path) -> Storage | None:
    """Describe how the variant in *directory* stores weights; None for a method that is not known."""
    if variant.published:
        return format_of(json.loads((directory / "config.json").read_bytes())).storage
    return storage_of(variant.method, variant.group_size) if variant.method in FORMATS else None


def quantization_of(config: Config) -> Config | None:
    """Find how a model is quantized; None if it is not. A multimodal model may say it of its text model."""
    for part in (config, config.get("text_config") or {}):
        if stated := part.get("quantization_config") or part.get("compression_config"):
            return stated if isinstance(stated, Mapping) else {}
    return None


def preset_configuration(scheme: str, ignore: Collection[str] = (), group_size: int | None = None) -> dict[str, Any]:
    """Return ``quantization_config`` of a checkpoint in a preset of compressed-tensors, but for the layers *ignore*."""
    import compressed_tensors
    import torch
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    preset = preset_name_to_scheme(scheme, ["Linear"])
    preset.format = infer_module_format(torch.nn.Linear, preset)
    if group_size and preset.weights.type == "int" and preset.weights.group_size:
        preset.weights.group_size = group_size
    config = QuantizationConfig(
        config_groups={"group_0": preset},
        format=preset.format.value,
        quantization_status="compressed",
        ignore=[*ignore],
    )
    return {**json.loads(config.model_dump_json()), "version": compressed_tensors.__version__}


def format_of(config: Config, paths: Collection[str] = ()) -> PublishedFormat:
    """Recognize the format of a model by its config.json. *paths* are all files of the repository, if they are known.
    Raises: UnusableModel: the model is quantized in a way that can't be served; the message names it."""
    quantization = quantization_of(config)
    if quantization is None:
        if older := [name for name in ELSEWHERE if name in paths]:
            raise UnusableModel(f"{older[0]} says how the model is quantized, and config.json does not", hint=INSTEAD)
        return PublishedFormat(REFERENCE, SIXTEEN_BIT)
    method = str(quantization.get("quant_method", "an unknown method")).lower().replace("_", "-")
    if method not in METHODS:
        raise UnusableModel(f"the model is quantized by {method}, which slipway can't serve", hint=INSTEAD)
    try:
        return replace(METHODS[method](quantization), method=method)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        message = f"the model is quantized by {method} in a way that is not known ({error!r})"
        raise UnusableModel(message, hint=INSTEAD) from error


def _form(name: str, bits: int, *scales: Scales, needs: str = "", arithmetic: Arithmetic = "bf16") -> PublishedFormat:
    if not 1 <= bits <= 16:
        raise ValueError(f"{bits} bits")
    storage = Storage(name, bits, scales, capabilities=MARLIN, arithmetic=arithmetic)
    return PublishedFormat(name, storage, needs)


def _fp8(quantization: Config) -> PublishedFormat:
    block = quantization.get("weight_block_size")
    return _fp8_block(*block) if block else _form("fp8", 8, Scales(32, None, None), arithmetic="fp8")


def _fp8_block(outputs: int, inputs: int) -> PublishedFormat:
    return _form("fp8-block", 8, Scales(32, inputs, outputs), needs="AMX", arithmetic="fp8")


def _integers(name: str, quantization: Config, *further: Scales) -> PublishedFormat:
    """Describe the integers of AWQ and GPTQ, whose groups of inputs have a scale and a zero point."""
    bits, size = quantization["bits"], quantization["group_size"]
    group = Scales(16, size if size > 0 else None)
    name, needs = (name, "AVX-512") if bits == 4 else (f"{name}-{bits}bit", "a GPU")
    return _form(name, bits, group, replace(group, bits=bits), *further, needs=needs)


def _modelopt(quantization: Config) -> PublishedFormat:
    algorithms = {
        "FP8": _fp8({}),
        "FP8_PER_CHANNEL_PER_TOKEN": _form("fp8", 8, Scales(32, None), arithmetic="fp8"),
        "FP8_PB_WO": _fp8_block(128, 128),
        "NVFP4": _form("nvfp4", 4, Scales(8, 16), needs="a GPU"),
        "W4A16_NVFP4": _form("nvfp4a16", 4, Scales(8, 16), needs="a GPU"),
        "MXFP8": _form("mxfp8", 8, Scales(8, 32), needs="a GPU"),
        "MIXED_PRECISION": _form("mixed", 4, Scales(8, 16), needs="a GPU"),
    }
    return algorithms[str(quantization["quant_algo"]).upper()]


def _compressed_tensors(quantization: Config) -> PublishedFormat:
    """Describe a checkpoint by the group with the fewest bits, which has most of the weights if there are several."""
    groups = [group for group in quantization["config_groups"].values() if group.get("weights")]
    forms = [_scheme(group["weights"], group.get("input_activations")) for group in groups]
    return min(forms, key=lambda form: form.storage.weight_bits)


def _scheme(weights: Config, activations: Config | None) -> PublishedFormat:
    """Describe a group of compressed-tensors, named as its presets are."""
    bits, size = int(weights["num_bits"]), weights.get("group_size") or 0
    if weights["type"] == "int":
        group = Scales(16, size if size > 0 else None)
        zeros = () if weights.get("symmetric", True) else (replace(group, bits=bits),)
        if activations is None:
            return _form(f"w{bits}a16", bits, group, *zeros, needs="AVX-512" if bits == 4 else "a GPU")
        if activations["type"] == "float":
            return _form(f"w{bits}afp{activations['num_bits']}", bits, group, *zeros, needs="a GPU")
        if bits == 8:
            return PublishedFormat("int8", FORMATS["int8"].storage)
        return _form(f"w{bits}a{activations['num_bits']}", bits, group, *zeros)
    suffix = "" if activations else "a16"
    if size in (16, 32):
        kind = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}[bits, size]
        return _form(f"{kind}{suffix}", bits, Scales(8, size), needs="a GPU")
    if shape := weights.get("block_structure"):
        return _fp8_block(*map(int, shape.split("x") if isinstance(shape, str) else shape))
    scale = Scales(16, None, None if weights.get("strategy") == "tensor" else 1)
    return _form(f"fp{bits}{suffix}", bits, scale, arithmetic="fp8" if activations else "bf16")


MXFP4: Final = PublishedFormat(
    "mxfp4", Storage("mxfp4", 4, (Scales(8, 32),), frozenset({"experts"}), capabilities=(8.0, math.inf)), "AMX"
)
"""gpt-oss's, of which only the experts are in it."""
METHODS: Final[Mapping[str, Callable[[Config], PublishedFormat]]] = {
    "fp8": _fp8,
    "awq": lambda stated: _integers("awq", stated),
    "gptq": lambda stated: _integers("gptq", stated, Scales(32, 1, None, loaded=False)),
    "mxfp4": lambda _: MXFP4,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
}
"""How each method's ``quantization_config`` is read. Errors mean that it has another form."""
