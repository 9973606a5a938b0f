"""Read safetensors files as blocks of bytes, so that memory stays small for any size of file.

The format: 8 bytes (little-endian length of the header), the header as JSON (``{name: {dtype, shape,
data_offsets}}``), then the tensors' bytes without gaps. See https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stages.parts.base.errors import DamagedModel
from stages.parts.base.files import from_json

LONGEST_HEADER_BYTES: Final = 100_000_000
"""The reference implementation's limit."""
LARGEST_SMALL_BYTES: Final = 256 << 20
"""Of a model's files besides the weights; tokenizers have up to 40 MiB."""
MOST_DIMENSIONS: Final = 64
"""PyTorch's limit."""
SCAN_BYTES: Final = 1 << 20
"""Block size of the search for NaN: it fits the processor's cache, which is four times as fast as larger blocks."""
BITS: Final = {
    "BOOL": 8,
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
FLOATS: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NAMES: Final = {**FLOATS, "I8": "int8", "I32": "int32", "I64": "int64", "U8": "uint8", "BOOL": "bool"}
# A float is NaN or infinite exactly when all bits of its exponent are set; of F8_E4M3, which has no infinity, and of
# F8_E8M0, which is an exponent alone, when all bits but the sign are.
EXPONENT: Final = {
    "F8_E4M3": ("<u1", 0x7F),
    "F8_E5M2": ("<u1", 0x7C),
    "F8_E8M0": ("<u1", 0xFF),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
}


def damaged(message: str) -> DamagedModel:
    """Make the error of a model whose files were published damaged."""
    return DamagedModel(message, hint="try another --revision, or tell the publisher")


@dataclass(frozen=True)
class Tensor:
    """A tensor in the file *path*; ``start`` and ``end`` are positions there, in bytes."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file by name. Raises: DamagedModel: the header does not parse, or contradicts
    itself or the file's size; the message names the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(LONGEST_HEADER_BYTES, size - 8):
            raise damaged(
                f"{path.name} is truncated or not a safetensors file: {size} bytes, its header alone needs {length}"
            )
        raw = file.read(length)
    try:
        entries = from_json(raw)
        tensors = [_tensor(path, name, entry, 8 + length) for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise damaged(f"{path.name}: its safetensors header does not parse") from error
    # Every tensor is as long as its type and shape say, and they fill the file without gaps.
    position = 8 + length
    for tensor in sorted(tensors, key=lambda entry: (entry.start, entry.end)):
        bits = BITS.get(tensor.dtype)
        if tensor.start != position or (bits is not None and (tensor.end - tensor.start) * 8 != tensor.count * bits):
            raise damaged(f"{path.name}: tensor {tensor.name} is not where the header says")
        position = tensor.end
    if position != size:
        mistake = "is truncated" if size < position else "has bytes that belong to no tensor"
        raise damaged(f"{path.name} {mistake}: {size} bytes, its header says {position}")
    return {tensor.name: tensor for tensor in tensors}


def read_headers(paths: Iterable[Path]) -> dict[str, Tensor]:
    """Read the tensors of several files by name."""
    return {name: tensor for path in sorted(paths) for name, tensor in read_header(path).items()}


def main_dtype(tensors: Iterable[Tensor]) -> str:
    """Find the floating-point type of most bytes in *tensors*; empty if no tensor is floating-point."""
    sizes = {name: size for name, size in bytes_by_type(tensors).items() if name in FLOATS.values()}
    return max(sizes, key=sizes.__getitem__, default="")


def bytes_by_type(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Count the bytes of *tensors* by type: 'bfloat16', 'int32', …"""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[NAMES.get(tensor.dtype, tensor.dtype)] += tensor.end - tensor.start
    return dict(sorted(sizes.items()))


def find_not_finite(tensors: Iterable[Tensor]) -> tuple[Tensor, int] | None:
    """Find the first tensor with NaN or an infinite value, and the index of that value; None if all values are finite.

    Reads each byte once, in blocks. Skips integers, and floats of 4 and 6 bits, which have neither.
    """
    import numpy as np

    for tensor in tensors:
        if tensor.dtype not in EXPONENT:
            continue
        kind, mask = EXPONENT[tensor.dtype]
        with tensor.path.open("rb") as file:
            file.seek(tensor.start)
            for start in range(0, tensor.count, per_block := SCAN_BYTES // np.dtype(kind).itemsize):
                bits = np.fromfile(file, kind, min(per_block, tensor.count - start))
                bits &= np.array(mask, kind)
                wrong = bits == mask
                if wrong.any():
                    return tensor, start + int(wrong.argmax())
    return None


def _tensor(path: Path, name: str, entry: dict[str, Any], data: int) -> Tensor:
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if len(shape) > MOST_DIMENSIONS or not all(isinstance(each, int) and each >= 0 for each in (*shape, start, end)):
        raise ValueError(f"{name}: {entry}")
    return Tensor(path, name, str(entry["dtype"]), shape, data + start, data + end)
