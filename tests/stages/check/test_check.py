"""What the installed vLLM says about this machine, asked by the program as a run asks it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.settings.config import load
from stages.parts.base.errors import NotInstalled, UnusableModel
from stages.parts.base.formats import FORMATS, quantized_formats
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.serving_settings import AskedServing, Serving
from stages.parts.machine.hardware import processor
from stages.parts.machine.hardware_table import hardware_table, kind_of
from stages.parts.model.description import Description
from stages.parts.vllm.support import refuse_unserved_family
from tests.extras import need
from tests.hub import HubServer
from tests.hub.models import Stages, tiny_model

FOUR_BIT = "vLLM's CPU build has no {} kernel for processors without AVX-512"
WITHOUT_FOUR_BIT = "\n".join(f"{name}: {FOUR_BIT.format(name)}" for name in ("awq", "gptq"))
ROOT = Path(__file__).parents[3]
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": f"{ROOT / 'tests' / 'processor'}:{ROOT}"}
FLOATS = ("fp8", "fp8-block", "mxfp4", "nvfp4a16")
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
INDEX = {"metadata": {"total_size": 311_936}, "weight_map": {"weight": "model-00001-of-00001.safetensors"}}


EXPERTS = CONFIG | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
WIDE = CONFIG | {"hidden_size": 256, "intermediate_size": 512}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
PUBLISHED = {
    "fp8": WIDE | {"quantization_config": FP8},
    "gptq": WIDE | {"quantization_config": GPTQ},
    "blocks": WIDE | {"quantization_config": FP8 | {"weight_block_size": [128, 128]}},
    "odd-groups": WIDE | {"quantization_config": GPTQ | {"group_size": 96}},
    "nvfp4": WIDE | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}},
    "wide": WIDE,
}
CONFIGS = PUBLISHED | {
    "tiny": CONFIG,
    "predicting": CONFIG | {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1},
    "experts": EXPERTS,
    "narrow-experts": EXPERTS | {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1},
    "fused": EXPERTS,
    "seeing": {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": CONFIG | {"model_type": "qwen2_5_vl_text"},
        "vision_config": {"depth": 1},
        "dtype": "bfloat16",
    },
    "unknown": CONFIG | {"architectures": ["ANewLlamaForCausalLM"]},
    "jamba": CONFIG | {"architectures": ["JambaForCausalLM"], "model_type": "jamba"},
    "known-to-transformers": CONFIG | {"architectures": ["DiffLlamaForCausalLM"], "model_type": "diffllama"},
}
FUSED = "model.layers.0.mlp.experts.gate_up_proj"
WIDE_INDEX = INDEX | {"metadata": {"total_size": 2_886_144}}
INDEXES = {"wide": WIDE_INDEX, "fused": INDEX | {"weight_map": {FUSED: "model-00001-of-00001.safetensors"}}}


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        for name, config in CONFIGS.items():
            files = {
                "config.json": json.dumps(config).encode(),
                "model.safetensors": None,
                "model.safetensors.index.json": json.dumps(INDEXES.get(name, INDEX)).encode(),
                "model-00001-of-00001.safetensors": b"weights",
            }
            server.add_repo(f"org/{name}", tiny_model(**files))
        yield server


@pytest.fixture
def stages(tmp_path: Path, hub: HubServer) -> Stages:
    return Stages(hub.url, tmp_path)


def checked(
    stages: Stages, environment: dict[str, str], *arguments: str, make_unservable: bool = False, model: str = "wide"
) -> dict[str, str]:
    """The outputs of the program, by name."""
    settings = Optimize(variants=("fp16", "awq", "gptq", "int8"), make_unservable=make_unservable).model_dump_json()
    environment = {"SLIPWAY_RUN": "r1", "XDG_CACHE_HOME": str(stages.folder), **environment}
    ended = stages.run("check", "--model", f"org/{model}", "--settings", settings, *arguments, **environment)
    assert ended.returncode == 0, ended.stderr
    return {path.name: path.read_text() for path in (stages.folder / "outputs").iterdir()}


def test_four_bit_needs_avx512_and_int8_does_not(stages: Stages) -> None:
    here = processor()
    assert here is not None
    outputs = checked(stages, {})
    four_bit = str(here.avx512).lower()
    about = {name: outputs.pop(name) for name in ("serving", "gpus", "memory", "shm")}
    assert Serving.model_validate_json(about["serving"]) == Serving(max_model_len=2048)
    assert (about["gpus"], about["shm"]) == ("0", "2Gi")
    assert outputs.pop("optimize-memory") == "9Gi"
    assert outputs == {
        "awq": four_bit,
        "gptq": four_bit,
        "int8": "true",
        **dict.fromkeys((*FLOATS, "w4a16", "w8a8", "nvfp4"), "false"),  # not among the variants
        "candidates": "[]",
        "fetch": "false",
        "variants": "fp16,awq,gptq,int8" if here.avx512 else "fp16,int8",
        "left-out": "" if here.avx512 else WITHOUT_FOUR_BIT,
    }


def test_a_variant_that_cannot_be_served_is_left_out_with_the_cause(stages: Stages) -> None:
    outputs = checked(stages, AVX2)
    assert outputs["variants"] == "fp16,int8"
    assert (outputs["awq"], outputs["gptq"], outputs["int8"]) == ("false", "false", "true")
    assert outputs["left-out"] == WITHOUT_FOUR_BIT
    recorded = json.loads((stages.store / "org--wide/runs/r1/outcomes/check-awq.json").read_text())
    assert (recorded["result"], recorded["reason"]) == ("left out", FOUR_BIT.format("awq"))
    assert "optimize.make_unservable=true" in recorded["hint"]
    # vLLM is not asked again: without the simulation it would say something else.
    limited = {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    for_another_machine = checked(stages, limited, make_unservable=True)
    assert (for_another_machine["awq"], for_another_machine["variants"]) == ("true", "fp16,int8")


def test_settings_that_contradict_each_other_end_the_stage_before_anything_is_made(stages: Stages) -> None:
    serving = AskedServing(max_model_len=4096).model_dump_json()
    ended = stages.run("check", "--model", "org/tiny", "--serving", serving, SLIPWAY_RUN="r1")
    assert ended.returncode == 2
    assert "max_model_len 4,096: the model was made for 2,048 tokens" in ended.stderr
    assert not (stages.folder / "outputs" / "variants").exists()


def test_a_parser_that_vllm_lacks_ends_the_stage_and_one_that_is_not_known_is_said(
    stages: Stages, hub: HubServer
) -> None:
    need("vllm")
    template = {"chat_template": "<|tool|>{{ tools }}"}
    tools = tiny_model(
        **{"config.json": json.dumps(CONFIG).encode(), "tokenizer_config.json": json.dumps(template).encode()}
    )
    hub.add_repo("org/tools", tools)
    said = stages.run("check", "--model", "org/tools", "--settings", '{"variants": ["fp16"]}', SLIPWAY_RUN="r1")
    assert said.returncode == 0, said.stderr
    assert (
        "note: the chat template offers tools, but no parser is known for its calls (serving.tool_parser)"
        in said.stderr
    )
    serving = AskedServing(tool_parser="hermess").model_dump_json()
    ended = stages.run("check", "--model", "org/tools", "--serving", serving, SLIPWAY_RUN="r1")
    assert ended.returncode == 2
    assert "unknown serving.tool_parser 'hermess'\n  hint: did you mean 'hermes'?" in ended.stderr


def test_a_file_that_the_settings_name_and_the_pod_lacks_ends_the_stage(stages: Stages) -> None:
    workload = load(chosen={"workload": "chat"}).workload.model_copy(update={"tasks_path": "/no/such/tasks"})
    ended = stages.run("check", "--model", "org/tiny", "--workload", workload.model_dump_json(), SLIPWAY_RUN="r1")
    assert ended.returncode == 2
    assert "workload.tasks_path: there is no /no/such/tasks" in ended.stderr
    assert not (stages.folder / "outputs" / "variants").exists()


def test_a_pod_that_got_a_gpu_and_sees_none_decides_nothing_for_its_processor(stages: Stages) -> None:
    given = {"SLIPWAY_GPUS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = stages.run("check", "--model", "org/tiny", **given)
    assert ended.returncode == 61
    assert "this pod asked for 1 GPU, and sees none" in ended.stderr
    config = load()
    settings = {"workload": config.workload, "serving": Serving(), "profile": config.profile}
    flags = [flag for name, each in settings.items() for flag in (f"--{name}", each.model_dump_json())]
    ended = stages.run("evaluate", "--model", "org/tiny", "--variants", "fp16", *flags, **given)
    assert "this pod asked for 1 GPU, and sees none" in ended.stderr


def test_quantized_experts_are_left_out_where_vllm_has_no_kernels_for_them(stages: Stages) -> None:
    here = processor()
    assert here is not None
    outputs = checked(stages, {}, model="experts")
    if here.amx:
        assert outputs["variants"] == "fp16,awq,gptq,int8"
        return
    assert outputs["variants"] == "fp16"
    assert {outputs["awq"], outputs["gptq"], outputs["int8"]} == {"false"}
    reason = "vLLM's CPU build has no {} kernel for experts on processors without AMX"
    assert f"int8: {reason.format('int8')}" in outputs["left-out"].splitlines()
    if here.avx512:
        assert f"gptq: {reason.format('gptq')}" in outputs["left-out"].splitlines()


def test_formats_that_vllm_lacks_or_only_emulates_are_left_out_by_name_before_they_are_made(stages: Stages) -> None:
    here = processor()
    assert here is not None
    if here.amx:
        pytest.skip("the processor has AMX, and with it a kernel for fp8-block")
    new = (*FLOATS, "w4a16", "w8a8", "nvfp4")
    settings = Optimize(variants=("fp16", *new)).model_dump_json()
    given = {"SLIPWAY_RUN": "r1", "XDG_CACHE_HOME": str(stages.folder)}
    assert stages.run("check", "--model", "org/wide", "--settings", settings, **given).returncode == 0
    outputs = {path.name: path.read_text() for path in (stages.folder / "outputs").iterdir()}
    four_bit = str(here.avx512).lower()
    assert [outputs[name] for name in new] == ["false"] * 4 + [four_bit, "true", "false"]
    fp8, *others = outputs["left-out"].splitlines()
    kernel = "ChannelWiseTorchFP8ScaledMMLinearKernel"
    assert fp8.startswith(f"fp8: vLLM computes fp8 here with {kernel}, which is slow; optimize.allow_fallback=true")
    assert others == [
        "fp8-block: vLLM's CPU build has no fp8-block kernel for processors without AMX",
        "mxfp4: vLLM's CPU build has no mxfp4 kernel",
        "nvfp4a16: vLLM's CPU build has no nvfp4a16 kernel",
        *([] if here.avx512 else ["w4a16: vLLM's CPU build has no w4a16 kernel for processors without AVX-512"]),
        "nvfp4: vLLM's CPU build has no nvfp4 kernel",
    ]
    table = hardware_table()["cpu-avx512" if here.avx512 else "cpu-avx2"]
    assert kernel in table.left_out["fp8"].why, "configs/hardware names another kernel than vLLM"
    assert table.left_out.keys() >= {*new} - {"w4a16", "w8a8"}
    allowed = Optimize(variants=("fp16", *new), allow_fallback=True).model_dump_json()
    assert stages.run("check", "--model", "org/wide", "--settings", allowed, **given).returncode == 0
    served = ["fp16", "fp8", *(["w4a16"] if here.avx512 else []), "w8a8"]
    assert (stages.folder / "outputs" / "variants").read_text().split(",") == served


WITH_AMX = """
import json, sys, torch
torch.cpu._is_amx_tile_supported = lambda: True
from stages.parts.model.published import PublishedFormat, preset_configuration
PublishedFormat.missing_on_cpu = lambda *_, **__: ""
from stages.parts.vllm.support import missing_kernel
made = json.loads(sys.argv[1]) | {"quantization_config": preset_configuration("W4A16")}
for lora in (False, True):
    why = missing_kernel(made, "bfloat16", lora=lora, allow_fallback=True)
    print(f"said: {why}")
"""


def test_vllm_is_asked_for_experts_with_the_adapters_that_are_served_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor with AMX, or as if it were one, vLLM computes 4-bit experts, but no adapters of them."""
    need("vllm")
    if not (here := processor()) or not here.avx512:
        pytest.skip("the processor has no AVX-512")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wide = json.dumps(EXPERTS | WIDE | {"model_type": "qwen3_moe", "moe_intermediate_size": 256})
    asked = subprocess.run([sys.executable, "-c", WITH_AMX, wide], stdout=subprocess.PIPE, text=True, check=True)
    alone, with_adapters = [line for line in asked.stdout.splitlines() if line.startswith("said: ")]
    assert alone == "said: "
    assert with_adapters.startswith(
        "said: vLLM has no w4a16 kernel here for a layer of 8 experts of 256 × 256 with adapters: No WNA16"
    )


def test_auto_tries_what_the_table_says_of_this_processor_and_says_why_not_the_others(stages: Stages) -> None:
    kind = kind_of(None, processor())
    assert kind is not None
    for variants, tried in (
        (("auto",), [*kind.first]),
        (("auto", "awq", "-int8"), [*kind.first.keys() - {"int8"}, *(["awq"] if "awq" in kind.also else [])]),
    ):
        settings = Optimize(variants=variants).model_dump_json()
        given = {"SLIPWAY_RUN": f"r{len(variants)}", "XDG_CACHE_HOME": str(stages.folder)}
        ended = stages.run("check", "--model", "org/wide", "--settings", settings, **given)
        assert ended.returncode == 0, ended.stderr
        outputs = {path.name: path.read_text() for path in (stages.folder / "outputs").iterdir()}
        assert sorted(outputs["variants"].split(",")) == sorted(["fp16", *tried])
        assert {name for name in quantized_formats() if outputs[name] == "true"} == {*tried}
    assert [name for name in FORMATS if f"{name}: " in outputs["left-out"]] == [
        name for name in quantized_formats() if name not in (*tried, "int8", "awq" * (not kind.also))
    ]
    fp8 = "fp8: vLLM computes it with ChannelWiseTorchFP8ScaledMMLinearKernel, a slow stand-in, without AMX-FP8"
    assert fp8 in outputs["left-out"].splitlines()
    assert f"fp8 not tried: {fp8.removeprefix('fp8: ')}" in ended.stderr.splitlines()


def test_experts_in_one_tensor_are_left_out_by_the_tensor_s_name(stages: Stages) -> None:
    outputs = checked(stages, {}, model="fused")
    assert outputs["variants"] == "fp16"
    why = f"the experts of a layer are stored as one tensor ({FUSED}), which can't be quantized"
    assert f"int8: {why}" in outputs["left-out"].splitlines()


def test_a_model_that_sees_is_refused_with_the_command_that_brings_what_it_needs(stages: Stages) -> None:
    ended = stages.run("check", "--model", "org/seeing", XDG_CACHE_HOME=str(stages.folder))
    if importlib.util.find_spec("torchvision"):
        assert ended.returncode == 0, ended.stderr
        return
    assert ended.returncode == NotInstalled.exit_code, ended.stderr
    assert "vLLM serves models that see with torchvision, and none is installed here" in ended.stderr
    assert "hint: uv pip install --no-deps 'torchvision==0." in ended.stderr
    assert "--index-url https://download.pytorch.org/whl/cpu" in ended.stderr


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("narrow-experts", "vLLM has no 16-bit kernel here for a layer of 8 experts of 48 × 64: "),
        ("unknown", "has no class for ANewLlamaForCausalLM, and Transformers none it takes"),
        (
            "jamba",
            "vLLM does not serve it without a GPU: with a small jamba model it failed: IndexError: Dimension out",
        ),
    ],
)
def test_a_model_that_the_installed_vllm_cannot_serve_is_refused(stages: Stages, model: str, said: str) -> None:
    ended = stages.run("check", "--model", f"org/{model}", XDG_CACHE_HOME=str(stages.folder))
    assert ended.returncode == 13, ended.stderr
    assert said in ended.stderr
    assert "  hint: " in ended.stderr
    assert not (stages.folder / "outputs" / "variants").exists()


def test_without_a_gpu_a_family_whose_pictures_fail_is_served_by_its_language_part_alone() -> None:
    config = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "vision_config": {}}
    described = Description("org/name", None, config, None)
    with pytest.raises(UnusableModel, match="without a GPU: with a small llama4 model it failed") as refused:
        refuse_unserved_family(described, text_only=False)
    assert refused.value.hint.endswith("--set serving.text_only=true")
    refuse_unserved_family(described, text_only=True)


def test_a_class_of_transformers_is_enough_where_vllm_runs_it(stages: Stages) -> None:
    assert checked(stages, {}, model="known-to-transformers")["variants"].startswith("fp16")


def test_a_published_checkpoint_is_the_reference_and_what_is_made_from_16_bit_is_left_out(stages: Stages) -> None:
    outputs = checked(stages, {}, model="fp8")
    why = "it is made from 16-bit weights, and the model is published in fp8"
    assert outputs["variants"] == "fp8"
    assert outputs["left-out"].splitlines() == [f"{name}: {why}" for name in ("awq", "gptq", "int8")]
    assert [outputs[name] for name in ("awq", "gptq", "int8")] == ["false"] * 3
    recorded = json.loads((stages.store / "org--fp8/runs/r1/outcomes/check-awq.json").read_text())
    assert (recorded["result"], recorded["reason"]) == ("left out", why)
    assert "the one in 16 bit" in recorded["hint"]
    assert (outputs["candidates"], outputs["fetch"]) == ("[]", "false")


def test_a_published_gptq_checkpoint_is_not_taken_for_a_variant_to_make(stages: Stages) -> None:
    here = processor()
    assert here is not None
    if not here.avx512:
        pytest.skip("vLLM serves no 4 bit here")
    outputs = checked(stages, {}, model="gptq", make_unservable=True)
    assert (outputs["variants"], outputs["gptq"]) == ("gptq", "false")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("odd-groups", "vLLM has no gptq kernel here for a layer of "),
        ("nvfp4", "vLLM's CPU build has no nvfp4 kernel"),
        ("blocks", "vLLM's CPU build has no fp8-block kernel for processors without AMX"),
    ],
)
def test_a_published_checkpoint_without_a_kernel_is_refused(stages: Stages, model: str, message: str) -> None:
    here = processor()
    assert here is not None
    ended = stages.run("check", "--model", f"org/{model}", SLIPWAY_RUN="r1", XDG_CACHE_HOME=str(stages.folder))
    if model == "blocks" and here.amx:
        assert ended.returncode == 0, ended.stderr
        return
    assert ended.returncode == 13
    assert message in ended.stderr
    assert "such as on a GPU" in ended.stderr


def test_candidates_are_compared_and_those_with_a_kernel_are_fetched(stages: Stages, hub: HubServer) -> None:
    settings = Optimize(variants=("fp16",), candidates=("org/fp8@main", "org/nvfp4")).model_dump_json()
    arguments = ("--model", "org/wide", "--settings", settings)
    ended = stages.run("check", *arguments, SLIPWAY_RUN="r1", XDG_CACHE_HOME=str(stages.folder))
    assert ended.returncode == 0, ended.stderr
    outputs = {path.name: path.read_text() for path in (stages.folder / "outputs").iterdir()}
    assert (outputs["variants"], outputs["fetch"]) == ("fp16,org-fp8", "true")
    (candidate,) = json.loads(outputs["candidates"])
    assert (candidate["name"], candidate["source"], candidate["note"]) == ("org-fp8", "org/fp8", "")
    stored = {"quant_method": "fp8", "format": "fp8", "bits": 8}
    assert candidate["parameters"] == {"source": "org/fp8", "revision": "main", "commit": candidate["commit"], **stored}
    assert len(candidate["commit"]) == 40
    assert outputs["left-out"] == "org-nvfp4: vLLM's CPU build has no nvfp4 kernel"
    other = Optimize(variants=("fp16",), candidates=("org/tiny",)).model_dump_json()
    refused = stages.run("check", "--model", "org/wide", "--settings", other, SLIPWAY_RUN="r1")
    assert refused.returncode == 13
    assert "candidate org/tiny is another model: hidden_size is 64, and the model's is 256" in refused.stderr


def test_a_recipe_that_vllm_refuses_for_the_model_is_left_out_with_its_reason(stages: Stages) -> None:
    recipes = {
        "ngram": {"speculation": {"method": "ngram"}, "variants": ["fp16"]},
        "mtp": {"speculation": {"method": "mtp", "num_speculative_tokens": 1}, "variants": ["fp16"]},
        "kv-fp8": {"kv_cache_dtype": "fp8", "variants": ["int8"]},
        "batches": {"max_num_batched_tokens": 64, "max_num_seqs": 128, "variants": ["int8"]},
    }
    given = ("--serving", json.dumps({"recipes": recipes}))
    outputs = checked(stages, AVX2, *given)
    assert outputs["variants"] == "fp16,fp16+ngram,int8,int8+kv-fp8"
    assert outputs["left-out"].splitlines()[2:] == [
        "fp16+mtp: Unsupported speculative method: 'mtp'",
        "int8+batches: max_num_batched_tokens (64) must be greater than or equal to max_num_seqs (128).",
    ]
    recorded = json.loads((stages.store / "org--wide/runs/r1/outcomes/check-fp16+mtp.json").read_text())
    assert (recorded["result"], recorded["hint"].split(",")[0]) == ("left out", "leave it out of serving.recipes")
    assert checked(stages, AVX2, *given, model="predicting")["variants"].startswith("fp16,fp16+ngram,fp16+mtp,int8")
