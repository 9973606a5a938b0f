"""Every family that can be sized, against the model that Transformers builds from the same configuration."""

from __future__ import annotations

import dataclasses
import json
import random
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from scoring.capacity.architecture import FeedForward, Layer
from scoring.capacity.families import FAMILIES, read_architecture
from scoring.capacity.reader import Family, Reader
from scoring.capacity.storage import SIXTEEN_BIT
from scoring.capacity.weights import count_parameters, stored_bytes, with_stored
from tests.scoring import transformers_defaults

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
WINDOWS_UNLISTED: Final = {"mistral", "ministral3", "starcoder2", "phi3", "phimoe", "mixtral"}
"""Families whose windows are in all layers, and not listed."""
UNTIED: Final = {"mistral", "llama4_text"}
"""Families that are tried with an output head of their own in a model that sees."""
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


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ALONE)
def test_parameters_and_windows_are_those_of_the_model(family: str, seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = small(family, seed)
    config = AutoConfig.for_model(family, **given)
    with torch.device("meta"):  # shapes without memory
        built = AutoModelForCausalLM.from_config(config)
    model = read_architecture(json.loads(config.to_json_string(use_diff=False)))
    assert count_parameters(model).total == stored(built)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(model.layers)
    for kind, layer in zip(kinds, model.layers, strict=True):
        if kind == "sliding_attention":
            assert layer.attention.window == config.sliding_window
        elif kind == "chunked_attention":
            assert (layer.attention.window, layer.attention.chunked) == (config.attention_chunk_size, True)
        elif kind == "full_attention" and family not in WINDOWS_UNLISTED:
            assert layer.attention.window is None
        elif kind in ("linear_attention", "mamba", "conv"):
            assert layer.state_space is not None
    # A publisher's config.json leaves out what is as Transformers has it.
    assert read_architecture({"model_type": family} | given) == model


@pytest.mark.parametrize("family", [name for name in SEEN_WITH if name != "gemma3n_text"])  # its images need timm
def test_a_model_that_sees_has_the_parameters_of_its_parts(family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {"model_type": family} | small(family, 1) | {"tie_word_embeddings": False}
    parts = {"vision_config": {"model_type": "gemma4_vision"}} if family == "gemma4_text" else {}
    config = AutoConfig.for_model(
        SEEN_WITH[family], text_config=text, tie_word_embeddings=family not in UNTIED, **parts
    )
    with torch.device("meta"):
        built = AutoModelForImageTextToText.from_config(config)
    model = read_architecture(json.loads(config.to_json_string(use_diff=False)))
    part = next(module for name, module in built.named_modules() if name.endswith("language_model"))
    language = stored(part) + (0 if model.tied or hasattr(part, "lm_head") else stored(built.lm_head))
    assert count_parameters(model).total == language
    whole = with_stored(model, stored(built))
    assert count_parameters(whole).total == stored(built)
    assert stored_bytes(whole, SIXTEEN_BIT) == 2 * stored(built)
    assert whole.other == stored(built) - language > 0


def test_a_config_of_before_images_had_their_own_is_read() -> None:
    sizes = small("qwen2_vl_text", 1) | {"vision_config": {"depth": 2}, "tie_word_embeddings": True}
    model = read_architecture({"model_type": "qwen2_vl"} | sizes)
    assert model == read_architecture(
        {"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2_vl_text"} | sizes}
    )
    assert model.tied


@pytest.mark.parametrize(
    ("published", "billions"),
    [
        ({"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}, 20.91),  # arXiv:2508.10925
        ({"model_type": "gpt_oss", "num_hidden_layers": 36, "num_local_experts": 128}, 116.83),
        (
            {
                "model_type": "lfm2",
                "hidden_size": 2048,
                "block_ff_dim": 12288,
                "num_hidden_layers": 16,
                "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            },
            1.17,  # its model card
        ),
        (
            {
                "model_type": "gemma3",
                "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
            },
            3.88,  # arXiv:2503.19786, table 1: 675 million of embeddings and 3,209 million others
        ),
    ],
)
def test_a_publishers_short_config_gives_the_published_parameters(published: dict[str, Any], billions: float) -> None:
    assert round(count_parameters(read_architecture(published)).total / 1e9, 2) == billions


def test_vllm_serves_every_family() -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    from vllm import ModelRegistry

    served = {name.lower() for name in ModelRegistry.get_supported_archs()}  # PhiMoE is Phimoe in Transformers
    for family in FAMILIES:
        seen = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(SEEN_WITH.get(family, ""), "")
        assert served & {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family, "").lower(), seen.lower()}, family


def test_defaults_are_those_of_transformers() -> None:
    assert transformers_defaults.FILE.read_text(encoding="utf-8") == transformers_defaults.text()


def test_a_family_is_added_from_outside_by_a_function_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def parallel(read: Reader, index: int) -> Layer:
        """A layer whose odd ones have a window, and whose MLP has a width of its own."""
        return read.layer(read.attention(index), FeedForward(read.count("ffn_dim")))

    monkeypatch.setitem(FAMILIES, "made_up", Family(parallel, norms=1, full_every=2))
    sizes = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    others = {
        "model_type": "made_up",
        "max_position_embeddings": 512,
        "sliding_window": 256,
        "tie_word_embeddings": True,
    }
    model = read_architecture(others | sizes)
    assert [layer.attention.window for layer in model.layers] == [256, None]
    assert count_parameters(model).total == 100 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 64) + 64


def test_the_documentation_lists_every_family() -> None:
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    assert ", ".join(f"`{name}`" for name in FAMILIES) + "." in " ".join(text.split())
