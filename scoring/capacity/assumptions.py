"""What a plan assumes where nothing was measured. Every plan prints these figures; measured ones replace the speeds."""

from __future__ import annotations

from typing import Final

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Assumption:
    """A figure that is assumed because it was not measured."""

    name: str
    value: float
    unit: str
    reason: str


DRIVER_MEMORY: Final = Assumption(
    "memory of the driver",
    0.01,
    "of the GPU's memory",
    "an H100 with 80 GiB reports 79.2 GiB (vllm-project/vllm#10511), an H200 with 141 reports 139.7",
)
RUNTIME_GIB: Final = Assumption(
    "memory of the runtime",
    0.5,
    "GiB per GPU",
    "workspaces of cuBLAS and of the attention kernels, and fragmentation; vLLM's profile counts them",
)
COMMUNICATION_GIB: Final = Assumption(
    "memory for communication",
    1.0,
    "GiB per GPU, with more than one",
    "buffers of NCCL and of the custom all-reduce",
)
GRAPHS_GIB: Final = Assumption(
    "memory of CUDA graphs",
    1.0,
    "GiB per GPU, unless enforce_eager",
    "vLLM reserves its own estimate since 0.21; its log shows it",
)
FORWARD_COPIES: Final = Assumption(
    "activations of the hidden size alive at once",
    4.0,
    "per token of a batch",
    "residual, normalized input, queries, and output of attention; with three of the MLP's width this explains "
    "1.2 of the 1.26 GiB in vllm-project/vllm#10511",
)
ESTIMATE_ERROR: Final = Assumption(
    "what an automatic context leaves free",
    0.25,
    "of activations, CUDA graphs and runtime",
    "they are estimated, and vLLM does not start with less KV cache than one sequence needs",
)
COMPUTE_EFFICIENCY: Final = Assumption(
    "share of the peak TFLOP/s in a prefill",
    0.65,
    "",
    "large matrix products reach 70 to 80 % on an H100; attention, norms and activations take the rest",
)
BANDWIDTH_EFFICIENCY: Final = Assumption(
    "share of the memory bandwidth in decoding",
    0.75,
    "",
    "matrix products of few rows reach 60 to 80 % on an H100, attention 70 %",
)
LINK_EFFICIENCY: Final = Assumption("share of the link's bandwidth in an all-reduce", 0.7, "", "as NCCL's tests show")
LINK_LATENCY_US: Final = Assumption(
    "time of an all-reduce of few bytes",
    10.0,
    "µs, twice per layer",
    "between vLLM's custom all-reduce over NVLink and NCCL over PCIe",
)
STEP_MS: Final = Assumption(
    "time between two steps", 0.5, "ms", "sampling, and the scheduler as far as it does not overlap with the GPU"
)
ASSUMPTIONS: Final = (
    *(DRIVER_MEMORY, RUNTIME_GIB, COMMUNICATION_GIB, GRAPHS_GIB, FORWARD_COPIES, ESTIMATE_ERROR),
    *(COMPUTE_EFFICIENCY, BANDWIDTH_EFFICIENCY, LINK_EFFICIENCY, LINK_LATENCY_US, STEP_MS),
)
