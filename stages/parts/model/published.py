"""The formats of 8 and 4 bits in which publishers store models: how config.json names each, how it stores weights, what
vLLM's CPU build needs to compute it, and how such a checkpoint becomes a variant.

Methods are named as ``quant_method`` in config.json, which vLLM reads as well; a test compares them with its registry.
``check`` asks vLLM itself for its kernels (``stages.parts.vllm.kernels``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from scoring.capacity.architecture import Kind
from scoring.capacity.reader import EXPERTS
from scoring.capacity.storage import SIXTEEN_BIT, Scales, Storage
from scoring.names import REFERENCE
from stages.parts.base.errors import UnusableModel
from stages.parts.base.formats import FORMATS, Peak, storage_of
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.store import place_tree
from stages.parts.machine.process import peak_resident_bytes
from stages.parts.machine.processor import Processor
from stages.parts.model.safetensors import BITS, Tensor, read_headers
from stages.parts.records.variant import Variant

Config = Mapping[str, Any]
Needs = Literal["nothing", "avx512", "amx", "a GPU"]
"""What vLLM's CPU build needs for linear layers."""

ELSEWHERE: Final = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Where older tools wrote how a model is quantized."""
INSTEAD: Final = (
    "name the model from which it was made, in 16 or 32 bit, or one in FP8, AWQ, GPTQ, MXFP4, NVFP4 or a format of "
    "compressed-tensors"
)
AUXILIARY: Final = re.compile(r"(^|[._])(q?zeros|zero_point|scales?|scale_inv|scale_\d|g_idx|shape|amax)$")
"""Names of tensors that hold no weights: scales, zero points, indices, shapes."""
SCALES: Final = re.compile(r"(^|[._])scales?(_inv|_\d)?$")
WEIGHTS: Final = re.compile(r"(^|[._])(q?weight|weight_packed|blocks)$")
PACKED: Final = ("U8", "I32")
"""Types that hold several weights in each value."""
QUANTIZED: Final = (*PACKED, "I8", "F4", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
LAYERS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "attention": ("model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.o_proj"),
    "mlp": ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"),
    "experts": ("model.layers.1.mlp.experts.0.up_proj", "model.layers.1.mlp.experts.0.down_proj"),
}
"""The layers of each kind, as most models name them."""
MARLIN: Final = 7.5
"""The compute capability from which vLLM has kernels for weights of 8 and 4 bits."""


@dataclass(frozen=True)
class PublishedFormat:
    """A format in which a publisher stores a model."""

    name: str
    """That of the variant."""
    storage: Storage
    needs: Needs = "nothing"
    method: str = ""
    """``quant_method`` in config.json."""

    def missing_on_cpu(self, config: Config, here: Processor | None) -> str:
        """Say why vLLM's CPU build can't serve such a model; empty if it may. *here* is None if it is not known."""
        kernel = f"vLLM's CPU build has no {self.name} kernel"
        if self.needs == "a GPU":
            return kernel
        if here and self.needs == "avx512" and not here.avx512:
            return f"{kernel} for processors without AVX-512"
        if here and self.needs == "amx" and not here.amx:
            return f"{kernel} for processors without AMX"
        text = config.get("text_config")
        text = text if isinstance(text, Mapping) else config
        if here and not here.amx and any(isinstance(count := text.get(name), int) and count > 1 for name in EXPERTS):
            return f"{kernel} for experts on processors without AMX"
        return ""

    def count(self, name: str, dtype: str, shape: Iterable[int]) -> int:
        """Count the weights that a tensor holds, which are not its values if they are packed."""
        bits = self.storage.weight_bits
        return 0 if AUXILIARY.search(name) else math.prod(shape) * (BITS[dtype] if dtype in PACKED else bits) // bits

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse, with ValueError, tensors that are not stored as config.json says, or lack their scales."""
        stored = [name for name, tensor in tensors.items() if tensor.dtype in QUANTIZED and WEIGHTS.search(name)]
        if not stored:
            raise ValueError(f"config.json says {self.name}, but no weights are stored so")
        scaled = {name.rpartition(".")[0] for name in tensors if SCALES.search(name)}
        if alone := [name for name in stored if name.rpartition(".")[0] not in scaled]:
            raise ValueError(f"{alone[0]} has no scales")


class AsPublished:
    """Makes a variant of a published checkpoint: links its files and changes nothing."""

    tools: ClassVar[tuple[str, ...]] = ()
    calibrated: ClassVar[bool] = False

    def parameters(self, settings: Optimize, base: Any) -> dict[str, Any]:  # noqa: ARG002
        return published_as(base.config)

    def check(self, settings: Optimize, base: Any) -> None:
        """There is nothing to check before the weights are read."""

    def quantize(self, settings: Optimize, base: Any, target: Path) -> Peak:  # noqa: ARG002
        files = {file.path for file in base.record.files}
        place_tree(base.directory, target, files.difference(base.record.carried))
        return Peak(peak_resident_bytes())

    def verify(self, base: Any, directory: Path, parameters: Mapping[str, Any]) -> int:
        """Check that all tensors are stored as config.json says."""
        if form := published_format(base.config):
            form.check(read_headers(directory.glob("*.safetensors")))
        return int(parameters["bits"])


def published_as(config: Config) -> dict[str, Any]:
    """Describe how a publisher stores a model, for the parameters of a variant."""
    form = published_format(config)
    bits = (form.storage if form else SIXTEEN_BIT).weight_bits
    return {"quant_method": form and form.method, "format": form.name if form else REFERENCE, "bits": bits}


def storage_of_variant(variant: Variant, directory: Path) -> Storage | None:
    """Describe how the variant in *directory* stores weights; None for a method that is not known."""
    if variant.published:
        form = published_format(json.loads((directory / "config.json").read_bytes()))
        return form.storage if form else SIXTEEN_BIT
    return storage_of(variant.method, variant.group_size) if variant.method in FORMATS else None


def quantization_of(config: Config) -> Config | None:
    """Find how a model is quantized; None if it is not. A multimodal model may say it of its text model."""
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping) and (stated := part.get("quantization_config") or part.get("compression_config")):
            return stated if isinstance(stated, Mapping) else {}
    return None


def published_format(config: Config, paths: Collection[str] = ()) -> PublishedFormat | None:
    """Recognize the format of a model by its config.json; None if it is published in 16 or 32 bit.

    Args:
        paths: all files of the repository, as far as they are known.

    Raises:
        UnusableModel: the model is quantized in a way that can't be served; the message names it.
    """
    quantization = quantization_of(config)
    if quantization is None:
        if older := [name for name in ELSEWHERE if name in paths]:
            raise UnusableModel(f"the model is quantized by {older[0]}, and config.json does not say how", hint=INSTEAD)
        return None
    method = str(quantization.get("quant_method", "an unknown method")).lower().replace("_", "-")
    if method not in METHODS:
        raise UnusableModel(f"the model is quantized by {method}, which slipway can't serve", hint=INSTEAD)
    try:
        form, kept = METHODS[method](quantization), _kept(quantization)
    except (LookupError, TypeError, ValueError, AttributeError, re.error) as error:
        raise UnusableModel(
            f"the model is quantized by {method} in a way that is not known ({error!r})", hint=INSTEAD
        ) from error

    return replace(form, method=method, storage=replace(form.storage, kinds=form.storage.kinds - kept))


def _kept(quantization: Config) -> set[Kind]:
    """Find the kinds of layers that stay in 16 bits, by the patterns of names that each method has."""
    fields = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")
    patterns = [str(pattern) for field in fields for pattern in quantization.get(field) or ()]

    def kept(layer: str) -> bool:
        return any(
            re.match(pattern[3:], layer)
            if pattern.startswith("re:")
            else pattern in layer or fnmatchcase(layer, f"{pattern}*")
            for pattern in patterns
        )

    return {kind for kind, layers in LAYERS.items() if all(map(kept, layers))}


def _form(
    name: str, bits: int, *scales: Scales, needs: Needs = "nothing", arithmetic: Literal["bf16", "fp8"] = "bf16"
) -> PublishedFormat:
    return PublishedFormat(
        name, Storage(name, bits, scales, capabilities=(MARLIN, math.inf), arithmetic=arithmetic), needs
    )


def _fp8(quantization: Config) -> PublishedFormat:
    block = quantization.get("weight_block_size")
    return _fp8_block(*block) if block else _form("fp8", 8, Scales(32, None, None), arithmetic="fp8")


def _fp8_block(outputs: int, inputs: int) -> PublishedFormat:
    return _form("fp8-block", 8, Scales(32, inputs, outputs), needs="amx", arithmetic="fp8")


def _integers(name: str, quantization: Config, *further: Scales) -> PublishedFormat:
    """Describe the integers of AWQ and GPTQ, whose groups of inputs have a scale and a zero point."""
    bits, size = quantization["bits"], quantization["group_size"]
    group = Scales(16, size if size > 0 else None)
    in_4_bit = bits == 4
    name, needs = (name, "avx512") if in_4_bit else (f"{name}-{bits}bit", "a GPU")
    return _form(name, bits, group, replace(group, bits=bits), *further, needs=needs)  # type: ignore[arg-type]


def _mxfp4(quantization: Config) -> PublishedFormat:  # noqa: ARG001
    """Describe gpt-oss, of which only the experts are in MXFP4."""
    storage = Storage("mxfp4", 4, (Scales(8, 32),), frozenset({"experts"}), capabilities=(8.0, math.inf))
    return PublishedFormat("mxfp4", storage, "amx")


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
            return _form(f"w{bits}a16", bits, group, *zeros, needs="avx512" if bits == 4 else "a GPU")
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
    per_tensor = weights.get("strategy") == "tensor"
    scale = Scales(16, None, None if per_tensor else 1)
    return _form(f"fp{bits}{suffix}", bits, scale, arithmetic="fp8" if activations else "bf16")


METHODS: Final[Mapping[str, Callable[[Config], PublishedFormat]]] = {
    "fp8": _fp8,
    "awq": lambda stated: _integers("awq", stated),
    "gptq": lambda stated: _integers("gptq", stated, Scales(32, 1, None, loaded=False)),
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
}
"""How each method's ``quantization_config`` is read. Errors mean that it has another form."""
