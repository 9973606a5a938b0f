"""The rules by which the installed vLLM divides its KV cache on this machine, for ``scoring.capacity``."""

from __future__ import annotations

from typing import Final

from scoring.capacity.architecture import Architecture, LatentAttention
from scoring.capacity.kv_cache import CacheRules
from stages.parts.machine.processor import processor

CPU_BLOCK_TOKENS: Final = 128
"""``CpuPlatform.check_and_update_config``."""
CPU_LATENT_BLOCK_TOKENS: Final = 16
"""The CPU kernel for MLA has no other; the one with AMX has ``CPU_BLOCK_TOKENS``."""
CPU_BATCHED_TOKENS: Final = 2048
"""``EngineArgs.get_batch_defaults`` for a server on a CPU, per process. It computes one batch at a time."""


def cpu_cache_rules(model: Architecture) -> CacheRules:
    """Say how vLLM's CPU build divides the KV cache of a model."""
    here = processor()
    latent = any(isinstance(layer.attention, LatentAttention) for layer in model.layers)
    linear = any(layer.state_space and layer.state_space.form == "gated delta net" for layer in model.layers)
    block_tokens = CPU_LATENT_BLOCK_TOKENS if latent and not (here and here.amx) else CPU_BLOCK_TOKENS
    # Its fast kernels for linear attention keep the state in 32 bits, unless the model asks for 16.
    fast = here and here.bf16 and not (model.recurrent_bytes == 2 and linear)
    return CacheRules(block_tokens, CPU_BATCHED_TOKENS, recurrent_bytes=4 if fast else None)
