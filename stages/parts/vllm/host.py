"""What a vLLM server needs besides its GPUs' memory: the host's memory, shared memory, and time to start."""

from __future__ import annotations

import math
from typing import Final

from scoring.units import GIB, MIB

SERVER_BYTES: Final = 5 * GIB // 2
"""Memory of a vLLM server besides weights and KV cache: three Python processes with torch."""
GPU_SERVER_BYTES: Final = 4 * GIB
"""The same on GPUs, without the processes of the GPUs."""
GPU_WORKER_BYTES: Final = 4 * GIB
"""Memory of the process of each GPU: CUDA's libraries and context, NCCL, and buffers that GPUs read directly."""
CLIENT_BYTES: Final = 4 * GIB
"""Memory of the load generator and the quality tasks."""
SHARED_BYTES: Final = 2 * GIB
"""``/dev/shm`` per GPU, and once more: rings of messages between vLLM's processes (240 MiB each), and NCCL's buffers
where GPUs can't read each other."""
LOAD_BYTES_PER_S: Final = 100 * MIB
"""The speed of a slow network volume."""
START_S: Final = 300
"""What a start takes besides reading weights: imports, compilation, CUDA graphs."""
LEAST_S: Final = 900
SLOWER: Final = 3
"""How many times longer than measured a later start may take."""


def gpu_memory_bytes(weights_bytes: int, gpus: int) -> int:
    """Estimate the memory for a server on that many GPUs, ``/dev/shm`` included.

    Each GPU's process reads the whole files; with room for them in the page cache the volume is read once.
    """
    return GPU_SERVER_BYTES + gpus * GPU_WORKER_BYTES + shared_bytes(gpus) + weights_bytes


def shared_bytes(gpus: int) -> int:
    return SHARED_BYTES * (1 + gpus)


def startup_s(weights_bytes: int, measured_s: float = 0.0) -> int:
    """Estimate the time in seconds that a server may take from its start to its first answer; *measured_s* is what it
    took elsewhere, 0 if that is not known."""
    return math.ceil(max(LEAST_S, START_S + weights_bytes / LOAD_BYTES_PER_S, SLOWER * measured_s))
