"""Check from a variant's files whether they are what its quantizer should have made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.optimize.base_model import Base, bytes_by_type, main_dtype
from stages.optimize.shards import read_headers
from stages.parts.base.errors import DamagedModel, QuantizationFailed
from stages.parts.base.formats import FORMATS
from stages.parts.model.safetensors import Tensor, find_not_finite, read_header


@dataclass(frozen=True)
class WeightsSummary:
    """Size and types of a variant's weights."""

    bytes: int
    bits: int
    dtype: str
    """The type of most tensors that are not quantized."""
    stored: dict[str, int]
    """Bytes by type."""


def verify(method: str, base: Base, directory: Path, parameters: Mapping[str, Any]) -> WeightsSummary:
    """Check the weights in *directory*, made with the quantizer's *parameters*, against the base's.

    Raises:
        QuantizationFailed: a tensor is missing, has the wrong type or shape, or holds NaN, infinity or other values.
    """
    try:
        bits = FORMATS[method].quantizer.verify(base, directory, parameters)
        check_finite(directory)
        tensors = read_headers(directory)
    except (ValueError, DamagedModel) as error:
        raise QuantizationFailed(
            f"{method} made wrong weights from {base.architecture}: {error}",
            hint="nothing was published; the other variants continue without it",
        ) from error
    published = [tensor for name, tensor in tensors.items() if name in base.tensors]
    total = sum(tensor.end - tensor.start for tensor in tensors.values())
    return WeightsSummary(bytes=total, bits=bits, dtype=main_dtype(published), stored=bytes_by_type(tensors.values()))


def check_finite(directory: Path) -> None:
    """Refuse, with ValueError, a floating-point tensor with NaN or infinity."""
    for path in sorted(directory.glob("*.safetensors")):
        if not_finite := find_not_finite(path, read_header(path).values()):
            raise ValueError(f"{not_finite[0].name} holds NaN or infinity")


def check_tensor(tensors: Mapping[str, Tensor], name: str, dtype: str, shape: tuple[int, ...]) -> None:
    """Refuse, with ValueError, a tensor that is missing or has another type or shape."""
    if name not in tensors:
        raise ValueError(f"{name} is missing")
    if (tensors[name].dtype, tensors[name].shape) != (dtype, shape):
        raise ValueError(f"{name} is {tensors[name].dtype} {list(tensors[name].shape)}, not {dtype} {list(shape)}")
