"""An accelerator's figures, and what vLLM decides by them."""

from __future__ import annotations

from typing import Annotated, Final, Literal, NamedTuple

from pydantic import Field

from scoring.capacity.assumptions import ASSUMED
from scoring.closed import Closed
from scoring.units import GIB

Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
ECC_SHARE: Final = 1 / 16
"""Share of GDDR memory that holds the codes of error correction."""


class Tflops(Closed):
    """Dense operations per second, in 10¹²; None: the tensor cores do not have this type."""

    bf16: Above0
    fp8: Above0 | None = None
    int8: Above0 | None = None


class BatchLimits(NamedTuple):
    """vLLM's limits of one batch (``EngineArgs.get_batch_defaults``, for a server)."""

    tokens: int
    sequences: int


class Accelerator(Closed):
    """One type of GPU; see ``configs/accelerators.yaml`` for the meaning of each figure."""

    device: str
    memory_gib: Above0
    ecc_in_memory: bool = False
    bandwidth_gb_per_s: Above0
    tflops: Tflops
    link: Literal["nvlink", "pcie", "xgmi"]
    link_gb_per_s: Above0
    gpus_per_node: Annotated[int, Field(gt=0)] = 8
    compute_capability: Above0
    source: str
    price_per_hour: Above0 | None = None

    @property
    def usable_bytes(self) -> int:
        """The memory that CUDA reports, which vLLM multiplies by ``gpu_memory_utilization``."""
        ecc = ECC_SHARE if self.ecc_in_memory else 0
        return int(self.memory_gib * (1 - ecc) * (1 - ASSUMED.driver_memory.value) * GIB)

    def batch_limits(self) -> BatchLimits:
        if self.usable_bytes >= 160 * GIB:
            return BatchLimits(16384, 1024)
        if self.usable_bytes >= 70 * GIB and "a100" not in self.device.lower():
            return BatchLimits(8192, 1024)
        return BatchLimits(2048, 256)
