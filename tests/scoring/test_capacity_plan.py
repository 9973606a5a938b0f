"""What fits, how fast it would be, and what is the cheapest, for published models on the GPUs of the catalogue."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from scoring.capacity.accelerator import Accelerator
from scoring.capacity.families import read_architecture
from scoring.capacity.memory import Fit, MemorySettings, fit
from scoring.capacity.plan import Option, PlanRequest, Targets, options, shortlist
from scoring.capacity.speed import Requests, Roofline, SpeedCalibration
from scoring.units import GIB
from stages.parts.base.formats import FORMATS, storage_of
from stages.parts.machine.accelerators import catalogue

PUBLISHED: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "published_models.yaml").read_text())
KNOWN = catalogue()
CHAT = Requests(512, 128)
SLO = Targets(ttft_ms=1000, tpot_ms=50)


def question(name: str, *gpus: str, context: int = 8192, variants: tuple[str, ...] = tuple(FORMATS)) -> PlanRequest:
    model = read_architecture(PUBLISHED[name]["config"])
    return PlanRequest(
        model=model,
        formats={name: storage_of(name, 128) for name in variants},
        accelerators={gpu: KNOWN[gpu] for gpu in gpus or KNOWN},
        settings=MemorySettings(context),
        requests=CHAT,
        longest_request=960,
        peak=50,
        targets=SLO,
    )


def fitted(name: str, variant: str, gpu: str, gpus: int = 1, group_size: int = 128, **settings: Any) -> Fit:
    asked = question(name)
    return fit(
        asked.model,
        storage_of(variant, group_size),
        KNOWN[gpu],
        gpus,
        MemorySettings(**{"context": 8192} | settings),
    )


def server(name: str, variant: str = "fp16", gpu: str = "h100", tensor: int = 1) -> Roofline:
    asked = question(name)
    return Roofline(asked.model, storage_of(variant, 128), KNOWN[gpu], tensor)


def test_usable_memory_is_what_cuda_reports() -> None:
    # vllm-project/vllm#10511: an H100 has 79.22 GiB; nvidia-smi: an H200 has 143771 MiB, of which 139.7 GiB are usable.
    assert KNOWN["h100"].usable_bytes / GIB == pytest.approx(79.2, abs=0.1)
    assert KNOWN["h200"].usable_bytes / GIB == pytest.approx(139.7, abs=0.3)
    assert KNOWN["l4"].usable_bytes / GIB == pytest.approx(22.2, abs=0.2)


def test_the_weights_of_llama_8b_take_what_vllm_logs() -> None:
    # vllm-project/vllm#10511: "model weights take 14.96GiB", and 7.48 on each of two GPUs.
    assert fitted("llama-3.1-8b", "fp16", "h100").memory.weights / GIB == pytest.approx(14.96, abs=0.01)
    assert fitted("llama-3.1-8b", "fp16", "h100", 2).memory.weights / GIB == pytest.approx(7.48, abs=0.01)


def test_an_l4_has_no_room_for_the_own_context_of_llama_8b() -> None:
    found = fitted("llama-3.1-8b", "fp16", "l4", context=131_072)
    assert found.reasons == (f"room for {found.longest_context:,} of 131,072 tokens of context",)
    assert 8192 < found.longest_context < 131_072
    assert not fitted("llama-3.1-8b", "fp16", "l4", context=found.longest_context).reasons
    assert fitted("llama-3.1-8b", "fp16", "l4", context=found.longest_context + 16).reasons


def test_a_70b_fits_on_four_h100_in_16_bits_and_on_one_in_4_bits() -> None:
    (reason,) = fitted("llama-3.1-70b", "fp16", "h100").reasons
    assert reason.startswith("weights 131.4, activations 2.")
    assert reason.endswith(", CUDA graphs 1.0, runtime 0.5 GiB of 71.3 leave no room for the KV cache")
    assert not fitted("llama-3.1-70b", "fp16", "h100", 4).reasons
    assert not fitted("llama-3.1-70b", "awq", "h100").reasons


@pytest.mark.parametrize(
    ("name", "variant", "gpu", "tensor", "reason"),
    [
        ("qwen2.5-7b", "fp16", "h100", 8, "28 attention heads are not divisible by 8"),
        ("qwen2.5-7b", "gptq", "h100", 8, "mlp: 2368 inputs per GPU are not divisible by groups of 128"),
        ("qwen3-30b-a3b", "awq", "h100", 4, "experts: 192 inputs per GPU are not divisible by groups of 128"),
        ("jamba-v0.1", "fp16", "h100", 3, "32 attention heads are not divisible by 3"),
        ("qwen3-next-80b-a3b", "fp16", "h100", 32, "a state of 32 heads in 16 groups is not divisible by 32"),
        ("llama-3.1-8b", "int8", "b200", 1, "int8 kernels need compute capability 7.5 to below 10.0"),
    ],
)
def test_what_kernels_or_gpus_cannot_divide_does_not_fit(
    name: str, variant: str, gpu: str, tensor: int, reason: str
) -> None:
    reasons = fitted(name, variant, gpu, tensor).reasons
    assert any(each.startswith(reason) for each in reasons), reasons


def test_smaller_groups_can_be_divided_among_more_gpus() -> None:
    assert not fitted("qwen3-30b-a3b", "awq", "h100", 2, group_size=128).reasons
    assert not fitted("qwen3-30b-a3b", "awq", "h100", 4, group_size=64).reasons


def test_a_given_size_of_the_kv_cache_replaces_what_is_left() -> None:
    assert fitted("llama-3.1-8b", "fp16", "h100", kv_cache_bytes=8 * GIB).cache_bytes == 8 * GIB
    (reason,) = fitted("llama-3.1-8b", "fp16", "l4", kv_cache_bytes=8 * GIB).reasons
    assert reason.endswith("leave no room for a KV cache of 8.0")
    eager = fitted("llama-3.1-8b", "fp16", "h100", enforce_eager=True)
    assert eager.cache_bytes - fitted("llama-3.1-8b", "fp16", "h100").cache_bytes == GIB


def test_one_token_takes_as_long_as_reading_the_weights() -> None:
    # 8.03 − 0.53 billion weights of two bytes (the embedding is looked up) at 0.75 · 3.35 TB/s, and 0.5 ms.
    step = server("llama-3.1-8b").step_s(1, 1)
    assert step * 1e3 == pytest.approx(2 * (8.030 - 0.525) / (0.75 * 3.35) + 0.5, rel=0.01)
    # Mixtral reads two of eight experts for one token and all of them for many.
    mixtral = server("mixtral-8x7b", gpu="h200")
    assert mixtral.step_s(1, 1) < 0.35 * mixtral.step_s(64, 1)


def test_a_prompt_takes_as_long_as_its_operations() -> None:
    # Two operations per weight and token at 0.65 · 989 TFLOP/s; attention and the output head add less than 5 %.
    prefill = server("llama-3.1-8b").prefill_s(2048)
    expected = 2 * (8.030e9 - 2 * 0.525e9) * 2048 / (0.65 * 989e12) + 0.0005
    assert expected < prefill < 1.05 * expected
    assert server("llama-3.1-8b", "int8").prefill_s(2048) < 0.6 * prefill
    assert server("llama-3.1-8b", "awq").prefill_s(2048) == prefill


def test_a_prompt_of_a_mixture_of_experts_reads_all_experts() -> None:
    # 30.5 − 0.3 billion weights of two bytes take longer than the operations of 3 billion on 1024 tokens.
    prefill = server("qwen3-30b-a3b").prefill_s(1024)
    assert prefill * 1e3 == pytest.approx(2 * (30.53 - 0.31) / (0.75 * 3.35) + 0.5, rel=0.01)


def test_windows_and_latent_vectors_shorten_a_step_with_long_contexts() -> None:
    gemma = server("gemma-2-9b")
    growth = gemma.step_s(16, 8192) - gemma.step_s(16, 4096)
    assert growth == pytest.approx(16 * 21 * 4096 * 2 * 8 * 256 * 2 / (0.75 * 3.35e12), rel=0.01)


def test_more_sequences_are_slower_for_each_and_faster_together() -> None:
    one, many = (server("llama-3.1-8b").speed(count, CHAT) for count in (1, 64))
    assert one.tpot_ms < many.tpot_ms
    assert one.ttft_ms < many.ttft_ms
    assert many.output_tokens_per_s > 10 * one.output_tokens_per_s
    # Little's law: sequences = rate · time in the system.
    seconds = (many.ttft_ms + 127 * many.tpot_ms) / 1e3
    assert many.requests_per_s * seconds == pytest.approx(64)


def test_tensor_parallelism_divides_the_work_but_adds_communication() -> None:
    one, two = (server("llama-3.1-70b", gpu="h200", tensor=size).step_s(16, 640) for size in (1, 2))
    assert one / 2 < two < one
    slow, fast = (server("llama-3.1-70b", gpu=gpu, tensor=4).prefill_s(4096) for gpu in ("l40s", "a100-80"))
    assert slow > fast, "PCIe takes longer than the faster tensor cores gain"


def test_measured_times_replace_predicted_ones() -> None:
    measured = replace(server("llama-3.1-8b"), calibration=SpeedCalibration(ttft=2, tpot=1.5, evaluations=3))
    plain, scaled = server("llama-3.1-8b").speed(8, CHAT), measured.speed(8, CHAT)
    assert scaled.ttft_ms == pytest.approx(2 * plain.ttft_ms)
    assert scaled.tpot_ms == pytest.approx(1.5 * plain.tpot_ms)


def test_the_cheapest_choice_that_meets_the_targets_is_first() -> None:
    prices = {"l4": 0.8, "l40s": 2.0, "h100": 4.0}
    asked = question("llama-3.1-8b", *prices)
    priced = {
        name: each.model_copy(update={"price_per_hour": prices[name]}) for name, each in asked.accelerators.items()
    }
    found = options(replace(asked, accelerators=priced))
    meeting = [option for option in found if option.meets_targets]
    costs = [option.cost_per_hour or math.nan for option in meeting]
    assert found[: len(meeting)] == meeting
    assert costs == sorted(costs)
    for option in meeting:
        assert option.predicted.tpot_ms <= 50
        assert option.replicas == math.ceil(50 / option.predicted.sequences)
        assert option.cost_per_hour == pytest.approx(
            prices[option.accelerator] * option.tensor_parallel_size * (option.replicas or math.nan)
        )
    assert [option.fits for option in found] == sorted((option.fits for option in found), reverse=True)


def test_targets_that_no_gpu_meets_are_not_met_with_one_sequence_either() -> None:
    found = options(replace(question("llama-3.1-70b", "l4"), targets=Targets(tpot_ms=1)))
    assert not any(option.meets_targets for option in found)
    assert {option.predicted.sequences for option in found if option.fits} == {1}


def test_a_model_that_no_node_holds_does_not_fit() -> None:
    found = options(question("deepseek-v3", "h100", variants=("fp16",)))
    assert [each.tensor_parallel_size for each in found if not each.fits] == [1, 2, 4, 8]


def test_the_shortlist_has_the_best_of_each_variant_on_each_gpu() -> None:
    found = options(question("llama-3.1-70b"))
    short = shortlist(found)
    assert len(short) == len(FORMATS) * len(KNOWN)
    first: dict[tuple[str, str], Option] = {}
    for option in found:
        first.setdefault((option.variant, option.accelerator), option)
    assert all(first[each.variant, each.accelerator] is each for each in short if each.fits)
    unfit = {(each.variant, each.accelerator) for each in short if not each.fits}
    assert unfit == {("int8", "b200"), ("w8a8", "b200"), ("mxfp4", "t4"), ("fp16", "t4")}


def test_a_gpu_without_a_type_of_tensor_cores_computes_in_16_bits() -> None:
    own = Accelerator.model_validate(KNOWN["h100"].model_dump() | {"tflops": {"bf16": 100}})
    assert replace(server("llama-3.1-8b", "int8"), accelerator=own).prefill_s(512) == pytest.approx(
        replace(server("llama-3.1-8b", "fp16"), accelerator=own).prefill_s(512)
    )
