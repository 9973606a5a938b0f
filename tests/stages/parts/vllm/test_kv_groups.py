"""The groups and blocks that are calculated for published models on a GPU, against vLLM's own functions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import yaml

from scoring.capacity.architecture import Architecture, LatentAttention, Layer
from scoring.capacity.families import read_architecture
from scoring.capacity.kv_cache import CacheLayout, CacheRules, cache_layout

PUBLISHED: Final[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[3] / "scoring" / "published_models.yaml").read_text()
)
MEMORY: Final = 20 << 30
IN_FLIGHT: Final = 16384
FALCON: Final = {
    "model_type": "falcon_h1",
    "hidden_size": 3072,
    "intermediate_size": 1,  # the MLP and the vocabulary do not matter to the cache
    "num_hidden_layers": 44,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 1,
    "max_position_embeddings": 262_144,
    "mamba_d_ssm": 3072,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_d_head": 128,
    "mamba_n_heads": 24,
    "mamba_n_groups": 1,
}
"""The cache of tiiuae/Falcon-H1-7B-Base, with attention and Mamba-2 side by side in each layer."""


MORE: Final[dict[str, dict[str, Any]]] = {
    "falcon-h1-7b": FALCON,
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    "llama-4-scout": {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}},
    "gemma-3n": {"model_type": "gemma3n_text"},
    "gemma-4": {"model_type": "gemma4_text", "num_kv_shared_layers": 12},
    "gemma-4-fewer-global-heads": {
        "model_type": "gemma4_text",
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "nemotron-h-8b": {
        "model_type": "nemotron_h",
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    },
}
"""Models whose layers keep what no other published one here does: short windows, windows that do not slide, layers that
read an earlier one's keys and values or have heads of another size, convolutions, and layers that keep nothing."""


def specs(model: Architecture, layout: CacheLayout, size: int) -> dict[str, Any]:
    """What the layers of the model tell vLLM about their cache."""
    found = {}
    for number, layer in enumerate(model.layers):
        if layer.attention and layer.attention.values_per_token(size):
            found[f"{number}.attention"] = attention(layer, layout, size)
        if layer.state_space:
            found[f"{number}.state"] = state(model, layer, layout, size)
    return found


def attention(layer: Layer, layout: CacheLayout, size: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    common: dict[str, Any] = {"block_size": layout.block_tokens, "dtype": torch.bfloat16}
    if isinstance(layer.attention, LatentAttention):
        return MLAAttentionSpec(num_kv_heads=1, head_size=layer.attention.values_per_token(size), **common)
    common |= {"num_kv_heads": max(1, layer.attention.kv_heads // size), "head_size": layer.attention.head_size}
    if layer.attention.chunked:
        return ChunkedLocalAttentionSpec(attention_chunk_size=layer.attention.window, **common)
    if layer.attention.window:
        return SlidingWindowSpec(sliding_window=layer.attention.window, **common)
    return FullAttentionSpec(**common)


def state(model: Architecture, layer: Layer, layout: CacheLayout, size: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    values = next(each.attention for each in model.layers if each.attention).values_per_token(size)
    return MambaSpec(
        block_size=layout.block_tokens,
        shapes=((layer.state_space.state_bytes(size, 2, 2) // 2,),),
        dtypes=(torch.bfloat16,),
        page_size_padded=layout.block_tokens * values * 2,
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=1 if layer.state_space.form == "mamba2" else 0,
    )


def configuration(max_model_len: int) -> Any:
    """The parts of vLLM's configuration that its functions read."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
            mamba_cache_mode="align",
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        max_in_flight_tokens=IN_FLIGHT,
    )


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", [*PUBLISHED, *MORE])
def test_vllm_makes_the_same_groups_and_needs_the_same_blocks(name: str, size: int) -> None:
    from vllm.v1.core import kv_cache_utils as vllm

    model = read_architecture(MORE.get(name) or PUBLISHED[name]["config"])
    layout = cache_layout(model, CacheRules(16, IN_FLIGHT, tensor_parallel_size=size))
    for length in (1000, 4096, model.longest_context):
        config = configuration(length)
        groups = vllm.get_kv_cache_groups(config, specs(model, layout, size))
        assert len(groups) == len(layout.groups)
        assert vllm._max_memory_usage_bytes_from_groups(config, groups) == layout.blocks(length) * layout.block_bytes
        cache = vllm.get_kv_cache_config_from_groups(config, groups, MEMORY)
        assert cache.num_blocks == layout.capacity_blocks(MEMORY)
        tokens, _ = vllm.get_kv_cache_capacity(config, cache)
        assert tokens == layout.tokens(MEMORY, length)
        longest = vllm._estimate_max_model_len_from_groups(config, groups, MEMORY - layout.block_bytes)
        assert min(longest, length) == min(layout.longest(MEMORY), length)
