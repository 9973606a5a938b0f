"""What ``auto`` becomes, and which settings are refused, without any server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from scoring.units import GIB
from stages.parts.base.errors import ConfigError
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.serving_settings import AskedServing, ReferenceServing
from stages.parts.base.workload import Workload
from stages.parts.machine.accelerators import catalogue
from stages.parts.machine.hardware import Processor
from stages.parts.model.description import Description
from stages.parts.vllm.automatic import Decided, Place, Requirements, decide, place_here
from stages.parts.vllm.sizing import shared_bytes
from tests.serving import one_gpu

PUBLISHED: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[3] / "scoring" / "published_models.yaml").read_text()
)
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
TINY = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
} | SMALL
CPU = Place("a machine without GPUs", None, 0, 8 * GIB)
GPUS = catalogue()


def workload(**changes: Any) -> Workload:
    lengths = {"prompt_tokens": 300, "output_tokens": 100, "concurrency": 4}
    return Workload(name="test", quality_tasks=("arc_easy",), **(lengths | changes))


def asked(
    of: Workload | None = None, variants: tuple[str, ...] = ("fp16", "awq", "gptq", "int8"), **serving: Any
) -> Requirements:
    return Requirements(AskedServing(**serving), of or workload(), Optimize(variants=variants))


def kept(settings: Requirements) -> Requirements:
    """With answers of the reference that were kept before."""
    return replace(settings, answers_kept=True)


def described(config: dict[str, Any], parameters: int | None = None) -> Description:
    return Description("org/name", None, config, parameters)


def on(gpu: str, gpus: int = 8) -> Place:
    return Place(gpu, GPUS[gpu], gpus)


def published(name: str, place: Place, settings: Requirements | None = None) -> Decided:
    return decide(described(PUBLISHED[name]["config"]), settings or asked(), place)


def test_without_a_gpu_a_small_model_gets_its_own_length() -> None:
    decided = decide(described(TINY), asked(), CPU)
    assert (decided.serving.tensor_parallel_size, decided.serving.max_model_len, decided.gpus) == (1, 512, 0)
    assert (decided.notes, decided.left_out) == ((), {})


@pytest.mark.parametrize("place", [CPU, Place("h100", GPUS["h100"], 8)], ids=str)
@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj", True),
        ("model.layers.0.block_sparse_moe.input_linear.weight", True),
        ("model.layers.0.mlp.experts.0.gate_proj.weight", False),
        ("model.layers.0.mlp.shared_experts.gate_proj.weight", False),
        ("model.layers.0.shared_mlp.input_linear.weight", False),
    ],
)
def test_experts_in_one_tensor_leave_all_but_fp16_out_wherever_it_runs(name: str, fused: bool, place: Place) -> None:
    decided = decide(Description("org/name", None, TINY, None, frozenset({name, "lm_head.weight"})), asked(), place)
    assert decided.left_out.keys() == ({"awq", "gptq", "int8"} if fused else set())
    assert all(name in why for why in decided.left_out.values())


def test_without_a_gpu_the_cache_limits_the_length() -> None:
    place = replace(CPU, memory_bytes=16 * GIB)
    found = {mib: published("gemma-2b", place, asked(variants=("fp16",), kv_cache_mib=mib)) for mib in (64, None)}
    # 18 layers with a key and a value of 256 numbers each: 18,432 bytes per token; vLLM keeps one block of 128.
    assert found[64].serving.max_model_len == (64 * 2**20 // 18_432 - 128) // 256 * 256
    assert found[None].serving.max_model_len == 8192


def test_a_70b_on_80_gb_cards_needs_no_setting() -> None:
    for gpu, size in (("h100", 4), ("a100-80", 2)):
        decided = published("llama-3.1-70b", on(gpu))
        assert (decided.serving.tensor_parallel_size, decided.gpus) == (size, size)
        assert decided.serving.startup_timeout_s > 70e9 * 2 / 100e6  # seconds to read fp16 from a slow volume
        assert decided.memory_bytes > 131 * GIB
        assert shared_bytes(decided.gpus) == 2 * (1 + size) * GIB


def test_what_fits_on_fewer_gpus_is_tried_there_unless_their_number_is_given() -> None:
    def fewer(place: Place, **serving: Any) -> dict[str, tuple[int | None, tuple[str, ...] | None]]:
        recipes = published("llama-3.1-70b", place, asked(**serving)).serving.recipes
        return {name: (recipe.tensor_parallel_size, recipe.variants) for name, recipe in recipes.items()}

    assert fewer(on("h100")) == {"tp2": (2, ("awq", "gptq", "int8"))}  # with as long a context
    shorter = {"max_model_len": 8192}
    assert fewer(on("h100"), **shorter) == {"tp1": (1, ("awq", "gptq")), "tp2": (2, ("int8",))}
    assert fewer(on("h100"), tensor_parallel_size=4, **shorter) == {}
    own = {"tp2": {"tensor_parallel_size": 2, "variants": ["awq"]}}
    assert fewer(on("h100"), recipes=own)["tp2"] == (2, ("awq",))
    with_recipes = asked(recipes={"wide": {"tensor_parallel_size": 8}, "wider": {"tensor_parallel_size": 16}})
    assert published("llama-3.1-70b", on("h100"), with_recipes).gpus == 8
    assert published("llama-3.1-8b", on("h100")).serving.recipes == {}


def test_an_8b_on_an_l4_gets_as_long_a_context_as_fits_it() -> None:
    serving = published("llama-3.1-8b", on("l4")).serving
    assert (serving.tensor_parallel_size, serving.max_model_len) == (1, 21_248)
    assert published("llama-3.1-8b", on("h100")).serving.max_model_len == 131_072


def test_explicit_settings_stay() -> None:
    given: dict[str, Any] = {"tensor_parallel_size": 2, "max_model_len": 4096, "startup_timeout_s": 60}
    serving = published("llama-3.1-8b", on("h100"), asked(**given)).serving
    assert {name: getattr(serving, name) for name in given} == given
    assert published("llama-3.1-8b", on("h100"), asked(max_model_len=None)).serving.max_model_len is None


def test_every_contradiction_is_named_at_once() -> None:
    settings = asked(workload(prompt_tokens=9000), tensor_parallel_size=3, max_model_len=8192)
    with pytest.raises(ConfigError) as refused:
        published("llama-3.1-8b", on("l4", 2), settings)
    said = str(refused.value)
    assert said.startswith("7 mistakes in the settings for org/name on 2 × l4\n")
    assert "requests have up to 9,100 tokens, and max_model_len is 8,192" in said
    assert "tensor_parallel_size 3: 32 attention heads are not divisible by 3" in said
    assert "tensor_parallel_size 3: one server may have 2 GPUs" in said
    assert "slipway plan" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "place", "settings", "said"),
    [
        (
            "llama-3.1-8b",
            on("l4"),
            asked(tensor_parallel_size=1, max_model_len=131_072),
            "of 131,072 tokens of context",
        ),
        ("llama-3.1-8b", on("l4", 1), asked(max_model_len=None), "of 131,072 tokens of context"),
        ("llama-3.1-70b", on("h100", 1), asked(tensor_parallel_size=1), "leave no room for the KV cache"),
        ("llama-3.1-70b", on("l40s", 2), asked(), "fp16 on 2 × l40s: weights 65.7"),
        ("llama-3.1-70b", on("l4", 1), kept(asked()), "fp16 on 1 × l4: weights"),
        (
            "llama-3.1-8b",
            on("h100"),
            asked(kv_cache_mib=64, tensor_parallel_size=1, max_model_len=400),
            "holds 1 of the workload's 4 requests",
        ),
        ("gemma-2b", CPU, asked(kv_cache_mib=16, max_model_len=4096), "has room for 768 of 4,096 tokens of context"),
        (
            "llama-3.1-8b",
            CPU,
            asked(),
            "fp16 needs 22.5 GiB for weights, KV cache, vLLM itself and what asks it, and a machine without GPUs has 8",
        ),
    ],
)
def test_settings_that_cannot_fit_are_refused(name: str, place: Place, settings: Requirements, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        published(name, place, settings)
    assert said in str(refused.value)


def test_a_reference_is_asked_on_more_gpus_than_the_variants_get() -> None:
    decided = published("llama-3.1-70b", on("h100"), kept(asked(tensor_parallel_size=1, max_model_len=4096)))
    assert (decided.serving.tensor_parallel_size, decided.gpus) == (1, 4)
    assert decided.serving.reference == ReferenceServing(tensor_parallel_size=4)
    assert decided.left_out.keys() == {"fp16", "int8"}
    assert decided.notes == (
        "fp16 does not fit as the variants are served; it is served on 4 × h100 for the quality questions only. Speed, "
        "memory and cost are compared with those of awq",
    )
    served = decided.serving.of_reference()
    assert (served.tensor_parallel_size, served.max_model_len, served.reference) == (4, 4096, None)
    assert decided.memory_bytes > 131 * GIB  # of the weights in 16 bit, which it reads


def test_else_with_weights_in_the_memory_of_the_host() -> None:
    place = replace(on("h100", 1), memory_bytes=256 * GIB)
    decided = published("llama-3.1-70b", place, kept(asked(max_model_len=4096)))
    offloaded = decided.serving.reference.cpu_offload_gib if decided.serving.reference else 0
    # Of 131.4 GiB of weights, some 70 have room beside the rest.
    assert 60 < offloaded < 75
    assert decided.gpus == 1
    assert decided.serving.of_reference().extra_arguments == ("--cpu-offload-gb", str(offloaded))
    assert decided.serving.extra_arguments == ()
    assert "slowly" in decided.notes[-1]
    with pytest.raises(ConfigError, match=r"fp16 on 1 × h100: weights"):
        published("llama-3.1-70b", replace(place, memory_bytes=64 * GIB), asked(max_model_len=4096))


@pytest.mark.parametrize(
    ("place", "name"), [(on("h100", 1), "llama-3.1-70b"), (replace(CPU, memory_bytes=16 * GIB), "llama-3.1-8b")]
)
def test_else_its_answers_were_kept(place: Place, name: str) -> None:
    decided = published(name, place, kept(asked(max_model_len=4096)))
    assert decided.serving.reference == ReferenceServing(kept=True)
    assert "fp16" in decided.left_out
    assert "its answers to the quality questions were kept before" in decided.notes[-1]
    with pytest.raises(ConfigError) as refused:
        published(name, place, asked(max_model_len=4096))
    assert "slipway samples export" in refused.value.hint
    assert "profile.reference=int8" in refused.value.hint


def test_else_another_reference_has_to_be_named() -> None:
    named = replace(asked(max_model_len=4096, variants=("int8", "awq")), reference="awq")
    decided = published("llama-3.1-70b", on("h100", 1), named)
    assert decided.serving.reference is None
    assert decided.left_out.keys() == {"int8"}
    fixed = replace(asked(max_model_len=4096), reference="")
    assert published("llama-3.1-70b", on("h100", 1), fixed).left_out.keys() == {"fp16", "int8"}
    with pytest.raises(ConfigError, match="int8 on 1 × h100"):
        published("llama-3.1-70b", on("h100", 1), replace(named, reference="int8"))


def test_more_requests_in_flight_than_fit_are_only_noted_because_a_smaller_variant_may_hold_them() -> None:
    decided = published("llama-3.1-8b", on("l4", 1), asked(workload(concurrency=64)))
    assert decided.notes == (
        "the KV cache of fp16 holds 53 of the workload's 64 requests in flight (400 tokens each); the others wait",
    )


def test_a_variant_that_so_many_gpus_cannot_divide_is_left_out() -> None:
    decided = published("llama-2-7b", on("h100"), asked(tensor_parallel_size=4))
    assert decided.left_out == dict.fromkeys(
        ("awq", "gptq"), "mlp: 2752 inputs per GPU are not divisible by groups of 128"
    )


def test_a_model_that_cannot_be_sized_gets_gpus_for_its_weights_and_its_own_context() -> None:
    decided = decide(described({"model_type": "rwkv7"}, 70 * 10**9), asked(), on("h100"))
    assert (decided.serving.tensor_parallel_size, decided.serving.max_model_len) == (4, None)
    assert "model type 'rwkv7': its layers are not known" in decided.notes[0]
    on_cpu = decide(described({"model_type": "rwkv7"}, 70 * 10**9), asked(), CPU)
    assert (on_cpu.serving.tensor_parallel_size, on_cpu.gpus) == (1, 0)


def test_arguments_that_use_memory_otherwise_are_not_planned_around() -> None:
    decided = published("llama-3.1-70b", on("l4", 1), asked(extra_arguments=("--pipeline_parallel_size", "8")))
    assert decided.serving.max_model_len is None
    assert decided.notes == ("nothing is planned: serving.extra_arguments has --pipeline-parallel-size",)


def test_a_gpu_that_the_catalogue_lacks_is_taken_as_it_says_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = one_gpu(tmp_path, 2)
    monkeypatch.syspath_prepend(variables["PYTHONPATH"].split(":")[0])
    for name in ("PATH", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, variables[name])
    here = place_here()
    assert (here.name, here.gpus) == ("Stand-in", 2)
    assert here.accelerator is not None
    assert here.accelerator.memory_gib == 1
    assert place_here(most_gpus=1).gpus == 1
    assert place_here(most_gpus=0).accelerator is None


def test_without_a_gpu_float32_takes_twice_the_room() -> None:
    old = Processor(avx2=True, avx512=True, bf16=False, amx=False)
    settings = asked(workload(concurrency=1), kv_cache_mib=64)
    lengths = [
        published("gemma-2b", Place("a machine", None, 0, 64 * GIB, each), settings).serving.max_model_len
        for each in (old.model_copy(update={"bf16": True}), old)
    ]
    assert lengths == [3328, 1536]
