"""Every family that can be sized, against the model that Transformers builds from the same configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scoring.capacity.architecture import FeedForward, Layer
from scoring.capacity.families import FAMILIES, Family, Reader, read_architecture
from scoring.capacity.weights import count_parameters

GIVEN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "qwen2": {"use_sliding_window": True},
    "olmo3": {"tie_word_embeddings": True},
}
"""Fields that the defaults lack, and variations."""


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_and_windows_are_those_of_the_model(family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **GIVEN.get(family, {}))
    with torch.device("meta"):  # shapes without memory
        built = AutoModelForCausalLM.from_config(config)
    model = read_architecture(json.loads(config.to_json_string(use_diff=False)))
    assert count_parameters(model).total == sum(each.numel() for each in built.parameters())
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(model.layers)
    for kind, layer in zip(kinds, model.layers, strict=True):
        if kind == "sliding_attention":
            assert layer.attention.window == config.sliding_window
        elif kind == "full_attention" and family != "mistral":
            assert layer.attention.window is None
        elif kind in ("linear_attention", "mamba"):
            assert layer.state_space is not None


def test_a_family_is_added_from_outside_by_a_function_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def parallel(read: Reader, index: int) -> Layer:
        """A layer whose odd ones have a window, and whose MLP has a width of its own."""
        return read.layer(read.attention(index), FeedForward(read.count("ffn_dim")))

    monkeypatch.setitem(FAMILIES, "made_up", Family(parallel, norms=1, window=256, full_every=2, tied=True))
    sizes = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    model = read_architecture({"model_type": "made_up", "max_position_embeddings": 512} | sizes)
    assert [layer.attention.window for layer in model.layers] == [256, None]
    assert count_parameters(model).total == 100 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 64) + 64
