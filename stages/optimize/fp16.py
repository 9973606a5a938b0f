"""fp16: every floating-point weight in float16, in the same shards. The reference of the comparison.

Tensors are converted in blocks, so that memory stays small for any size of shard or tensor. The safetensors library can
only write a whole shard from memory, so this module writes the files (format: see stages/parts/model/safetensors.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from stages.optimize.base_model import FLOATS, Base
from stages.optimize.quantizer import Peak, peak_resident_bytes
from stages.parts.base.errors import QuantizationFailed
from stages.parts.base.settings import Optimize
from stages.parts.model.checkpoint import CONFIG, INDEX
from stages.parts.model.safetensors import BITS, Tensor, read_header

if TYPE_CHECKING:
    import numpy as np

LARGEST: Final = 65504
"""float16's largest number (IEEE 754 binary16)."""
BLOCK_BYTES: Final = 64 << 20
"""Block size: a multiple of the size of every type."""
HEADER_ALIGNMENT: Final = 8
RECIPE: Final = 1
"""Increased when the same base is written in another way, so that older variants are made again."""


class Fp16:
    tools: tuple[str, ...] = ("numpy",)
    calibrated = False

    def parameters(self, settings: Optimize, base: Base) -> dict[str, Any]:  # noqa: ARG002
        return {"dtype": "float16", "recipe": RECIPE}

    def check(self, settings: Optimize, base: Base) -> None:
        """There is nothing to check before the weights are read."""

    def quantize(self, settings: Optimize, base: Base, target: Path) -> Peak:  # noqa: ARG002
        for name in base.weights:
            cast_file(base.directory / name, target / name)
        if len(base.weights) > 1:
            write_index(base, target)
        config = with_dtype(base.config, "float16")
        if not {"dtype", "torch_dtype"} & config.keys():
            config["dtype"] = "float16"
        (target / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return Peak(peak_resident_bytes())


def cast_file(source: Path, target: Path) -> None:
    """Write the shard *source* to *target* in float16. Tensors that are not floating-point stay unchanged.

    Raises:
        QuantizationFailed: a weight is too large for float16.
    """
    # Wider types come first, as in the library, so that each tensor begins at a multiple of its type's size.
    tensors = sorted(read_header(source).values(), key=lambda each: (-BITS[half_of(each.dtype)], each.start))
    with source.open("rb") as reader, target.open("wb") as writer:
        writer.write(header(tensors))
        for tensor in tensors:
            for block in blocks(tensor, reader):
                writer.write(to_half(tensor.name, block) if tensor.dtype in FLOATS else block.tobytes())


def header(tensors: Iterable[Tensor]) -> bytes:
    """The safetensors header for *tensors* in float16, in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        dtype = half_of(tensor.dtype)
        end = position + tensor.count * BITS[dtype] // 8
        entries[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def half_of(dtype: str) -> str:
    return "F16" if dtype in FLOATS else dtype


def blocks(tensor: Tensor, file: BinaryIO) -> Iterator[np.ndarray[Any, Any]]:
    """The values of *tensor* in flat blocks: bfloat16 as float32, and types that are not floating-point as bytes."""
    import numpy as np

    file.seek(tensor.start)
    for start in range(tensor.start, tensor.end, BLOCK_BYTES):
        raw = file.read(min(BLOCK_BYTES, tensor.end - start))
        if tensor.dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            yield (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            yield np.frombuffer(raw, FLOATS.get(tensor.dtype, "uint8"))


def to_half(name: str, block: np.ndarray[Any, Any]) -> bytes:
    import numpy as np

    with np.errstate(over="ignore"):
        half = block.astype(np.float16)
    if not np.isfinite(half).all():
        raise QuantizationFailed(
            f"fp16 cannot hold {name}: it has a weight of {float(np.abs(block).max()):.4g}, float16 allows {LARGEST}",
            hint="the model was made for bfloat16 or float32; awq and gptq keep its 16-bit type",
        )
    return half.tobytes()


def write_index(base: Base, target: Path) -> None:
    """Write the base's index with the total size of the float16 shards."""
    index = json.loads((base.directory / INDEX).read_bytes())
    headers = [read_header(target / name).values() for name in base.weights]
    total = sum(tensor.end - tensor.start for header in headers for tensor in header)
    index["metadata"] = {**index.get("metadata", {}), "total_size": total}
    (target / INDEX).write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """*config* with another dtype wherever it has one (``dtype`` in transformers 5, ``torch_dtype`` before)."""
    changed = {key: with_dtype(value, dtype) if isinstance(value, dict) else value for key, value in config.items()}
    stated = [key for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)]
    return {**changed, **dict.fromkeys(stated, dtype)}
