"""What a vLLM server needs, on GPUs and besides them: memory, shared memory, and time to start. With some settings that
can't be calculated."""

from __future__ import annotations

import math
import re
from typing import Final

from scoring.capacity.architecture import Architecture
from scoring.capacity.kv_cache import CacheRules
from scoring.capacity.memory import MemorySettings
from scoring.units import GIB, MIB
from stages.parts.base.serving_settings import AskedServing
from stages.parts.machine.hardware import processor
from stages.parts.records.evaluation import ColdStart

PLACING: Final = re.compile(r"--(cpu-offload|(pipeline|tensor)-parallel|quantization|load-format)[\w-]*|-[tp]p\b|-q\b")
"""Extra arguments that place weights in another way than is calculated."""
CACHING: Final = re.compile(r"--(data-parallel|max-model-len|hf-overrides|kv-cache|block-size|speculative)[\w-]*|-dp\b")
"""Extra arguments that use the rest of the memory in another way."""
CPU_BLOCK_TOKENS: Final = 128
"""``CpuPlatform.check_and_update_config``."""
CPU_LATENT_BLOCK_TOKENS: Final = 16
"""The CPU kernel for MLA has no other; the one with AMX has ``CPU_BLOCK_TOKENS``."""
CPU_BATCHED_TOKENS: Final = 2048
"""``EngineArgs.get_batch_defaults`` for a server on a CPU, per process. It computes one batch at a time."""
SERVER_BYTES: Final = 5 * GIB // 2
"""Memory of a vLLM server besides weights and KV cache: three Python processes with torch."""
GPU_SERVER_BYTES: Final = 4 * GIB
"""The same on GPUs, without the processes of the GPUs."""
GPU_WORKER_BYTES: Final = 4 * GIB
"""Memory of the process of each GPU: CUDA's libraries and context, NCCL, and buffers that GPUs read directly."""
QUANTIZER_BYTES: Final = 8 * GIB
"""Memory of a quantizer besides the model: libraries, and what passes through its layers of the calibration text."""
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
MEASURED_S: Final = 600
"""The least besides reading weights where it was measured: beside a loaded server on two cores, a start took 310 s."""
SLOWER: Final = 3
"""How many times longer than measured a later start may take."""


def memory_settings(serving: AskedServing, context: int = 0) -> MemorySettings:
    """Choose the settings that a server's memory on GPUs depends on."""
    return MemorySettings(
        context=context,
        utilization=serving.gpu_memory_utilization,
        enforce_eager=serving.enforce_eager,
        kv_cache_bytes=serving.kv_cache_mib * MIB if serving.kv_cache_mib else None,
    )


def kv_value_bytes(dtype: str | None) -> int | None:
    """Count the bytes of a key or value by ``kv_cache_dtype``; None: as of those that are computed."""
    return {None: None, "auto": None, "bfloat16": 2}.get(dtype, 1)


def cpu_cache_rules(model: Architecture) -> CacheRules:
    """Say how vLLM's CPU build divides the KV cache of a model on this machine."""
    here = processor()
    block_tokens = CPU_LATENT_BLOCK_TOKENS if model.latent and not (here and here.amx) else CPU_BLOCK_TOKENS
    # Its fast kernels for linear attention keep the state in 32 bits, unless the model asks for 16.
    linear = any(layer.state_space and layer.state_space.form == "gated delta net" for layer in model.layers)
    fast = here and here.bf16 and not (model.recurrent_bytes == 2 and linear)
    return CacheRules(block_tokens, CPU_BATCHED_TOKENS, recurrent_bytes=4 if fast else None)


def why_not_planned(serving: AskedServing, *, on_gpu: bool) -> str:
    """Say why nothing is calculated with these settings; empty if it is."""
    arguments = " ".join(serving.extra_arguments).replace("_", "-")
    if argument := PLACING.search(arguments) or CACHING.search(arguments):
        return f"serving.extra_arguments has {argument[0]}"
    return "serving.dtype is float32" if on_gpu and serving.dtype == "float32" else ""


def places_weights_otherwise(serving: AskedServing) -> bool:
    return bool(PLACING.search(" ".join(serving.extra_arguments).replace("_", "-")))


def gpu_memory_bytes(weights_bytes: int, gpus: int) -> int:
    """Estimate the memory for a server on that many GPUs, ``/dev/shm`` included.

    Each GPU's process reads the whole files; with room for them in the page cache the volume is read once.
    """
    return GPU_SERVER_BYTES + gpus * GPU_WORKER_BYTES + shared_bytes(gpus) + weights_bytes


def quantizer_bytes(weights_bytes: int) -> int:
    """Estimate the memory in which a model of that size in 16 bit is loaded as a whole and quantized: of it, what is
    quantized already, and the files in the page cache."""
    return QUANTIZER_BYTES + 2 * weights_bytes


def shared_bytes(gpus: int) -> int:
    return SHARED_BYTES * (1 + gpus)


def startup_s(weights_bytes: int, measured_s: float = 0.0, start: ColdStart | None = None) -> int:
    """Estimate the time in seconds that a server may take from its start to its first answer. *measured_s* is what it
    took elsewhere (0: not known), and *start* the parts of that: the volume may be slower than there."""
    read_s = weights_bytes / LOAD_BYTES_PER_S
    if start is None:
        return math.ceil(max(LEAST_S, START_S + read_s, SLOWER * measured_s))
    rest_s = SLOWER * (measured_s - start.weights_s)
    return math.ceil(max(MEASURED_S, rest_s) + max(read_s, SLOWER * start.weights_s))
