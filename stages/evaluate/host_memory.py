"""Whether the servers of several variants fit on this machine at the same time, without GPUs: what they take there is
the files' bytes and the cache that is asked for, with nothing to estimate. A GPU's whole share goes to each server."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from scoring.units import GIB, MIB
from stages.parts.base.serving_settings import Serving
from stages.parts.machine.hardware import hardware
from stages.parts.machine.processor import cpu_dtype, processor
from stages.parts.records.variant import Variant
from stages.parts.vllm.arguments import CPU_KV_CACHE_MIB
from stages.parts.vllm.host import SERVER_BYTES


def no_room(variants: Sequence[Variant], serving: Serving) -> str:
    """Why the servers cannot run side by side, in words; empty if they can."""
    dtype = cpu_dtype(processor()) if serving.dtype == "auto" else serving.dtype
    needed_bytes = len(variants) * ((serving.kv_cache_mib or CPU_KV_CACHE_MIB) * MIB + SERVER_BYTES)
    for variant in variants:
        # vLLM holds 16-bit weights in the served dtype.
        needed_bytes += variant.weights_bytes * (2 if dtype == "float32" and variant.bits == 16 else 1)
    free = min(psutil.virtual_memory().available, hardware().memory_bytes)
    if needed_bytes <= free:
        return ""
    return f"they need about {needed_bytes / GIB:.0f} GiB, and {free / GIB:.0f} GiB are free"
