"""Every family that can be sized, against the model that Transformers builds from the same configuration."""

from __future__ import annotations

import json
from typing import Any

import pytest

from scoring.capacity.families import FAMILIES, read_architecture
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
