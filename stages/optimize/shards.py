"""Rewrite the base's shards in blocks, so that memory stays small for any size of shard or tensor.

The safetensors library can only write a whole shard from memory, so this module writes the files (format: see
stages/parts/model/safetensors.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stages.optimize.base_model import Base
from stages.parts.base.errors import QuantizationFailed
from stages.parts.base.files import write_json
from stages.parts.model.checkpoint import CONFIG, INDEX
from stages.parts.model.safetensors import BITS, FLOATS, Tensor, read_headers

if TYPE_CHECKING:
    import numpy as np

BLOCK_BYTES: Final = 64 << 20
"""Block size: a multiple of the size of every type."""
HEADER_ALIGNMENT: Final = 8
LOWER_BITS: Final = 16
"""A bfloat16 is a float32 without them."""

Entry = tuple[str, str, tuple[int, ...]]
"""Name, type and shape of a tensor in a new file."""


def layout(entries: Iterable[Entry]) -> tuple[bytes, dict[str, int]]:
    """Make the safetensors header for tensors in this order, and the position in the file where each one starts."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    position = 0
    for name, dtype, shape in entries:
        end = position + math.prod(shape) * BITS[dtype] // 8
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        starts[name] = position
        position = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    data = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: data + start for name, start in starts.items()}


def by_width(entries: Iterable[Entry]) -> list[Entry]:
    """Put the wider types first, as in the library, so that each tensor begins at a multiple of its type's size."""
    return sorted(entries, key=lambda entry: -BITS[entry[1]])


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of the safetensors files in *directory* by name."""
    return read_headers(directory.glob("*.safetensors"))


def raw_blocks(tensor: Tensor, block_bytes: int) -> Iterator[bytes]:
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        for start in range(tensor.start, tensor.end, block_bytes):
            yield file.read(min(block_bytes, tensor.end - start))


def blocks(tensor: Tensor, block_bytes: int) -> Iterator[np.ndarray[Any, Any]]:
    """Read the values of *tensor* in flat blocks: bfloat16 as float32, and types other than floating-point as bytes."""
    import numpy as np

    for raw in raw_blocks(tensor, block_bytes):
        if tensor.dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            yield (np.frombuffer(raw, "<u2").astype(np.uint32) << LOWER_BITS).view(np.float32)
        else:
            yield np.frombuffer(raw, FLOATS.get(tensor.dtype, "uint8"))


def converted(tensor: Tensor, dtype: str, block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
    """Read the bytes of *tensor* in blocks, each value rounded to the nearest bfloat16 if *dtype* is another one;
    QuantizationFailed if a weight is too large for that."""
    if dtype == tensor.dtype:
        yield from raw_blocks(tensor, block_bytes)
    else:
        for block in blocks(tensor, block_bytes):
            yield to_bfloat16(tensor.name, block)


def to_bfloat16(name: str, block: np.ndarray[Any, Any]) -> bytes:
    """Round each value to the nearest bfloat16, of two equally near ones the even one, as IEEE 754 rounds."""
    import numpy as np

    with np.errstate(over="ignore"):
        bits = block.astype(np.float32).view(np.uint32)
    even = (bits >> LOWER_BITS) & 1
    rounded = (bits + (0x7FFF + even)) >> LOWER_BITS
    if not np.isfinite((rounded << LOWER_BITS).view(np.float32)).all():
        raise QuantizationFailed(
            f"bfloat16 cannot hold {name}: it has a weight of {float(np.abs(block).max()):.4g}",
            hint="the publisher's file is damaged: try another --revision, or tell the publisher",
        )
    return rounded.astype("<u2").tobytes()


def check_tensor(tensors: Mapping[str, Tensor], name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Refuse, with ValueError, a tensor that is missing or has another type or shape."""
    if name not in tensors:
        raise ValueError(f"{name} is missing")
    if (tensors[name].dtype, tensors[name].shape) != (dtype, shape):
        raise ValueError(f"{name} is {tensors[name].dtype} {list(tensors[name].shape)}, not {dtype} {list(shape)}")


def check_stated(stated: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse, with ValueError, a ``config.json`` whose quantization is not as the weights are."""
    for field, value in expected.items():
        if stated.get(field) != value:
            raise ValueError(f"config.json says {field} {stated.get(field)!r}, not {value!r}")


def kept_dtype(base: Base, tensor: Tensor) -> str:
    """Return the type of a tensor that is not quantized: its own, or bfloat16 if the base is wider than 16 bit."""
    wide = base.dtype in ("float32", "float64")
    return "BF16" if wide and tensor.dtype in ("F32", "F64") else tensor.dtype


def write_tensors(target: Path, tensors: Mapping[str, Tensor], dtypes: Mapping[str, str]) -> None:
    """Write a file with *tensors* under these names, in their own types or those of *dtypes*."""
    written = by_width((name, dtypes.get(name, each.dtype), each.shape) for name, each in tensors.items())
    header, _ = layout(written)
    with target.open("wb") as writer:
        writer.write(header)
        for name, dtype, _ in written:
            writer.writelines(converted(tensors[name], dtype))


def write_index(target: Path, base: Base | None = None) -> None:
    """Write an index of the shards in *target*: the base's with their tensors and total size, or one of its own."""
    index = json.loads((base.directory / INDEX).read_bytes()) if base else {"weight_map": {}}
    tensors = read_weights(target)
    total = sum(tensor.end - tensor.start for tensor in tensors.values())
    index["metadata"] = {**index.get("metadata", {}), "total_size": total}
    index["weight_map"] |= {name: tensor.path.name for name, tensor in tensors.items()}
    write_json(target / INDEX, index)


def write_config(base: Base, target: Path, dtype: str, **fields: Any) -> None:
    """Write the base's ``config.json`` with another dtype and with these *fields*."""
    config = with_dtype(base.config, dtype)
    if not {"dtype", "torch_dtype"} & config.keys():
        config["dtype"] = dtype
    write_json(target / CONFIG, config | fields)


def with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """*config* with another dtype wherever it has one (``dtype`` in transformers 5, ``torch_dtype`` before)."""
    changed = {key: with_dtype(value, dtype) if isinstance(value, dict) else value for key, value in config.items()}
    stated = [key for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str)]
    return {**changed, **dict.fromkeys(stated, dtype)}
