"""How a format stores the weights of linear layers: in how many bytes, and among how many GPUs they can be divided."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from scoring.capacity.accelerator import Accelerator
from scoring.capacity.architecture import Kind, Matrix

HALF: Final = 2
"""Bytes of a weight in 16 bits. Everything that a format does not quantize stays in 16 bits."""
DEFAULT_GROUP_SIZE: Final = 128
MARLIN: Final = (7.5, math.inf)
"""The compute capabilities for which vLLM has Marlin, the kernels for weights of 8 and 4 bits."""
LINEAR: Final[frozenset[Kind]] = frozenset({"attention", "mlp", "experts"})
"""What every quantizer takes. State-space layers are left in 16 bits by most recipes."""


@dataclass(frozen=True)
class Scales:
    """Numbers that are stored beside the weights: scales, zero points or indices."""

    bits: int
    inputs: int | None
    """Inputs of a block that shares one number; None: all of them."""
    outputs: int | None = 1
    """Outputs of such a block; None: all of a tensor's."""
    adjustable: bool = False
    """Whether the setting ``optimize.group_size`` takes the place of ``inputs``."""
    loaded: bool = True
    """Whether vLLM keeps them after loading."""

    def count(self, matrix: Matrix) -> int:
        inputs = 1 if self.inputs is None else -(-matrix.inputs // self.inputs)
        outputs = matrix.tensors if self.outputs is None else -(-matrix.outputs // self.outputs)
        return matrix.count * inputs * outputs


@dataclass(frozen=True)
class Storage:
    """How linear layers lie in files and in memory, and which GPUs can compute them."""

    label: str
    """What a person calls the type of the weights, such as ``4-bit``."""
    weight_bits: int
    scales: tuple[Scales, ...] = ()
    kinds: frozenset[Kind] = LINEAR
    """The matrices that are stored in this way; the others stay in 16 bits."""
    multiple: int = 1
    """Values that the kernels read at a time: each GPU's inputs and outputs must be a multiple of it."""
    capabilities: tuple[float, float] = (0.0, math.inf)
    """Compute capabilities of GPUs for which vLLM has kernels: from the first to below the second."""
    arithmetic: Literal["bf16", "fp8", "int8"] = "bf16"
    """The type in which matrices are multiplied where the tensor cores have it; bf16 elsewhere."""
    unexplained_bytes: int = 0
    """Bytes of a published checkpoint that are not calculated, such as of layers that it keeps in 16 bits."""

    def holds(self, matrix: Matrix) -> bool:
        return matrix.quantizable and matrix.kind in self.kinds

    def stored_bytes(self, matrix: Matrix) -> int:
        return self._bytes(matrix, self.scales)

    def loaded_bytes(self, matrix: Matrix) -> int:
        return self._bytes(matrix, tuple(scale for scale in self.scales if scale.loaded))

    def _bytes(self, matrix: Matrix, scales: tuple[Scales, ...]) -> int:
        if not self.holds(matrix):
            return matrix.parameters * HALF
        bits = matrix.parameters * self.weight_bits + sum(scale.bits * scale.count(matrix) for scale in scales)
        return -(-bits // 8)

    def unsupported(self, accelerator: Accelerator) -> Iterator[str]:
        """Say why vLLM has no kernel on this type of GPU, whatever their number."""
        (low, high), capability = self.capabilities, accelerator.compute_capability
        if not low <= capability < high:
            span = f"{low}" if high == math.inf else f"{low} to below {high}"
            yield f"{self.label} kernels need compute capability {span}, {accelerator.device} has {capability}"

    def undivided(self, matrix: Matrix, inputs: int, outputs: int) -> Iterator[str]:
        """Say why a GPU can't have a part of *matrix* with that many *inputs* and *outputs*."""
        if not self.holds(matrix):
            return
        for scale in self.scales:
            if scale.inputs and inputs % scale.inputs:
                yield f"{matrix.kind}: {inputs} inputs per GPU are not divisible by groups of {scale.inputs}"
            if scale.outputs and outputs % scale.outputs:
                yield f"{matrix.kind}: {outputs} outputs per GPU are not divisible by blocks of {scale.outputs}"
        if inputs % self.multiple or outputs % self.multiple:
            yield f"{matrix.kind}: {inputs} × {outputs} per GPU is not divisible by {self.multiple} for {self.label}"


SIXTEEN_BIT: Final = Storage("16-bit", 16)
"""The reference's storage, which decides how many GPUs a server gets."""
