"""The sizes of published models, against published figures or the arithmetic shown here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from scoring.capacity.architecture import Architecture, NotSizeable
from scoring.capacity.families import read_architecture
from scoring.capacity.kv_cache import CacheRules, cache_layout
from scoring.capacity.storage import SIXTEEN_BIT
from scoring.capacity.weights import count_parameters, loaded_bytes, stored_bytes, with_stored
from stages.parts.base.formats import storage_of

PUBLISHED: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "published_models.yaml").read_text())
GPU = CacheRules(block_tokens=16, tokens_in_flight=2 * 8192)
GIB = 1 << 30


def model(name: str, **changed: Any) -> Architecture:
    return read_architecture(PUBLISHED[name]["config"] | changed)


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("qwen2.5-7b", 7_615_616_512),
        ("gemma-2b", 2_506_172_416),
        ("gemma-2-9b", 9_241_705_984),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("deepseek-v3", 671_026_419_200),
        ("qwen3-next-80b-a3b", 79_674_391_296),
        ("jamba-v0.1", 51_570_323_328),
    ],
)
def test_parameters_are_those_of_the_published_checkpoint(name: str, total: int) -> None:
    assert count_parameters(model(name)).total == total


def test_gemma_3_has_the_parameters_of_its_text_model() -> None:
    # 62 layers of attention (32 + 2 · 16 + 32 heads of 128), MLP (3 · 5376 · 21504), four norms and two of the heads.
    layer = 5376 * 128 * (32 + 2 * 16 + 32) + 3 * 5376 * 21504 + 4 * 5376 + 2 * 128
    assert count_parameters(model("gemma-3-27b")).total == 62 * layer + 262208 * 5376 + 5376


@pytest.mark.parametrize(
    ("name", "active_billions"),
    [
        ("mixtral-8x7b", 12.9),  # https://mistral.ai/news/mixtral-of-experts
        ("qwen3-30b-a3b", 3.3),  # its model card
        ("deepseek-v3", 37),  # arXiv:2412.19437
        ("qwen3-next-80b-a3b", 3.9),  # its model card: 3B without embedding and head, which have 0.6B
        ("jamba-v0.1", 12),  # arXiv:2403.19887
    ],
)
def test_active_parameters_of_mixtures_of_experts_are_those_published(name: str, active_billions: float) -> None:
    assert count_parameters(model(name)).active / 1e9 == pytest.approx(active_billions, rel=0.02)


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-2-7b", 32 * 2 * 32 * 128 * 2),  # every head has its own keys and values: 524,288
        ("llama-3.1-8b", 131_072),  # 32 · 2 · 8 · 128 · 2
        ("llama-3.1-70b", 327_680),  # 80 · 2 · 8 · 128 · 2
        ("qwen2.5-7b", 28 * 2 * 4 * 128 * 2),
        ("gemma-2b", 18 * 2 * 1 * 256 * 2),  # one head for all queries
        ("gemma-2-9b", 42 * 2 * 8 * 256 * 2),
        ("gemma-3-27b", 62 * 2 * 16 * 128 * 2),
        ("mixtral-8x7b", 32 * 2 * 8 * 128 * 2),
        ("qwen3-30b-a3b", 48 * 2 * 4 * 128 * 2),
        ("deepseek-v3", 61 * 576 * 2),  # 512 of the latent vector and 64 of the rotary key, per layer
        ("qwen3-next-80b-a3b", 12 * 2 * 2 * 256 * 2),  # every fourth of 48 layers has attention
        ("jamba-v0.1", 4 * 2 * 8 * 128 * 2),  # every eighth of 32 layers has attention
    ],
)
def test_a_token_takes_the_published_bytes_of_kv_cache(name: str, bytes_per_token: int) -> None:
    assert model(name).kv_bytes(1) == bytes_per_token


def test_a_sliding_window_keeps_no_more_than_its_length() -> None:
    gemma_2 = model("gemma-2-9b")
    assert [layer.attention.window for layer in gemma_2.layers[:3]] == [4096, None, 4096]
    assert gemma_2.kv_bytes(8192) == 2 * 8 * 256 * 2 * 21 * (4096 + 8192)
    gemma_3 = model("gemma-3-27b")
    assert sum(layer.attention.window is None for layer in gemma_3.layers) == 10
    assert gemma_3.kv_bytes(131_072) == 2 * 16 * 128 * 2 * (52 * 1024 + 10 * 131_072)


def test_layers_with_a_state_keep_the_same_bytes_for_any_length() -> None:
    # arXiv:2403.19887, table 1: the cache of 256K tokens of Jamba has 4 GB. A state is 8192 channels · (3 + 16) values.
    jamba = model("jamba-v0.1")
    assert jamba.kv_bytes(262_144) + jamba.state_bytes() == 4 * GIB + 28 * 8192 * (3 + 16) * 2
    # 32 heads of 128 · 128, and three inputs of a convolution over 2 · 16 · 128 + 32 · 128 channels, in 36 layers.
    qwen = model("qwen3-next-80b-a3b")
    assert qwen.state_bytes() == 36 * (32 * 128 * 128 + 3 * 8192) * 2
    assert qwen.state_bytes(recurrent_bytes=4) - qwen.state_bytes() == 36 * 32 * 128 * 128 * 2


def test_windows_that_a_config_only_mentions_are_not_used() -> None:
    assert all(layer.attention.window is None for layer in model("qwen2.5-7b").layers)
    used = model("qwen2.5-7b", use_sliding_window=True, max_window_layers=20)
    assert [layer.attention.window for layer in used.layers] == [None] * 20 + [131_072] * 8
    assert all(layer.attention.window is None for layer in model("mixtral-8x7b").layers)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model_type": "rwkv7"}, "model type 'rwkv7': its layers are not known"),
        ({"num_hidden_layers": None}, "no usable num_hidden_layers"),
        ({"num_attention_heads": 0}, "unusable value"),
        ({"hidden_size": "4096"}, "no usable hidden_size"),
        ({"layer_types": ["full_attention"], "sliding_window": 4096}, "unusable value"),
        ({"sliding_window": 4096, "sliding_window_pattern": "LLLG"}, "sliding_window_pattern is not a number"),
    ],
)
def test_what_cannot_be_sized_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(NotSizeable, match=named):
        model("llama-3.1-8b", **changed)


def test_a_config_that_transformers_wrote_again_has_the_same_experts() -> None:
    renamed = model("qwen3-30b-a3b", num_experts=None, num_local_experts=128)
    assert count_parameters(renamed).total == 30_532_122_624


def test_a_checkpoint_with_other_counts_than_its_config_is_refused_or_has_other_parts() -> None:
    llama = model("llama-3.1-8b")
    described = count_parameters(llama)
    assert with_stored(llama, described.total + 400_000_000).other == 400_000_000
    with pytest.raises(NotSizeable, match="the checkpoint has 7,000,000,000"):
        with_stored(llama, 7_000_000_000)


def test_variants_store_what_their_formats_say() -> None:
    llama = model("llama-3.1-8b")
    parameters = count_parameters(llama)
    # Quantized are the layers' matrices; embedding, head and norms stay in 16 bit.
    matrices = 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    rest = 2 * (parameters.total - matrices)
    awq = matrices // 2 + matrices // 128 * 5 // 2
    # The index of the group of each input, for each of seven tensors a layer.
    index = 32 * 4 * (6 * 4096 + 14336)
    # A scale in float32 for each output.
    scales = 32 * 4 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert stored_bytes(llama, SIXTEEN_BIT) == 2 * 8_030_261_248
    assert stored_bytes(llama, storage_of("awq", 128)) == rest + awq
    assert stored_bytes(llama, storage_of("gptq", 128)) == rest + awq + index
    assert stored_bytes(llama, storage_of("int8", 128)) == rest + matrices + scales


def test_tensor_parallelism_divides_matrices_and_copies_norms() -> None:
    llama = model("llama-3.1-70b")
    *layers, embedding, head, rest = loaded_bytes(llama, SIXTEEN_BIT, 4)
    matrices = 8192 * (8192 + 2 * 1024 + 8192) + 3 * 8192 * 28672
    assert layers == [2 * matrices // 4 + 2 * 2 * 8192] * 80
    assert (embedding, head, rest) == (2 * 128256 * 8192 // 4, 2 * 128256 * 8192 // 4, 2 * 8192)


def test_a_model_with_full_attention_fills_all_blocks() -> None:
    layout = cache_layout(model("llama-3.1-8b"), GPU)
    assert layout.block_bytes == 16 * 131_072
    assert layout.tokens(20 * GIB, 8192) == 20 * GIB // 131_072
    # vLLM keeps one block for itself.
    assert layout.longest(131_072 * 8192) == 8192 - 16
    assert layout.longest(1000 * GIB) == 131_072
    assert layout.longest(0) == 0


def test_layers_with_windows_share_blocks_with_groups_of_equal_size() -> None:
    # 10 layers of full attention make one group, and 52 with windows six groups of at most 9.
    layout = cache_layout(model("gemma-3-27b"), GPU)
    assert len(layout.groups) == 7
    assert layout.block_bytes == 10 * 16 * (2 * 16 * 128 * 2)
    window = (1024 - 1 + 2 * 8192) // 16 + 1 + 1
    assert layout.blocks(131_072) == 131_072 // 16 + 6 * window
    # 21 of each kind: two groups.
    assert len(cache_layout(model("gemma-2-9b"), GPU).groups) == 2


def test_a_state_enlarges_the_blocks_of_attention() -> None:
    # A state of 36 · … is one block; a token of attention takes 2 · 2 · 256 · 2 = 2048 bytes in a layer.
    state = (32 * 128 * 128 + 3 * 8192) * 2
    layout = cache_layout(model("qwen3-next-80b-a3b"), GPU)
    assert layout.block_tokens == 16 * -(-state // (16 * 2048)) == 544
    assert len(layout.groups) == 4  # 12 layers of attention, 3 · 12 of linear attention
    assert layout.blocks(5440) == 10 + 3 * 2
    wider = cache_layout(model("qwen3-next-80b-a3b", mamba_ssm_dtype="float32"), GPU)
    assert wider.block_tokens == 16 * -(-(32 * 128 * 128 * 4 + 3 * 8192 * 2) // (16 * 2048))


def test_a_kv_head_is_on_each_gpu_and_a_latent_vector_is_not_divided() -> None:
    def block(name: str, size: int) -> int:
        return cache_layout(model(name), CacheRules(16, 0, tensor_parallel_size=size)).block_bytes

    assert block("llama-3.1-8b", 8) == 16 * 131_072 // 8
    assert block("llama-3.1-8b", 16) == block("llama-3.1-8b", 8)
    assert block("deepseek-v3", 8) == 16 * 61 * 576 * 2
