"""How many GPUs a model gets and how long its context is, for published models on GPUs of the catalogue."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from scoring.capacity.architecture import Architecture
from scoring.capacity.families import read_architecture
from scoring.capacity.memory import (
    LEAST_CONTEXT,
    Demand,
    Layout,
    MemorySettings,
    choose_layout,
    contradictions,
    fit,
    left_out,
)
from scoring.capacity.storage import SIXTEEN_BIT
from stages.parts.base.formats import storage_of
from stages.parts.machine.accelerators import catalogue

PUBLISHED: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "published_models.yaml").read_text())
GPUS = catalogue()
CHAT = Demand(longest_request=960, concurrency=8)


def sized(name: str) -> Architecture:
    return read_architecture(PUBLISHED[name]["config"])


def layout(name: str, gpu: str, demand: Demand = CHAT, gpus: int = 8, **serving: Any) -> Layout:
    return choose_layout(sized(name), SIXTEEN_BIT, GPUS[gpu], gpus, MemorySettings(context=0, **serving), demand)


@pytest.mark.parametrize(
    ("name", "gpu", "size"),
    [
        ("llama-3.1-8b", "l4", 1),
        ("llama-3.1-8b", "h100", 1),
        ("llama-3.1-70b", "h100", 4),  # 65.7 GiB of weights on each of 2, and 71.3 to use: no room for the rest
        ("llama-3.1-70b", "h200", 2),
        ("llama-3.1-70b", "l40s", 4),
        ("mixtral-8x7b", "a100-80", 2),
        ("gemma-2-9b", "l4", 2),
        ("qwen3-30b-a3b", "h100", 1),
    ],
)
def test_a_model_gets_the_fewest_gpus_on_which_fp16_fits_with_room(name: str, gpu: str, size: int) -> None:
    found = layout(name, gpu)
    assert (found.tensor_parallel_size, found.reasons, found.with_room) == (size, (), True)
    assert found.requests >= CHAT.concurrency
    if size > 1:
        assert layout(name, gpu, replace(CHAT, tensor_parallel_size=size // 2)).requests < CHAT.concurrency


def test_the_context_is_the_longest_that_fits_and_at_most_the_models_own() -> None:
    assert layout("llama-3.1-8b", "h100").context == 131_072
    on_l4 = layout("llama-3.1-8b", "l4").context
    assert LEAST_CONTEXT < on_l4 < 131_072
    assert on_l4 % 256 == 0
    found = fit(sized("llama-3.1-8b"), SIXTEEN_BIT, GPUS["l4"], 1, MemorySettings(context=on_l4))
    # What is kept free are a quarter of the estimates: 1.8 GiB of activations, CUDA graphs and runtime.
    assert 0.8 * found.longest_context < on_l4 < found.longest_context


def test_more_users_get_more_gpus_and_beyond_all_of_them_they_wait() -> None:
    assert layout("llama-3.1-8b", "l4", replace(CHAT, concurrency=64)).tensor_parallel_size == 2
    waiting = layout("llama-3.1-8b", "l4", replace(CHAT, concurrency=64), gpus=1)
    assert (waiting.tensor_parallel_size, waiting.reasons) == (1, ())
    assert 0 < waiting.requests < 64


def test_what_fits_nowhere_says_why_on_the_most_gpus() -> None:
    found = layout("deepseek-v3", "h100")
    assert found.tensor_parallel_size == 8
    assert found.reasons[0].startswith("weights 157.9, ")
    asked = layout("llama-3.1-8b", "l4", Demand(context=131_072), gpus=1)
    assert asked.reasons[0].endswith("of 131,072 tokens of context")


def test_an_explicit_size_and_context_stay() -> None:
    found = layout("llama-3.1-8b", "h100", Demand(tensor_parallel_size=2, context=8192))
    assert (found.tensor_parallel_size, found.context, found.reasons) == (2, 8192, ())


def test_an_explicit_cache_is_not_reduced_by_what_is_kept_free() -> None:
    found = layout("llama-3.1-8b", "l4", kv_cache_bytes=1 << 30)
    assert found.context == (1 << 30) // 131_072 // 256 * 256 - 256  # vLLM keeps one block


def test_every_contradiction_is_named() -> None:
    model = sized("llama-3.1-8b")
    demand = Demand(tensor_parallel_size=3, context=200_000, longest_request=300_000)
    assert list(contradictions(model, demand)) == [
        "max_model_len 200,000: the model was made for 131,072 tokens",
        "the workload's requests have up to 300,000 tokens, and the model was made for 131,072",
        "tensor_parallel_size 3: 32 attention heads are not divisible by 3",
        "tensor_parallel_size 3: 8 KV heads can neither be divided among 3 GPUs nor copied evenly",
        *(
            f"tensor_parallel_size 3: {kind}: a width of {width} is not divisible by 3"
            for kind, width in (("attention", "4096 × 4096"), ("mlp", "4096 × 28672"), ("mlp", "14336 × 4096"))
        ),
    ]
    assert list(contradictions(model, Demand(tensor_parallel_size=4, context=8192, longest_request=8192))) == []
    assert list(contradictions(model, Demand(context=1024, longest_request=1025))) == [
        "the workload's requests have up to 1,025 tokens, and max_model_len is 1,024"
    ]


def test_a_variant_that_cannot_be_divided_is_left_out_with_the_reason() -> None:
    model = sized("llama-2-7b")
    assert left_out(model, storage_of("int8", 128), 4) == ()
    assert left_out(model, storage_of("awq", 128), 4) == (
        "mlp: 2752 inputs per GPU are not divisible by groups of 128",
    )
    assert left_out(model, storage_of("awq", 64), 4) == left_out(model, storage_of("awq", 128), 1) == ()
