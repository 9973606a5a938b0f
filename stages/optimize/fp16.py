"""fp16: the model as it was published, in the same shards. The reference of the comparison.

A model in a 16-bit type is taken as it is. A wider one is stored in bfloat16, which has the range of float32: its
weights would nearly always fit float16 as well, but what is computed from them need not, and awq, gptq and int8 keep
bfloat16 too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from scoring.capacity.storage import SIXTEEN_BIT as STORAGE
from stages.optimize.base_model import SIXTEEN_BIT, Base
from stages.optimize.shards import check_tensor, read_weights, write_config, write_index, write_tensors
from stages.parts.base.files import place_tree
from stages.parts.base.formats import Format, Peak
from stages.parts.base.optimize_settings import Optimize
from stages.parts.machine.process import peak_resident_bytes
from stages.parts.model.checkpoint import INDEX
from stages.parts.model.safetensors import FLOATS, read_header

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
                tensors = sorted(read_header(base.directory / name).values(), key=lambda tensor: tensor.start)
                dtypes = {tensor.name: _cast(tensor.dtype) for tensor in tensors}
                write_tensors(target / name, {tensor.name: tensor for tensor in tensors}, dtypes)
            if sharded:
                write_index(target, base)
        write_config(base, target, base.half_dtype)
        return Peak(peak_resident_bytes())

    def verify(self, base: Base, directory: Path, parameters: Mapping[str, Any]) -> int:  # noqa: ARG002
        """Check that all tensors of the base are there, unchanged, or in bfloat16 if they are floating-point and the
        base is wider."""
        tensors = read_weights(directory)
        for name, original in base.tensors.items():
            dtype = original.dtype if base.dtype in SIXTEEN_BIT else _cast(original.dtype)
            check_tensor(tensors, name, dtype, original.shape)
        return 16


FP16: Final = Format(STORAGE, Fp16())


def _cast(dtype: str) -> str:
    return "BF16" if dtype in FLOATS else dtype
