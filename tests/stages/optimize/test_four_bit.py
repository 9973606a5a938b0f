from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.optimize.base_model import read_base
from stages.optimize.ensure import ensure, identify, verify
from stages.parts.base.errors import ConfigError, NotInstalled, QuantizationFailed
from stages.parts.base.files import digest_of
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.store import ModelStore
from stages.parts.machine.hardware import GPUS_VARIABLE, LIMIT, Processor
from tests.stages.optimize.tiny import ROOT, acquire, command, environment, llama, optimize, publish, variant

LAYERS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LAYERS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
WITH_BF16 = Processor(avx2=True, avx512=True, bf16=True, amx=False)
WITHOUT_BF16 = Processor(avx2=True, avx512=True, bf16=False, amx=False)
CARRIED = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"}


@pytest.fixture(scope="module")
def gptq(tiny: Path, settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    return made("gptq", tiny, settings, tmp_path_factory.mktemp("gptq"))


@pytest.fixture(scope="module")
def awq(tiny: Path, settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    return made("awq", tiny, settings, tmp_path_factory.mktemp("awq"))


def made(method: str, source: Path, settings: dict[str, Any], root: Path) -> ModelStore:
    store = acquire(source, root)
    ended = optimize(store, method, settings)
    assert ended.status == 0, ended.stderr
    assert ended.stdout.strip() == variant(store, method).digest
    return store


def check(store: ModelStore, method: str, packed_shape: tuple[int, int]) -> None:
    """Check the files that vLLM reads, and their record."""
    directory, record = store.optimized(method), variant(store, method)
    tensors = load_file(directory / "model.safetensors")
    for name in (f"model.layers.{block}.{layer}" for block in range(2) for layer in LAYERS):
        assert tensors[f"{name}.qweight"].dtype == tensors[f"{name}.qzeros"].dtype == torch.int32
        assert f"{name}.weight" not in tensors
    assert tuple(tensors["model.layers.0.mlp.down_proj.qweight"].shape) == packed_shape
    assert tensors["model.layers.0.mlp.down_proj.scales"].shape == (2, 128)
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["bits"], config["group_size"]) == (method, 4, 128)
    assert (record.bits, record.dtype, record.parameters["group_size"]) == (4, "bfloat16", 128)
    assert record.weights_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert record.peak_memory_bytes > 200 << 20


def test_gptq_makes_what_vllm_reads(gptq: ModelStore) -> None:
    check(gptq, "gptq", (256 // 8, 128))


def test_awq_makes_what_vllm_reads(awq: ModelStore) -> None:
    check(awq, "awq", (256, 128 // 8))


def test_a_pod_that_got_a_gpu_does_not_quantize_without_one(tiny: Path, settings: Any, tmp_path: Path) -> None:
    store = acquire(tiny, tmp_path)
    ended = optimize(store, "gptq", settings, **{GPUS_VARIABLE: "1", "CUDA_VISIBLE_DEVICES": ""})
    assert ended.status == NotInstalled.exit_code
    assert "this pod asked for 1 GPU, and sees none: " in ended.stderr
    assert "hint: look at the node's driver" in ended.stderr
    assert not store.optimized("gptq").exists()


@pytest.mark.parametrize("method", ["awq", pytest.param("gptq", marks=pytest.mark.slow)])
def test_without_bf16_arithmetic_linear_layers_compute_in_float32_and_16_bit_is_stored(
    method: str, tiny: Path, settings: Any, tmp_path: Path
) -> None:
    store = acquire(tiny, tmp_path)
    ended = optimize(store, method, settings, **{LIMIT: "AVX2", "CUDA_VISIBLE_DEVICES": ""})
    assert ended.status == 0, ended.stderr
    check(store, method, (256, 128 // 8) if method == "awq" else (256 // 8, 128))
    assert variant(store, method).parameters["linear_layers_computed_in"] == "float32"
    tensors = load_file(store.optimized(method) / "model.safetensors")
    assert {each.dtype for each in tensors.values()} <= {torch.int32, torch.float16, torch.bfloat16}
    if method == "awq":
        assert error_of_awq(tensors, tiny, "model.layers.1.mlp.gate_proj", "post_attention_layernorm") < 0.2


def error_of_awq(tensors: dict[str, torch.Tensor], base: Path, layer: str, norm: str) -> float:
    """How far a layer with its norm, which takes the scales of its inputs, is from the base's, as a share."""
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    parts = {part: tensors[f"{layer}.{part}"] for part in ("qweight", "qzeros", "scales")}
    norm = f"{layer.rpartition('.mlp')[0]}.{norm}.weight"
    original = {name: each for path in base.glob("*.safetensors") for name, each in load_file(path).items()}
    made = dequantize_gemm(**parts, bits=4, group_size=128).float() * tensors[norm].float()[:, None]
    wanted = original[f"{layer}.weight"].float().T * original[norm].float()[:, None]
    return float((made - wanted).norm() / wanted.norm())


def test_only_a_processor_without_bf16_changes_the_key(
    tiny: Path, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = read_base(acquire(tiny, tmp_path))
    asked = Optimize.model_validate(settings)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    told = {}
    for found in (None, WITH_BF16, WITHOUT_BF16):
        monkeypatch.setattr("stages.optimize.job.processor", lambda found=found: found)
        told[found] = identify("awq", base, asked)["parameters"]
    assert told[None] == told[WITH_BF16]
    assert told[WITHOUT_BF16] == told[WITH_BF16] | {"linear_layers_computed_in": "float32"}


def test_all_files_but_weights_and_config_are_the_publishers(gptq: ModelStore, tiny: Path) -> None:
    names = {file.path for file in variant(gptq, "gptq").files}
    assert names == {*CARRIED, "config.json", "quantize_config.json", "model.safetensors"}
    assert {path.name for path in gptq.optimized("gptq").iterdir()} == {*names, "variant.json"}
    for name in CARRIED:
        assert (gptq.optimized("gptq") / name).read_bytes() == (tiny / name).read_bytes()


def test_a_repeated_run_finds_the_variant_without_loading_anything(gptq: ModelStore, settings: Any) -> None:
    again = optimize(gptq, "gptq", settings, "-X", "importtime")
    assert again.status == 0
    assert "reused: gptq: 4 bit" in again.stderr
    assert not {"torch", "transformers", "gptqmodel", "numpy"} & {
        line.rpartition("|")[2].strip().partition(".")[0] for line in again.stderr.splitlines()
    }


def test_two_group_sizes_do_not_undo_each_others_work(gptq: ModelStore, settings: Any, tmp_path: Path) -> None:
    store = ModelStore(shutil.copytree(gptq.root, tmp_path, symlinks=True, dirs_exist_ok=True), gptq.model)
    one, other = (Optimize.model_validate(settings | {"group_size": size}) for size in (128, 64))
    first = variant(store, "gptq")
    second, made = ensure(store, "gptq", other)
    assert made
    for asked, expected in ((one, first), (other, second), (one, first)):
        assert ensure(store, "gptq", asked) == (expected, False)
        assert variant(store, "gptq") == expected


def test_everything_that_influences_the_result_changes_the_key(tiny: Path, settings: Any, tmp_path: Path) -> None:
    base = read_base(acquire(tiny, tmp_path))
    calibration = settings["calibration"]
    variations = [
        settings,
        settings | {"group_size": 64},
        settings | {"calibration": calibration | {"text": "python-docs"}},
        settings | {"calibration": calibration | {"samples": 4}},
        settings | {"calibration": calibration | {"sequence_length": 32}},
        settings | {"calibration": calibration | {"seed": 1}},
    ]
    keys = [
        digest_of(identify(method, base, Optimize.model_validate(each)))
        for method in ("awq", "gptq")
        for each in variations
    ]
    assert len(set(keys)) == 12
    only_others = Optimize.model_validate(settings | {"variants": ["fp16", "gptq"]})
    assert digest_of(identify("gptq", base, only_others)) == keys[6]


@pytest.mark.slow
def test_a_wide_untied_base_becomes_bfloat16_on_one_core(tmp_path: Path, settings: Any) -> None:
    source = publish(tmp_path / "wide", llama(tie_word_embeddings=False), dtype="float32", shard_size="1GB")
    store = acquire(source, tmp_path / "store")
    ended = subprocess.run(
        ["taskset", "-c", "0", *command(store, "gptq", settings | {"group_size": 32})],
        env=environment(store, OMP_NUM_THREADS="1"),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    tensors = load_file(store.optimized("gptq") / "model.safetensors")
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert tensors["model.layers.0.mlp.down_proj.scales"].shape == (8, 128)
    assert variant(store, "gptq").dtype == "bfloat16"


def start_quantizing(store: ModelStore, settings: dict[str, Any]) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """The program after GPTQModel has loaded the model, and its child processes."""
    process = subprocess.Popen(
        command(store, "gptq", settings),
        env=environment(store),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "Packing Kernel" in line:
            return process, psutil.Process(process.pid).children(recursive=True)
    raise AssertionError(f"it ended with {process.wait()}")


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_and_the_next_one_makes_the_same_variant(
    gptq: ModelStore, tiny: Path, settings: Any, tmp_path: Path
) -> None:
    store = acquire(tiny, tmp_path)
    process, below = start_quantizing(store, settings)
    process.kill()
    process.communicate()
    assert below
    _, alive = psutil.wait_procs(below, timeout=120)
    assert not alive
    assert not store.optimized("gptq").exists()
    assert optimize(store, "gptq", settings).status == 0
    # Another process in another folder writes the same bytes.
    assert variant(store, "gptq").digest == variant(gptq, "gptq").digest
    assert not list((store.path / ".building").glob("*/*"))


@pytest.mark.slow
def test_sigterm_ends_the_stage_and_nothing_is_published(tiny: Path, settings: Any, tmp_path: Path) -> None:
    store = acquire(tiny, tmp_path)
    process, below = start_quantizing(store, settings)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert said.strip().endswith("error: asked to stop (SIGTERM)")
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in below)
    assert not store.optimized("gptq").exists()
    assert not list((store.path / ".building").glob("*/*"))


@pytest.mark.slow
def test_an_unsupported_architecture_gives_one_clear_line(tmp_path: Path, settings: Any) -> None:
    from transformers import BioGptConfig

    config = BioGptConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    store = acquire(publish(tmp_path / "biogpt", config), tmp_path / "store")
    ended = optimize(store, "gptq", settings, SLIPWAY_RUN="r1")
    assert ended.status == QuantizationFailed.exit_code
    assert ended.error.startswith("error: gptq cannot quantize BioGptForCausalLM: ValueError: Unsupport model_type")
    assert len(ended.error.splitlines()) == 2
    assert "Traceback" in ended.stderr
    assert not store.optimized("gptq").exists()
    outcome = json.loads((store.run("r1") / "outcomes" / "optimize-gptq.json").read_text())
    assert outcome["result"] == "failed"


@pytest.mark.slow
def test_a_quantizer_that_ends_its_process_gives_one_clear_line(tmp_path: Path, settings: Any) -> None:
    from transformers import GPT2Config

    source = publish(tmp_path / "gpt2", GPT2Config(vocab_size=512, n_embd=128, n_layer=2, n_head=4, n_positions=512))
    ended = optimize(acquire(source, tmp_path / "store"), "awq", settings)
    assert ended.status == QuantizationFailed.exit_code
    assert ended.error.startswith("error: awq cannot quantize GPT2LMHeadModel: RuntimeError: The size of tensor a")
    assert len(ended.error.splitlines()) == 2


def test_a_group_size_that_does_not_divide_is_refused_before_anything_is_loaded(tmp_path: Path, settings: Any) -> None:
    store = acquire(publish(tmp_path / "odd", llama(hidden_size=192, intermediate_size=384)), tmp_path / "store")
    ended = optimize(store, "awq", settings)
    assert ended.status == QuantizationFailed.exit_code
    assert "the group size 128 does not divide the 192 inputs of model.layers." in ended.error
    assert ended.error.endswith("hint: set group_size to 64")
    assert "GPT-QModel" not in ended.stderr


def test_the_error_says_that_no_group_size_fits(tmp_path: Path, settings: Any) -> None:
    store = acquire(publish(tmp_path / "odd", llama(hidden_size=80, intermediate_size=144)), tmp_path / "store")
    with pytest.raises(QuantizationFailed) as caught:
        ensure(store, "gptq", Optimize.model_validate(settings))
    assert caught.value.hint == "no group size fits this model"


def test_a_calibration_text_that_is_too_short_is_a_wrong_setting(tiny: Path, settings: Any, tmp_path: Path) -> None:
    store = acquire(tiny, tmp_path)
    ended = optimize(store, "awq", {"calibration": settings["calibration"] | {"samples": 10_000}})
    assert ended.status == ConfigError.exit_code
    assert "sequences of 64 tokens, but 10000 are needed" in ended.error
    assert not store.optimized("awq").exists()


def test_sequences_are_no_longer_than_the_model_allows(tmp_path: Path) -> None:
    store = acquire(publish(tmp_path / "short", llama(max_position_embeddings=48)), tmp_path / "store")
    assert identify("awq", read_base(store), Optimize())["parameters"]["sequence_length"] == 48


Change = Callable[[dict[str, torch.Tensor]], None]


def drop(name: str) -> Change:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, value: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({name: value})


def left_alone(tensors: dict[str, torch.Tensor]) -> None:
    for name in ("gate_proj", "up_proj", "down_proj"):
        layer = f"model.layers.0.mlp.{name}"
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{layer}.{part}"]
        shape = (128, 256) if name == "down_proj" else (256, 128)
        tensors[f"{layer}.weight"] = torch.zeros(shape, dtype=torch.bfloat16)


LAYER = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (drop(f"{LAYER}.qzeros"), f"{LAYER}.qzeros is missing"),
        (drop(f"{LAYER}.qweight"), f"{LAYER}.weight is missing"),
        (drop("model.norm.weight"), "model.norm.weight is missing"),
        (put(f"{LAYER}.scales", torch.full((1, 256), torch.nan)), f"{LAYER}.scales holds NaN or infinity"),
        (put("model.norm.weight", torch.full((128,), torch.inf)), "model.norm.weight holds NaN or infinity"),
        (put(f"{LAYER}.scales", torch.ones(2, 256)), "don't belong together"),
        (put(f"{LAYER}.qweight", torch.ones(16, 256)), "is packed as F32, I32 and F16"),
        (put(f"{LAYER}.qweight", torch.ones(16, 128, dtype=torch.int32)), "don't belong together"),
        (put("model.norm.weight", torch.ones(64)), "model.norm.weight was [128] and is now [64]"),
        (put("model.layers.9.norm.weight", torch.ones(4)), "model.layers.9.norm.weight is not a tensor of the model"),
        (left_alone, "67% of the linear layers' weights are quantized"),
    ],
)
def test_files_that_are_not_the_quantized_model_are_refused(
    gptq: ModelStore, tmp_path: Path, change: Change, said: str
) -> None:
    directory = tmp_path / "variant"
    shutil.copytree(gptq.optimized("gptq"), directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    (directory / "model.safetensors").unlink()
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(QuantizationFailed) as caught:
        verify("gptq", read_base(gptq), directory, {"group_size": 128})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("method", "group_size"), [("awq", 128), ("gptq", 64)])
def test_files_of_another_variant_are_refused(gptq: ModelStore, method: str, group_size: int) -> None:
    with pytest.raises(QuantizationFailed, match=r"config\.json says quant_method 'gptq'|has groups of 128, not 64"):
        verify(method, read_base(gptq), gptq.optimized("gptq"), {"group_size": group_size})


def test_a_base_is_not_a_quantized_variant_of_itself(gptq: ModelStore) -> None:
    with pytest.raises(QuantizationFailed, match="only 0% of the linear layers' weights are quantized"):
        verify("gptq", read_base(gptq), gptq.base, {"group_size": 128})
