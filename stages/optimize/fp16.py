"""fp16: the model as it was published, in the same shards. The reference of the comparison.

A model in a 16-bit type is taken as it is. A wider one is stored in bfloat16, which has the range of float32: its
weights would nearly always fit float16 as well, but what is computed from them need not, and awq, gptq and int8 keep
bfloat16 too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from scoring.capacity.storage import SIXTEEN_BIT as STORAGE
from stages.optimize.base_model import FLOATS, SIXTEEN_BIT, Base
from stages.optimize.shards import blocks, layout, read_headers, write_config, write_index
from stages.optimize.verification import check_tensor
from stages.parts.base.errors import QuantizationFailed
from stages.parts.base.formats import Format, Peak
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.store import place_tree
from stages.parts.machine.process import peak_resident_bytes
from stages.parts.model.checkpoint import INDEX
from stages.parts.model.safetensors import BITS, read_header

if TYPE_CHECKING:
    import numpy as np

LOWER_BITS: Final = 16
"""A bfloat16 is a float32 without them."""
RECIPE: Final = 2
"""Increased when the same base is written in another way, so that older variants are made again."""


class Fp16:
    tools: ClassVar[tuple[str, ...]] = ("numpy",)
    calibrated: ClassVar[bool] = False

    def parameters(self, settings: Optimize, base: Base) -> dict[str, Any]:  # noqa: ARG002
        return {"dtype": base.half_dtype, "recipe": RECIPE}

    def check(self, settings: Optimize, base: Base) -> None:
        """There is nothing to check before the weights are read."""

    def quantize(self, settings: Optimize, base: Base, target: Path) -> Peak:  # noqa: ARG002
        sharded = len(base.weights) > 1
        if base.dtype in SIXTEEN_BIT:
            place_tree(base.directory, target, [*base.weights, *([INDEX] if sharded else [])])
        else:
            for name in base.weights:
                cast_file(base.directory / name, target / name)
            if sharded:
                write_index(base, target)
        write_config(base, target, base.half_dtype)
        return Peak(peak_resident_bytes())

    def verify(self, base: Base, directory: Path, parameters: Mapping[str, Any]) -> int:  # noqa: ARG002
        """Check that all tensors of the base are there, unchanged, or in bfloat16 if they are floating-point and the
        base is wider."""
        tensors = read_headers(directory)
        for name, original in base.tensors.items():
            cast = base.dtype not in SIXTEEN_BIT and original.dtype in FLOATS
            check_tensor(tensors, name, "BF16" if cast else original.dtype, original.shape)
        return 16


FP16: Final = Format(STORAGE, Fp16())


def cast_file(source: Path, target: Path) -> None:
    """Write the shard *source* to *target* in bfloat16. Tensors that are not floating-point stay unchanged."""
    # Wider types come first, as in the library, so that each tensor begins at a multiple of its type's size.
    tensors = sorted(read_header(source).values(), key=lambda tensor: (-BITS[_cast(tensor.dtype)], tensor.start))
    header, _ = layout((tensor.name, _cast(tensor.dtype), tensor.shape) for tensor in tensors)
    with source.open("rb") as reader, target.open("wb") as writer:
        writer.write(header)
        for tensor in tensors:
            for block in blocks(tensor, reader):
                writer.write(to_bfloat16(tensor.name, block) if tensor.dtype in FLOATS else block.tobytes())


def _cast(dtype: str) -> str:
    return "BF16" if dtype in FLOATS else dtype


def to_bfloat16(name: str, block: np.ndarray[Any, Any]) -> bytes:
    """Round each value to the nearest bfloat16, of two equally near ones the even one, as IEEE 754 rounds."""
    import numpy as np

    with np.errstate(over="ignore"):
        bits = block.astype(np.float32).view(np.uint32)
    even = (bits >> LOWER_BITS) & 1
    rounded = (bits + (0x7FFF + even)) >> LOWER_BITS
    if not np.isfinite((rounded << LOWER_BITS).view(np.float32)).all():
        raise QuantizationFailed(
            f"fp16 cannot hold {name}: it has a weight of {float(np.abs(block).max()):.4g}, which bfloat16 has not",
            hint="the publisher's file is damaged: try another --revision, or tell the publisher",
        )
    return rounded.astype("<u2").tobytes()
