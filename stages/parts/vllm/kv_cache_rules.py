"""The rules by which the installed vLLM divides its KV cache on this machine, for ``scoring.capacity``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from scoring.capacity.architecture import Architecture, LatentAttention
from scoring.capacity.kv_cache import CacheRules

CPUINFO: Final = Path("/proc/cpuinfo")
CPU_BLOCK_TOKENS: Final = 128
"""``CpuPlatform.check_and_update_config``."""
CPU_LATENT_BLOCK_TOKENS: Final = 16
"""The CPU kernel for MLA has no other; the one with AMX has ``CPU_BLOCK_TOKENS``."""
CPU_BATCHED_TOKENS: Final = 2048
"""``EngineArgs.get_batch_defaults`` for a server on a CPU, per process. It computes one batch at a time."""


def cpu_cache_rules(model: Architecture) -> CacheRules:
    """How vLLM's CPU build divides the KV cache of a model."""
    flags = _cpu_flags()
    latent = any(isinstance(layer.attention, LatentAttention) for layer in model.layers)
    block_tokens = CPU_LATENT_BLOCK_TOKENS if latent and "amx_tile" not in flags else CPU_BLOCK_TOKENS
    # Its fast kernels for linear attention keep the state in 32 bits, unless the model asks for 16.
    fast = "avx512_bf16" in flags and not (model.recurrent_bytes == 2 and _linear(model))
    return CacheRules(block_tokens, CPU_BATCHED_TOKENS, recurrent_bytes=4 if fast else None)


def _linear(model: Architecture) -> bool:
    return any(layer.state_space and layer.state_space.form == "gated delta net" for layer in model.layers)


def _cpu_flags() -> set[str]:
    try:
        found = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        return set()
    return set(found[1].split()) if found else set()
