"""Small configurations of every family that can be sized, as Transformers' classes take them."""

from __future__ import annotations

import dataclasses
import random
from functools import cache
from typing import Any, Final

from scoring.capacity.families import FAMILIES

SEEN_WITH: Final = {
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "llama4_text": "llama4",
    "qwen2_vl_text": "qwen2_vl",
    "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "mistral": "mistral3",
    "ministral3": "mistral3",
}
"""Types of models that see, by the family of their text model."""
ALONE: Final = [name for name in FAMILIES if not name.endswith("_text") or "vl" not in name]
"""Families whose text model is published alone, or could be."""
GIVEN: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "gemma3n_text": {"num_hidden_layers": 12, "num_kv_shared_layers": 2},
    "gemma4_text": {"num_hidden_layers": 12},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "nemotron": {"num_key_value_heads": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "mlp"]
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, "moe_topk": [1, 2, 2, 2, 2, 2]},
    "lfm2": {"full_attn_idxs": [2, 5]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv", "full_attention", "conv"]},
}
"""Fields that the defaults lack, or that fewer layers need."""
FIXED: Final[dict[str, dict[str, Any]]] = {
    "smollm3": {"use_sliding_window": False},
    "qwen2_moe": {"use_sliding_window": False},
    "qwen3_moe": {"use_sliding_window": False},
    "nemotron_h": {"tie_word_embeddings": False},
}
"""What vLLM and Transformers do differently, and no published model has."""
FLAGS: Final = (
    "attention_bias",
    "attention_k_eq_v",
    "attention_out_bias",
    "block_auto_adjust_ff_dim",
    "conv_bias",
    "enable_moe_block",
    "lm_head_bias",
    "mamba_conv_bias",
    "mamba_rms_norm",
    "mlp_bias",
    "qkv_bias",
    "tie_word_embeddings",
    "use_bias",
    "use_conv_bias",
    "use_double_wide_mlp",
    "use_qk_norm",
    "use_sliding_window",
)


@cache
def fields(family: str) -> set[str]:
    from transformers import CONFIG_MAPPING

    return {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])}


def small(family: str, seed: int) -> dict[str, Any]:
    """A small configuration, drawn from what the family has. Seed 0 has the defaults, but few layers."""
    given = ({"num_hidden_layers": 6} if family != "nemotron_h" else {}) | GIVEN.get(family, {})
    if seed == 0:
        return given
    draw = random.Random(f"{family} {seed}")
    heads, experts = draw.choice((4, 8)), draw.choice((4, 6))
    sizes = {
        "hidden_size": 32 * draw.randint(2, 6),
        "intermediate_size": 16 * draw.randint(3, 9),
        "intermediate_size_mlp": 16 * draw.randint(3, 9),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice((1, 2, heads)),
        "head_dim": 8 * draw.randint(2, 5),
        "vocab_size": draw.randint(200, 300),
        "vocab_size_per_layer_input": draw.randint(200, 300),
        "hidden_size_per_layer_input": 8 * draw.randint(1, 3),
        "num_kv_shared_layers": draw.choice((0, 2)),
        "laurel_rank": draw.choice((4, 8)),
        "sliding_window": draw.choice((16, 32)),
        "max_window_layers": draw.randint(0, 4),
        "attention_chunk_size": draw.choice((16, 32)),
        "interleave_moe_layer_step": draw.choice((1, 2)),
        "moe_intermediate_size": 16 * draw.randint(1, 4),
        "moe_shared_expert_intermediate_size": 16 * draw.randint(1, 4),
        "moe_latent_size": draw.choice((None, 16)),
        "shared_expert_intermediate_size": 16 * draw.randint(1, 4),
        "shared_intermediate_size": 16 * draw.randint(1, 4),
        "num_experts": experts,
        "num_local_experts": experts,
        "n_routed_experts": experts,
        "moe_num_experts": experts,
        "num_experts_per_tok": 2,
        "top_k_experts": 2,
        "moe_topk": 2,
        "moe_k": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": draw.choice((1, 2)),
        "moe_num_shared_experts": draw.choice((0, 2)),
        "moe_layer_start_index": draw.choice((0, 2)),
        "moe_layer_end_index": draw.choice((-1, 4)),
        "moe_layer_interval": draw.choice((1, 2)),
        "first_k_dense_replace": draw.choice((1, 3)),
        "decoder_sparse_step": draw.choice((1, 2)),
        "num_dense_layers": draw.choice((1, 2)),
        "q_lora_rank": draw.choice((24, None)),
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": draw.choice((2, 4)),
        "mamba_d_ssm": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": "auto" if family != "falcon_h1" else 8,
        "mamba_n_groups": draw.choice((1, 2)),
        "mamba_d_state": draw.choice((8, 16)),
        "mamba_num_heads": 4,
        "mamba_head_dim": draw.choice((8, 16)),
        "n_groups": draw.choice((1, 2)),
        "ssm_state_size": 16,
        "conv_L_cache": draw.choice((3, 4)),
        "block_multiple_of": 16,
        "pad_token_id": 0,
    } | {flag: draw.random() < 0.5 for flag in FLAGS}
    sizes |= FIXED.get(family, {})
    return given | {name: value for name, value in sizes.items() if name in fields(family)}


def stored(model: Any) -> int:
    """Parameters in a checkpoint of the model: what is tied counts once."""
    return sum(each.numel() for each in {id(each): each for each in model.state_dict(keep_vars=True).values()}.values())
