"""Check from a variant's files whether they are what its method should have made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stages.optimize.base_model import FLOATS, SIXTEEN_BIT, Base, bytes_by_type, main_dtype
from stages.optimize.int8 import FORMAT, kept_dtype, quantized_weights, scale_name, unquantized_layers
from stages.optimize.shards import blocks
from stages.parts.base.errors import DamagedModel, QuantizationFailed
from stages.parts.model.checkpoint import CONFIG
from stages.parts.model.safetensors import BITS, Tensor, find_not_finite, read_header

if TYPE_CHECKING:
    import numpy as np

MAX_UNQUANTIZED_SHARE: Final = 0.1
"""Share of the linear layers' weights. Quantizers skip some layers on purpose, such as a mixture's router."""
PACK_BITS: Final = 32
PARTS: Final = ("qweight", "qzeros", "scales", "g_idx")
EIGHT_BIT: Final = {"num_bits": 8, "type": "int", "symmetric": True}
COMPARED: Final = 4 << 20
"""Weights that are compared at once: 16 MiB in float32."""
HALF_STEP: Final = 0.5 + 1e-4
"""Largest distance of a weight from its int8 value, in steps, with what float32 arithmetic adds."""
DERIVED: Final = ("inv_freq", ".attn.masked_bias", ".attn.bias")
"""Buffers in older checkpoints, which libraries now compute and no longer store."""


@dataclass(frozen=True)
class WeightsSummary:
    """Size and types of a variant's weights."""

    bytes: int
    bits: int
    dtype: str
    """The type of most tensors that are not quantized."""
    stored: dict[str, int]
    """Bytes by type."""


@dataclass(frozen=True)
class Packed:
    """One quantized layer, as the shapes of its tensors describe it."""

    bits: int
    group_size: int
    inputs: int
    outputs: int


def verify(method: str, base: Base, directory: Path, *, group_size: int | None) -> WeightsSummary:
    """Check the weights in *directory* against the base's.

    Args:
        group_size: the group size of a 4-bit variant; None for fp16 and int8.

    Raises:
        QuantizationFailed: a tensor is missing, has the wrong type or shape, or holds NaN, infinity or other values.
    """
    try:
        files = {path: read_header(path) for path in sorted(directory.glob("*.safetensors"))}
        tensors = {name: tensor for header in files.values() for name, tensor in header.items()}
        if method == "int8":
            bits = check_int8(base, directory, files)
        elif group_size is None:
            bits = check_half(base, tensors)
        else:
            bits = check_quantized(base, tensors, group_size)
            check_config(directory, method, bits, group_size)
        check_finite(files)
    except (ValueError, DamagedModel) as error:
        raise QuantizationFailed(
            f"{method} made wrong weights from {base.architecture}: {error}",
            hint="nothing was published; the other variants continue without it",
        ) from error
    scales = {scale_name(name) for name in tensors}
    plain = [tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in PARTS and name not in scales]
    total = sum(tensor.end - tensor.start for tensor in tensors.values())
    return WeightsSummary(bytes=total, bits=bits, dtype=main_dtype(plain), stored=bytes_by_type(tensors.values()))


def check_half(base: Base, tensors: Mapping[str, Tensor]) -> int:
    """Check that all tensors of the base are there, unchanged, or in bfloat16 if they are floating-point and the base
    is wider. Returns the bits: 16.

    Raises:
        ValueError
    """
    for name, original in base.tensors.items():
        if name not in tensors:
            raise ValueError(f"{name} is missing")
        copy = tensors[name]
        cast = base.dtype not in SIXTEEN_BIT and original.dtype in FLOATS
        expected = "BF16" if cast else original.dtype
        if (copy.dtype, copy.shape) != (expected, original.shape):
            raise ValueError(f"{name} is {copy.dtype} {list(copy.shape)}, not {expected} {list(original.shape)}")
    return 16


def check_quantized(base: Base, tensors: Mapping[str, Tensor], group_size: int) -> int:
    """Check that all layers of the base are there, the decoder's linear layers packed. Returns the bits per weight.

    Raises:
        ValueError
    """
    layers = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    packed = {f"{layer}.weight": read_packed(layer, tensors) for layer in layers}
    for name, layer in packed.items():
        if name in base.tensors and {layer.inputs, layer.outputs} != set(base.tensors[name].shape):
            raise ValueError(
                f"{name} was {list(base.tensors[name].shape)} and is now [{layer.outputs}, {layer.inputs}]"
            )
        if layer.group_size != group_size:
            raise ValueError(f"{name} has groups of {layer.group_size}, not {group_size}")
    check_complete(base, tensors, packed)
    done = sum(layer.inputs * layer.outputs for layer in packed.values())
    total = sum(tensor.count for tensor in base.linear_weights.values())
    if done < (1 - MAX_UNQUANTIZED_SHARE) * total or not done:
        raise ValueError(f"only {done / max(1, total):.0%} of the linear layers' weights are quantized")
    bits = {layer.bits for layer in packed.values()}
    if len(bits) > 1:
        raise ValueError(f"the layers differ in bits: {sorted(bits)}")
    return bits.pop()


def read_packed(layer: str, tensors: Mapping[str, Tensor]) -> Packed:
    """One layer, from the shapes of scales (groups, outputs), qzeros (groups, outputs·bits/32) and qweight, which is
    (inputs·bits/32, outputs) in gptq's layout and (inputs, outputs·bits/32) in awq's.

    Raises:
        ValueError: the tensors are incomplete or don't belong together.
    """
    missing = [part for part in PARTS[:3] if f"{layer}.{part}" not in tensors]
    if missing:
        raise ValueError(f"{layer}.{missing[0]} is missing")
    weight, zeros, scales = (tensors[f"{layer}.{part}"] for part in PARTS[:3])
    if (weight.dtype, zeros.dtype, scales.dtype in FLOATS) != ("I32", "I32", True):
        raise ValueError(f"{layer} is packed as {weight.dtype}, {zeros.dtype} and {scales.dtype}")
    groups, outputs = scales.shape
    bits = zeros.shape[1] * PACK_BITS // outputs
    inputs = weight.shape[0] if weight.shape[1] < outputs else weight.shape[0] * PACK_BITS // max(1, bits)
    if zeros.shape[0] != groups or weight.count * PACK_BITS != inputs * outputs * bits or not groups:
        raise ValueError(f"{layer}: qweight, qzeros and scales don't belong together")
    return Packed(bits, inputs // groups, inputs, outputs)


def check_complete(base: Base, tensors: Mapping[str, Tensor], packed: Mapping[str, Packed]) -> None:
    """Check that no tensor of the base is missing or renamed: vLLM finds weights by the publisher's names.

    Raises:
        ValueError
    """
    for name, original in base.tensors.items():
        if name not in tensors and name not in packed and not name.endswith(DERIVED) and not is_tied(base, name):
            raise ValueError(f"{name} is missing")
        if name in tensors and tensors[name].shape != original.shape:
            raise ValueError(f"{name} was {list(original.shape)} and is now {list(tensors[name].shape)}")


def check_config(directory: Path, method: str, bits: int, group_size: int) -> None:
    """Check that ``config.json`` agrees with the tensors.

    Raises:
        ValueError
    """
    stated = json.loads((directory / CONFIG).read_bytes()).get("quantization_config", {})
    expected: dict[str, Any] = {"quant_method": method, "bits": bits, "group_size": group_size}
    for field, value in expected.items():
        if stated.get(field) != value:
            raise ValueError(f"config.json says {field} {stated.get(field)!r}, the weights say {value!r}")


def check_int8(base: Base, directory: Path, files: Mapping[Path, Mapping[str, Tensor]]) -> int:
    """Check that all layers of the base are there, the decoder's linear layers in int8 and within half a step of the
    base's weights, and that ``config.json`` says so. Returns the bits per weight: 8.

    Raises:
        ValueError
    """
    tensors = {name: tensor for header in files.values() for name, tensor in header.items()}
    chosen = quantized_weights(base)
    for name, original in base.tensors.items():
        check_like(tensors, name, "I8" if name in chosen else kept_dtype(base, original), original.shape)
        if name in chosen:
            check_like(tensors, scale_name(name), "F32", (original.shape[0], 1))
    sources = {name: base.directory / file for file in base.weights for name in read_header(base.directory / file)}
    targets = {name: path for path, header in files.items() for name in header}
    for name, original in chosen.items():
        scale, count = scale_name(name), max(1, COMPARED // original.shape[1])
        check_rounded(
            name,
            rows(sources[name], original, count),
            rows(targets[name], tensors[name], count),
            rows(targets[scale], tensors[scale], count),
        )
    check_int8_config(base, directory)
    return 8


def check_like(tensors: Mapping[str, Tensor], name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Raises: ValueError: the tensor is missing, or has another type or shape."""
    if name not in tensors:
        raise ValueError(f"{name} is missing")
    if (tensors[name].dtype, tensors[name].shape) != (dtype, shape):
        raise ValueError(f"{name} is {tensors[name].dtype} {list(tensors[name].shape)}, not {dtype} {list(shape)}")


def rows(path: Path, tensor: Tensor, count: int) -> Iterator[np.ndarray[Any, Any]]:
    """Blocks of *count* rows of a matrix."""
    width = tensor.shape[1]
    with path.open("rb") as file:
        for block in blocks(tensor, file, count * width * BITS[tensor.dtype] // 8):
            yield block.reshape(-1, width)


def check_rounded(name: str, *blocks_of: Iterator[np.ndarray[Any, Any]]) -> None:
    """Check the blocks of a layer's original weights, its int8 values and its scales.

    Raises:
        ValueError: a scale is not a positive number, or a weight is more than half a step from the original.
    """
    import numpy as np

    for original, values, scale in zip(*blocks_of, strict=True):
        if not (np.isfinite(scale) & (scale > 0)).all():
            raise ValueError(f"{name} has a scale that is not a positive number")
        distance = np.abs(values.view(np.int8) * scale - original)
        if not (distance <= HALF_STEP * scale).all():
            raise ValueError(f"{name} has a weight that is more than half a step from the original")


def check_int8_config(base: Base, directory: Path) -> None:
    """Check that ``config.json`` names this scheme, and every layer that it does not hold for.

    Raises:
        ValueError
    """
    stated = json.loads((directory / CONFIG).read_bytes()).get("quantization_config", {})
    group = stated.get("config_groups", {}).get("group_0", {})
    expected: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (stated, {"quant_method": "compressed-tensors", "format": FORMAT, "ignore": unquantized_layers(base)}),
        (group, {"targets": ["Linear"]}),
        (group.get("weights") or {}, {**EIGHT_BIT, "strategy": "channel", "dynamic": False}),
        (group.get("input_activations") or {}, {**EIGHT_BIT, "strategy": "token", "dynamic": True}),
    ]
    for found, fields in expected:
        for field, value in fields.items():
            if found.get(field) != value:
                raise ValueError(f"config.json says {field} {found.get(field)!r}, not {value!r}")


def check_finite(files: Mapping[Path, Mapping[str, Tensor]]) -> None:
    """Raises: ValueError: a floating-point tensor contains NaN or infinity."""
    for path, header in files.items():
        if found := find_not_finite(path, iter(header.values())):
            raise ValueError(f"{found[0].name} holds NaN or infinity")


def is_tied(base: Base, name: str) -> bool:
    """Whether *name* is a head that shares the weights of the embedding, and may therefore be missing."""
    return name == "lm_head.weight" and bool(base.setting("tie_word_embeddings"))
