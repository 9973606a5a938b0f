"""fp16: every floating-point weight in float16, in the same shards. The reference of the comparison."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stages.optimize.base_model import FLOATS, Base
from stages.optimize.quantizer import Peak, peak_resident_bytes
from stages.optimize.shards import blocks, layout, write_config, write_index
from stages.parts.base.errors import QuantizationFailed
from stages.parts.base.settings import Optimize
from stages.parts.model.safetensors import BITS, read_header

if TYPE_CHECKING:
    import numpy as np

LARGEST: Final = 65504
"""float16's largest number (IEEE 754 binary16)."""
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
        write_config(base, target, "float16")
        return Peak(peak_resident_bytes())


def cast_file(source: Path, target: Path) -> None:
    """Write the shard *source* to *target* in float16. Tensors that are not floating-point stay unchanged.

    Raises:
        QuantizationFailed: a weight is too large for float16.
    """
    # Wider types come first, as in the library, so that each tensor begins at a multiple of its type's size.
    tensors = sorted(read_header(source).values(), key=lambda each: (-BITS[half_of(each.dtype)], each.start))
    header, _ = layout((each.name, half_of(each.dtype), each.shape) for each in tensors)
    with source.open("rb") as reader, target.open("wb") as writer:
        writer.write(header)
        for tensor in tensors:
            for block in blocks(tensor, reader):
                writer.write(to_half(tensor.name, block) if tensor.dtype in FLOATS else block.tobytes())


def half_of(dtype: str) -> str:
    return "F16" if dtype in FLOATS else dtype


def to_half(name: str, block: np.ndarray[Any, Any]) -> bytes:
    import numpy as np

    with np.errstate(over="ignore"):
        half = block.astype(np.float16)
    if not np.isfinite(half).all():
        raise QuantizationFailed(
            f"fp16 cannot hold {name}: it has a weight of {float(np.abs(block).max()):.4g}, float16 allows {LARGEST}",
            hint="the model was made for bfloat16 or float32; awq, gptq and int8 keep its 16-bit type",
        )
    return half.tobytes()
