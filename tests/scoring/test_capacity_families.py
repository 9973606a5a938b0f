"""Every family that can be sized, against the model that Transformers builds from the same configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from scoring.capacity.architecture import FeedForward, Layer
from scoring.capacity.families import FAMILIES, read_architecture
from scoring.capacity.reader import Family, Reader
from scoring.capacity.storage import SIXTEEN_BIT
from scoring.capacity.weights import count_parameters, stored_bytes, with_stored
from tests.scoring import transformers_defaults
from tests.scoring.small_models import ALONE, SEEN_WITH, small, stored

WINDOWS_UNLISTED: Final = {"mistral", "ministral3", "starcoder2", "phi3", "phimoe", "mixtral"}
"""Families whose windows are in all layers, and not listed."""
UNTIED: Final = {"mistral", "llama4_text"}
"""Families that are tried with an output head of their own in a model that sees."""


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
