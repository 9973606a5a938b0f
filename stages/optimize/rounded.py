"""The formats that need no calibration: a preset of compressed-tensors, with weights rounded to the nearest value.

The arithmetic, the packing and the configuration are those of compressed-tensors
(https://github.com/vllm-project/compressed-tensors). Its converter loads each file as a whole, as llm-compressor's
``model_free_ptq`` does, so this module hands it blocks of rows. It computes in float32, and the same base always gives
the same bytes.

int8 and fp8 have a scale per output channel, and activations one per token; fp8-block has one per 128 × 128 weights,
mxfp4 a power of two per 32 weights, nvfp4a16 an 8-bit float per 16 weights under one scale per layer. nvfp4a16 leaves
activations in 16 bit: those of NVFP4 need a scale from calibration.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from scoring.capacity.storage import LINEAR, MARLIN, Scales, Storage
from stages.optimize import shards
from stages.optimize.base_model import BLOCK_WEIGHT, MAX_16_BIT_SHARE, Base
from stages.parts.base.errors import QuantizationFailed
from stages.parts.base.formats import Format, Peak
from stages.parts.base.log import say
from stages.parts.base.optimize_settings import Optimize
from stages.parts.machine.process import peak_resident_bytes
from stages.parts.model.checkpoint import CONFIG, why_not_quantized
from stages.parts.model.published import preset_configuration
from stages.parts.model.safetensors import BITS, FLOATS, Tensor, read_header

if TYPE_CHECKING:
    import torch

BLOCK_BYTES: Final = 1 << 20
"""Block size: it fits the processor's cache, and then one thread is faster than several, which wait for each other."""
ROUTER: Final = re.compile(r"(^|\.)(gate|\w+_gate|\w*router\w*)\.")
"""Layers that choose or weigh experts. They are small and sensitive, and vLLM serves most of them in 16 bit only."""
MERGED: Final = (
    ("gate_proj", "up_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("w1", "w3"),
)
"""Layers that vLLM computes as one, with one global scale: FUSED_LAYER_NAMES of llm-compressor."""
TYPES: Final = {
    "I8": "int8",
    "U8": "uint8",
    "I32": "int32",
    "I64": "int64",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
}
"""What compressed-tensors stores: torch's types by their names in safetensors."""
SLACK: Final = 1 + 2e-4
"""What float32 arithmetic adds to the distance of a weight from its rounded value."""
TINY: Final = 0.006
"""The distance, in global steps, where all weights of a group are too small for its scale's 8-bit float."""
FREE: Final = ("observer", "observer_kwargs", "actorder")
"""Fields of a preset that say how weights are chosen, not how they are stored."""
RECIPE: Final = 2
"""Increased when the same base gives other files, so that older variants are made again."""


class Rounded:
    """Makes the format that *storage* describes, the preset *scheme* of compressed-tensors.

    *tolerance* is the largest distance of a weight from its rounded value, as a share of the largest weight under the
    same scale.
    """

    tools: ClassVar[tuple[str, ...]] = ("compressed-tensors", "torch")
    calibrated: ClassVar[bool] = False

    def __init__(self, scheme: str, storage: Storage, tolerance: float) -> None:
        block, *further = storage.scales
        self.scheme, self.name, self.bits = scheme, storage.label, storage.weight_bits
        self.outputs, self.inputs = block.outputs or 1, block.inputs
        self.has_global_scale = bool(further)
        self.tolerance = tolerance

    def parameters(self, settings: Optimize, base: Base) -> dict[str, Any]:  # noqa: ARG002
        return {"bits": self.bits, "scheme": self.scheme, "dtype": base.half_dtype, "recipe": RECIPE}

    def check(self, settings: Optimize, base: Base) -> None:  # noqa: ARG002
        """Check that vLLM can serve the decoder's layers in this format, from the headers of the files."""
        if wrong := why_not_quantized(base.tensors) or self.obstacle(base):
            hint = "the other variants continue without it"
            raise QuantizationFailed(f"{self.name} cannot quantize {base.record.architecture}: {wrong}", hint=hint)

    def obstacle(self, base: Base) -> str:
        """Why the format can't be made from the base; empty if it can."""
        quantized = quantized_weights(base)
        if not quantized:
            return f"it has no linear layers that vLLM serves in {self.name}"
        for name, tensor in quantized.items():
            bias = base.tensors.get(f"{name.removesuffix('weight')}bias")
            if bias and bias.shape != tensor.shape[:1]:
                return f"{name} is stored as (inputs, outputs), as its bias of {bias.count} shows"
            if tensor.shape[0] % self.outputs or tensor.shape[1] % (self.inputs or 1):
                return f"blocks of {self.outputs} × {self.inputs} weights do not divide {name} {list(tensor.shape)}"
        return too_much_in_16_bit(base, self.name)

    def quantize(self, settings: Optimize, base: Base, target: Path) -> Peak:  # noqa: ARG002
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            scales = self.global_scales(base)
            for number, name in enumerate(base.weights, 1):
                say(f"{self.name}: {name} ({number} of {len(base.weights)})")
                self.quantize_file(base, base.directory / name, target / name, scales)
        finally:
            torch.set_num_threads(threads)
        if len(base.weights) > 1:
            shards.write_index(target, base)
        stated = preset_configuration(self.scheme, unquantized_layers(base))
        shards.write_config(base, target, base.half_dtype, quantization_config=stated)
        return Peak(peak_resident_bytes())

    def global_scales(self, base: Base) -> dict[str, torch.Tensor]:
        """Compute the scale of each layer's scales, by the weight's name; empty if the format has none."""
        import torch
        from compressed_tensors.quantization.utils import generate_gparam

        if not self.has_global_scale:
            return {}
        largest: dict[tuple[str, ...], torch.Tensor] = {}
        for name, tensor in quantized_weights(base).items():
            for values in self.rows(tensor, tensor):
                so_far = largest.get(merged(name), torch.zeros(1))
                largest[merged(name)] = torch.maximum(so_far, values.abs().max())
        return {
            name: generate_gparam(-largest[merged(name)], largest[merged(name)]) for name in quantized_weights(base)
        }

    def quantize_file(self, base: Base, source: Path, target: Path, scales: Mapping[str, torch.Tensor]) -> None:
        """Write the shard *source* to *target*, the decoder's linear layers in this format."""
        tensors, quantized = read_header(source), quantized_weights(base)
        parts = {name: self.parts(base, tensor, name in quantized) for name, tensor in tensors.items()}
        header, starts = shards.layout(shards.by_width(sorted(part for each in parts.values() for part in each)))
        with target.open("wb") as writer:
            writer.write(header)
            for name, tensor in tensors.items():
                if name not in quantized:
                    writer.seek(starts[name])
                    writer.writelines(shards.converted(tensor, shards.kept_dtype(base, tensor), BLOCK_BYTES))
                    continue
                for values in self.rows(tensor, tensor):
                    for part, block in self.compress(name, values, scales.get(name)).items():
                        writer.seek(starts[part])
                        writer.write(block.contiguous().flatten().view(_torch("U8")).numpy())
                        starts[part] += block.nbytes if block.ndim > 1 else 0

    def parts(self, base: Base, tensor: Tensor, quantized: bool) -> list[tuple[str, str, tuple[int, ...]]]:
        """List what is stored of a tensor of the base, as names, types and shapes."""
        import torch

        if not quantized:
            return [(tensor.name, shards.kept_dtype(base, tensor), tensor.shape)]
        scale = torch.ones(1) if self.has_global_scale else None
        sample = self.compress(tensor.name, torch.zeros(self.outputs, tensor.shape[1]), scale)
        times = tensor.shape[0] // self.outputs
        names = {_torch(name): name for name in TYPES}
        return [
            (part, names[block.dtype], (len(block) * (times if block.ndim > 1 else 1), *block.shape[1:]))
            for part, block in sample.items()
        ]

    def compress(self, name: str, values: torch.Tensor, global_scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Round rows of the weight *name*. Returns what is stored of them, by the tensors' names."""
        import torch
        from compressed_tensors.quantization.utils import calculate_qparams

        low, high = self.bounds(values)
        if not (torch.isfinite(low) & torch.isfinite(high)).all():
            hint = "the publisher's file is damaged: try another --revision, or tell the publisher"
            raise QuantizationFailed(f"{self.name} cannot quantize {name}: it holds NaN or infinity", hint=hint)
        scheme, compressor = preset(self.scheme, self.inputs)
        scale, zero = calculate_qparams(low, high, scheme.weights, global_scale=global_scale)
        state = {"weight": values, "weight_scale": scale, "weight_zero_point": zero}
        if global_scale is not None:
            state["weight_global_scale"] = global_scale
        return {
            f"{name.removesuffix('weight')}{part}": each for part, each in compressor.compress(state, scheme).items()
        }

    def bounds(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Find the smallest and the largest weight under each scale."""
        blocked = values.reshape(len(values) // self.outputs, self.outputs, -1, self.inputs or values.shape[1])
        return blocked.amin((1, 3)), blocked.amax((1, 3))

    def rows(self, matrix: Tensor, original: Tensor) -> Iterator[torch.Tensor]:
        """Read what is stored of the matrix *original* in blocks of its rows, floats in float32."""
        import numpy as np
        import torch

        row_bytes = original.shape[1] * BITS[original.dtype] // 8
        count = max(1, BLOCK_BYTES // (row_bytes * self.outputs)) * self.outputs
        stored_bytes = (matrix.end - matrix.start) * count // original.shape[0]
        # What is no matrix belongs to all rows.
        for block in shards.blocks(matrix, stored_bytes if len(matrix.shape) > 1 else matrix.end - matrix.start):
            floats = matrix.dtype in FLOATS
            values = torch.from_numpy(block.astype(np.float32) if floats else block.copy())
            yield (values if floats else values.view(_torch(matrix.dtype))).reshape(-1, *matrix.shape[1:])

    def verify(self, base: Base, directory: Path, parameters: Mapping[str, Any]) -> int:  # noqa: ARG002
        """Check that all layers of the base are there, the decoder's linear layers in this format and as near to the
        base's weights as it allows, and that ``config.json`` says so."""
        self.check_tensors(base, shards.read_weights(directory))
        expected = preset_configuration(self.scheme, unquantized_layers(base), self.inputs)
        stated = json.loads((directory / CONFIG).read_bytes()).get("quantization_config", {})
        shards.check_stated(stated, {field: expected[field] for field in ("quant_method", "format", "ignore")})
        group, given = (each.get("config_groups", {}).get("group_0", {}) for each in (expected, stated))
        shards.check_stated(given, {"targets": group["targets"]})
        for part in ("weights", "input_activations"):
            values = {field: value for field, value in (group[part] or {}).items() if field not in FREE}
            shards.check_stated(given.get(part) or {}, values)
        return self.bits

    def check_tensors(self, base: Base, tensors: Mapping[str, Tensor]) -> None:
        """Check the types, shapes and values of *tensors* against the base's."""
        import torch

        weights, (scheme, compressor) = quantized_weights(base), preset(self.scheme, self.inputs)
        for name, original in base.tensors.items():
            for part, dtype, shape in self.parts(base, original, name in weights):
                shards.check_tensor(tensors, part, dtype, shape)
        for name, original in weights.items():
            read = {}
            for part, _, shape in self.parts(base, original, quantized=True):
                blocks_of = self.rows(tensors[part], original)
                read[part.removeprefix(name.removesuffix("weight"))] = (
                    blocks_of if len(shape) > 1 else repeat(next(blocks_of))
                )
            for values in self.rows(original, original):
                state = {part: next(blocks_of) for part, blocks_of in read.items()}
                state |= {"weight_shape": torch.tensor(values.shape)} if "weight_shape" in state else {}
                if not self.is_near(values, compressor.decompress(dict(state), scheme)["weight"], state):
                    raise ValueError(f"{name} has a weight that is too far from the original")

    def is_near(self, values: torch.Tensor, made: torch.Tensor, state: Mapping[str, torch.Tensor]) -> bool:
        """Whether the weights *made* of rows of the base are as near as the format allows; *state*: what is stored."""
        furthest, largest = self.bounds((made - values).abs())[1], self.bounds(values.abs())[1]
        spare = TINY / state["weight_global_scale"] if self.has_global_scale else 0
        return bool((furthest <= self.tolerance * SLACK * largest + spare).all())


def quantized_weights(base: Base) -> dict[str, Tensor]:
    """Choose the weights of the decoder's linear layers that are quantized, by name. Shape: (outputs, inputs).

    Routers stay in 16 bit, and so do Mamba's first-generation mixers (known by ``x_proj``), for which vLLM has no
    quantized layers.
    """
    mixers = {name.removesuffix("x_proj.weight") for name in base.linear_weights if name.endswith(".x_proj.weight")}
    return {
        name: tensor
        for name, tensor in base.linear_weights.items()
        if tensor.count and not ROUTER.search(name) and not name.startswith(tuple(mixers))
    }


def too_much_in_16_bit(base: Base, format_name: str) -> str:
    """Say which of the decoder's layers would stay in 16 bit, if they are too many; empty otherwise."""
    quantized = quantized_weights(base)
    decoder = f"{BLOCK_WEIGHT.match(next(iter(quantized)))[1]}."  # type: ignore[index]
    matrices = {
        name: tensor.count
        for name, tensor in base.tensors.items()
        if name.startswith(decoder) and len(tensor.shape) > 1 and tensor.dtype in FLOATS
    }
    in_16_bit = {name: count for name, count in matrices.items() if name not in quantized}
    if sum(in_16_bit.values()) <= MAX_16_BIT_SHARE * sum(matrices.values()):
        return ""
    largest = max(in_16_bit, key=in_16_bit.__getitem__)
    return (
        f"{largest} {list(base.tensors[largest].shape)} is no linear layer that vLLM serves in {format_name}, and "
        f"{sum(in_16_bit.values()) / sum(matrices.values()):.0%} of the decoder's weights would stay in 16 bit"
    )


def unquantized_layers(base: Base) -> list[str]:
    """List the head, and every other layer with a matrix that stays in 16 bit."""
    quantized = quantized_weights(base)
    matrices = [name for name, tensor in base.tensors.items() if name.endswith(".weight") and len(tensor.shape) > 1]
    return sorted({"lm_head", *(name.removesuffix(".weight") for name in matrices if name not in quantized)})


def merged(weight: str) -> tuple[str, ...]:
    """Name the layer that vLLM computes the *weight* in: its parent, and the layers that are merged there."""
    parent, _, layer = weight.removesuffix(".weight").rpartition(".")
    return parent, *next((names for names in MERGED if layer in names), (layer,))


@cache
def preset(scheme: str, inputs: int | None) -> tuple[Any, Any]:
    """Return a preset of compressed-tensors, with groups of that many inputs, and its compressor."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import preset_name_to_scheme

    made = preset_name_to_scheme(scheme, ["Linear"])
    if made.weights.group_size:
        made.weights.group_size = inputs
    return made, BaseCompressor.get_value_from_registry(infer_module_format(torch.nn.Linear, made).value)


def _torch(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, TYPES[name])
    return dtype


def _storage(label: str, weight_bits: int, *scales: Scales, **fields: Any) -> Storage:
    return Storage(label, weight_bits, scales, LINEAR | {"state space"}, **fields)


def rounded(scheme: str, storage: Storage, tolerance: float) -> Format:
    """Describe a format that vLLM serves as a checkpoint of compressed-tensors."""
    quantizer = Rounded(scheme, storage, tolerance)
    return Format(storage, quantizer, lambda size: preset_configuration(scheme, group_size=size), only_16_bit=True)


CHANNEL: Final = Scales(bits=32, inputs=None)
# int8's CUTLASS kernels read 16 values at a time, need a GPU from Turing on, and vLLM has none for Blackwell
# (vllm-project/vllm#27182). Marlin serves the others, with activations in 16 bit, on GPUs without their arithmetic.
_INT8: Final = _storage("int8", 8, CHANNEL, multiple=16, capabilities=(7.5, 10.0), arithmetic="int8")
INT8: Final = replace(rounded("W8A8", _INT8, 0.5 / 127.5), only_16_bit=False)
FP8: Final = rounded("FP8_DYNAMIC", _storage("fp8", 8, CHANNEL, capabilities=MARLIN, arithmetic="fp8"), 16 / 448)
_FP8_BLOCK: Final = _storage("fp8-block", 8, Scales(32, 128, 128), capabilities=MARLIN, arithmetic="fp8")
FP8_BLOCK: Final = rounded("FP8_BLOCK", _FP8_BLOCK, 16 / 448)
MXFP4: Final = rounded("MXFP4", _storage("mxfp4", 4, Scales(8, 32), capabilities=(8.0, math.inf)), 0.21)
_NVFP4A16: Final = _storage("nvfp4a16", 4, Scales(8, 16), Scales(32, None, None), capabilities=MARLIN)
NVFP4A16: Final = rounded("NVFP4A16", _NVFP4A16, 0.19)
