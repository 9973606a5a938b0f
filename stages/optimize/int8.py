"""int8: 8-bit weights with one scale per output channel, served with 8-bit activations with one scale per token (W8A8).

The arithmetic and the configuration are those of compressed-tensors (https://github.com/vllm-project/compressed-tensors).
Its converter loads each file as a whole, so this module reads and writes blocks of rows. Weights are rounded to
nearest in float32, without a calibration text, so the same base always gives the same bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Final

from scoring.capacity.storage import LINEAR, Scales, Storage
from stages.optimize.base_model import BLOCK_WEIGHT, MAX_16_BIT_SHARE, Base
from stages.optimize.shards import (
    Entry,
    blocks,
    by_width,
    check_stated,
    check_tensor,
    converted,
    kept_dtype,
    layout,
    read_weights,
    write_config,
    write_index,
)
from stages.parts.base.errors import QuantizationFailed
from stages.parts.base.formats import Format, Kernel, Peak
from stages.parts.base.log import say
from stages.parts.base.optimize_settings import Optimize
from stages.parts.machine.process import peak_resident_bytes
from stages.parts.model.checkpoint import CONFIG, why_not_quantized
from stages.parts.model.safetensors import BITS, FLOATS, Tensor, read_header

if TYPE_CHECKING:
    import numpy as np

SCALE: Final = "weight_scale"
FORMAT: Final = "int-quantized"
SCHEME: Final = "W8A8"
"""The scheme's name in compressed-tensors."""
BLOCK_BYTES: Final = 1 << 20
"""Block size: it fits the processor's cache, and then one thread is faster than several, which wait for each other."""
ROUTER: Final = re.compile(r"(^|\.)(gate|\w+_gate|\w*router\w*)\.")
"""Layers that choose or weigh experts. They are small and sensitive, and vLLM serves most of them in 16 bit only."""
EIGHT_BIT: Final = {"num_bits": 8, "type": "int", "symmetric": True}
COMPARED: Final = 4 << 20
"""Weights that are compared at once: 16 MiB in float32."""
HALF_STEP: Final = 0.5 + 1e-4
"""Largest distance of a weight from its int8 value, in steps, with what float32 arithmetic adds."""
RECIPE: Final = 1
"""Increased when the same base gives other files, so that older variants are made again."""


class Int8:
    tools: ClassVar[tuple[str, ...]] = ("compressed-tensors", "torch")
    calibrated: ClassVar[bool] = False

    def parameters(self, settings: Optimize, base: Base) -> dict[str, Any]:  # noqa: ARG002
        return {"bits": 8, "scheme": SCHEME, "dtype": base.half_dtype, "recipe": RECIPE}

    def check(self, settings: Optimize, base: Base) -> None:  # noqa: ARG002
        """Check that vLLM can serve the decoder's layers in this format, from the headers of the files."""
        if wrong := why_not_quantized(base.tensors) or obstacle(base):
            raise QuantizationFailed(
                f"int8 cannot quantize {base.architecture}: {wrong}", hint="the other variants continue without it"
            )

    def quantize(self, settings: Optimize, base: Base, target: Path) -> Peak:  # noqa: ARG002
        import torch

        quantized = quantized_weights(base)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for number, name in enumerate(base.weights, 1):
                say(f"int8: {name} ({number} of {len(base.weights)})")
                quantize_file(base, base.directory / name, target / name, quantized)
        finally:
            torch.set_num_threads(threads)
        if len(base.weights) > 1:
            write_index(target, base)
        write_config(base, target, base.half_dtype, quantization_config=quantization_config(base))
        return Peak(peak_resident_bytes())

    def verify(self, base: Base, directory: Path, parameters: Mapping[str, Any]) -> int:  # noqa: ARG002
        """Check that all layers of the base are there, the decoder's linear layers in int8 and within half a step of
        the base's weights, and that ``config.json`` says so."""
        check_tensors(base, directory)
        stated = json.loads((directory / CONFIG).read_bytes()).get("quantization_config", {})
        group = stated.get("config_groups", {}).get("group_0", {})
        layers = unquantized_layers(base)
        check_stated(stated, {"quant_method": "compressed-tensors", "format": FORMAT, "ignore": layers})
        check_stated(group, {"targets": ["Linear"]})
        check_stated(group.get("weights") or {}, {**EIGHT_BIT, "strategy": "channel", "dynamic": False})
        check_stated(group.get("input_activations") or {}, {**EIGHT_BIT, "strategy": "token", "dynamic": True})
        return 8


def quantized_weights(base: Base) -> dict[str, Tensor]:
    """Choose the weights of the decoder's linear layers that become int8, by name. Shape: (outputs, inputs).

    Routers stay in 16 bit, and so do Mamba's first-generation mixers (known by ``x_proj``), for which vLLM has no
    quantized layers.
    """
    mixers = {name.removesuffix("x_proj.weight") for name in base.linear_weights if name.endswith(".x_proj.weight")}
    return {
        name: tensor
        for name, tensor in base.linear_weights.items()
        if tensor.count and not ROUTER.search(name) and not name.startswith(tuple(mixers))
    }


def obstacle(base: Base) -> str:
    """Why int8 can't be made from the base; empty if it can."""
    quantized = quantized_weights(base)
    if not quantized:
        return "it has no linear layers that vLLM serves in int8"
    for name, tensor in quantized.items():
        bias = base.tensors.get(f"{name.removesuffix('weight')}bias")
        if bias and bias.shape != tensor.shape[:1]:
            return f"{name} is stored as (inputs, outputs), as its bias of {bias.count} shows"
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
        f"{largest} {list(base.tensors[largest].shape)} is no linear layer that vLLM serves in int8, and "
        f"{sum(in_16_bit.values()) / sum(matrices.values()):.0%} of the decoder's weights would stay in 16 bit"
    )


def unquantized_layers(base: Base) -> list[str]:
    """List the head, and every other layer with a matrix that stays in 16 bit."""
    quantized = quantized_weights(base)
    matrices = [name for name, tensor in base.tensors.items() if name.endswith(".weight") and len(tensor.shape) > 1]
    return sorted({"lm_head", *(name.removesuffix(".weight") for name in matrices if name not in quantized)})


def quantization_config(base: Base) -> dict[str, Any]:
    """``quantization_config`` of ``config.json``."""
    import compressed_tensors
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    config = QuantizationConfig(
        config_groups={"group_0": preset_name_to_scheme(SCHEME, ["Linear"])},
        format=FORMAT,
        quantization_status="compressed",
        ignore=unquantized_layers(base),
    )
    written: dict[str, Any] = json.loads(config.model_dump_json())
    return written | {"version": compressed_tensors.__version__}


def quantize_file(base: Base, source: Path, target: Path, quantized: Collection[str]) -> None:
    """Write the shard *source* to *target*, the *chosen* weights in int8 with their scales in float32."""
    tensors = read_header(source).values()
    written = by_width(sorted(entries(base, tensors, quantized)))
    header, starts = layout(written)
    types = {name: dtype for name, dtype, _ in written}
    with target.open("wb") as writer:
        writer.write(header)
        for tensor in tensors:
            writer.seek(starts[tensor.name])
            if tensor.name in quantized:
                scales = quantize_tensor(tensor, writer)
                writer.seek(starts[scale_name(tensor.name)])
                writer.write(scales)
            else:
                writer.writelines(converted(tensor, types[tensor.name], BLOCK_BYTES))


def entries(base: Base, tensors: Iterable[Tensor], quantized: Collection[str]) -> Iterable[Entry]:
    """List what is written for *tensors*."""
    for tensor in tensors:
        if tensor.name in quantized:
            yield tensor.name, "I8", tensor.shape
            yield scale_name(tensor.name), "F32", (tensor.shape[0], 1)
        else:
            yield tensor.name, kept_dtype(base, tensor), tensor.shape


def scale_name(weight: str) -> str:
    return f"{weight.removesuffix('weight')}{SCALE}"


def quantize_tensor(tensor: Tensor, writer: BinaryIO) -> bytes:
    """Write the values of *tensor* in int8, in blocks of rows. Returns its scales in float32, one per row."""
    import numpy as np
    import torch
    from compressed_tensors.quantization import preset_name_to_scheme, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = preset_name_to_scheme(SCHEME, ["Linear"]).weights
    row_bytes, scales = tensor.shape[1] * BITS[tensor.dtype] // 8, []
    for block in rows(tensor, max(1, BLOCK_BYTES // row_bytes)):
        values = torch.from_numpy(block.astype(np.float32))
        scale, zero = calculate_qparams(values.amin(1, keepdim=True), values.amax(1, keepdim=True), arguments)
        if not torch.isfinite(scale).all():
            raise QuantizationFailed(
                f"int8 cannot quantize {tensor.name}: it holds NaN or infinity",
                hint="the publisher's file is damaged: try another --revision, or tell the publisher",
            )
        writer.write(quantize(values, scale, zero, arguments, dtype=torch.int8).numpy().tobytes())
        scales.append(scale.numpy().tobytes())
    return b"".join(scales)


def check_tensors(base: Base, directory: Path) -> None:
    """Check the types, shapes and values of the tensors in *directory* against the base's."""
    import numpy as np

    tensors, weights = read_weights(directory), quantized_weights(base)
    for name, original in base.tensors.items():
        check_tensor(tensors, name, "I8" if name in weights else kept_dtype(base, original), original.shape)
        if name in weights:
            check_tensor(tensors, scale_name(name), "F32", (original.shape[0], 1))
    for name, original in weights.items():
        count = max(1, COMPARED // original.shape[1])
        blocks_of = (rows(tensor, count) for tensor in (original, tensors[name], tensors[scale_name(name)]))
        for weights_before, values, steps in zip(*blocks_of, strict=True):
            if not (np.isfinite(steps) & (steps > 0)).all():
                raise ValueError(f"{name} has a scale that is not a positive number")
            distance = np.abs(values.view(np.int8) * steps - weights_before)
            if not (distance <= HALF_STEP * steps).all():
                raise ValueError(f"{name} has a weight that is more than half a step from the original")


def rows(matrix: Tensor, count: int) -> Iterator[np.ndarray[Any, Any]]:
    """Read a matrix in blocks of *count* rows."""
    width = matrix.shape[1]
    return (block.reshape(-1, width) for block in blocks(matrix, count * width * BITS[matrix.dtype] // 8))


def choose_kernel() -> object:
    from vllm.model_executor.kernels.linear import init_int8_linear_kernel

    return init_int8_linear_kernel(
        is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name="int8"
    )


def choose_for_experts(experts: Any) -> object:
    from vllm.model_executor.layers.fused_moe.oracle.int8 import select_int8_moe_backend

    return select_int8_moe_backend(experts)


INT8: Final = Format(
    Storage(
        label="int8",
        weight_bits=8,
        scales=(Scales(bits=32, inputs=None),),
        kinds=LINEAR | {"state space"},
        multiple=16,  # of CUTLASS's kernels
        # CUTLASS needs a GPU from Turing on, and vLLM has no kernel for Blackwell (vllm-project/vllm#27182).
        capabilities=(7.5, 10.0),
        arithmetic="int8",
    ),
    Int8(),
    Kernel("onednn_scaled_mm", choose_kernel, experts_amx=True),
    choose_for_experts=choose_for_experts,
)
