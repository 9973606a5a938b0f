"""Whether the servers of several variants fit on this machine at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import psutil

from stages.parts.base.settings import Serving
from stages.parts.engine.arguments import CPU_KV_CACHE_MIB, MIB, serves_on_gpu
from stages.parts.machine.hardware import hardware
from stages.parts.machine.processor import cpu_dtype, processor
from stages.parts.records.variant import Variant

GIB: Final = 1 << 30
SERVER_BYTES: Final = 5 * GIB // 2
"""Memory of a vLLM server besides weights and KV cache: three Python processes with torch."""


def no_room(variants: Sequence[Variant], serving: Serving) -> str:
    """Why the servers cannot run side by side, in words; empty if they can."""
    count = len(variants)
    if serves_on_gpu():
        # vLLM refuses to start if less than its share is free, however little it needs.
        if count * serving.gpu_memory_utilization <= 1:
            return ""
        share = f"{serving.gpu_memory_utilization:.0%}"
        return f"each takes {share} of the GPU's memory; serving.gpu_memory_utilization={1 / count:.2f} makes room"
    cache_bytes = (serving.kv_cache_mib or CPU_KV_CACHE_MIB) * MIB
    needed = sum(each.weights_bytes * _widening(each, serving) for each in variants) + count * (
        cache_bytes + SERVER_BYTES
    )
    free = min(psutil.virtual_memory().available, hardware().memory_bytes)
    return "" if needed <= free else f"they need about {needed / GIB:.0f} GiB, and {free / GIB:.0f} GiB are free"


def _widening(variant: Variant, serving: Serving) -> int:
    """How many times larger than its files the weights are in memory: vLLM holds 16-bit weights in the served dtype."""
    dtype = cpu_dtype(processor()) if serving.dtype == "auto" else serving.dtype
    return 2 if dtype == "float32" and variant.bits == 16 else 1
