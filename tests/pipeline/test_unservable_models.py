"""What can't be served, refused by each command and program that may meet it first, from its Hub repository alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.parts.machine.hardware import gpus, processor
from tests.hub import HubServer
from tests.hub.models import CONFIG, Stages, tiny_model, write_model

REFUSED = 13


def without_weights(*paths: str) -> dict[str, bytes]:
    return {"config.json": json.dumps(CONFIG).encode(), "tokenizer.json": b"{}", **dict.fromkeys(paths, b"x" * 1000)}


def configured(architecture: str = "LlamaForCausalLM", **fields: Any) -> dict[str, bytes]:
    config = CONFIG | {"architectures": [architecture]} | fields
    return tiny_model(**{"config.json": json.dumps(config).encode()})


ADAPTED = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}
DIFFUSERS = {"model_index.json": b"{}", "unet/config.json": b"{}", "unet/diffusion_pytorch_model.safetensors": b"x"}
REPOSITORIES: dict[str, tuple[dict[str, bytes], str, str]] = {
    "diffusion": (DIFFUSERS, "a diffusion model in Diffusers' layout (model_index.json)", "vLLM-Omni"),
    "adapter": (ADAPTED, "an adapter (LoRA), not a model (adapter_config.json)", "merge it into its base model"),
    "gguf": (without_weights("m.Q4_K_M.gguf"), "only GGUF, for llama.cpp (m.Q4_K_M.gguf)", "from which it was made"),
    "pickle": (without_weights("pytorch_model.bin"), "only pickles (pytorch_model.bin)", "with safetensors"),
    "onnx": (without_weights("onnx/model.onnx"), "only ONNX (onnx/model.onnx)", "name the same model"),
    "openvino": (
        without_weights("openvino_model.xml", "openvino_model.bin"),
        "only weights for MLC, OpenVINO or TensorRT (openvino_model.xml)",
        "same model",
    ),
    "mlc": (
        without_weights("mlc-chat-config.json", "params_shard_0.bin"),
        "only weights for MLC, OpenVINO or TensorRT (mlc-chat",
        "same model",
    ),
    "flax": (without_weights("flax_model.msgpack"), "only weights of TensorFlow, Flax or NeMo", "same model"),
    "encoder": (
        configured("BertModel"),
        "the model is without a head that writes text",
        "vllm serve MODEL --runner pooling",
    ),
    "decoder-as-embedder": (
        configured("Qwen3ForCausalLM") | {"modules.json": b"[]", "1_Pooling/config.json": b"{}"},
        "an embedding model (1_Pooling/config.json)",
        "--runner pooling",
    ),
    "reranker": (
        configured("XLMRobertaForSequenceClassification") | {"modules.json": b"[]"},
        "a reranker, a reward model or another classifier (XLMRobertaForSequenceClassification)",
        "--runner pooling",
    ),
    "t5": (
        configured("T5ForConditionalGeneration", model_type="t5", is_encoder_decoder=True),
        "an encoder-decoder, such as T5 and BART (T5ForConditionalGeneration)",
        "name a decoder-only model",
    ),
    "florence": (
        configured("Florence2ForConditionalGeneration", is_encoder_decoder=True),
        "an encoder-decoder, such as T5 and BART ('is_encoder_decoder' in config.json)",
        "name a decoder-only model",
    ),
    "whisper": (
        configured("WhisperForConditionalGeneration", is_encoder_decoder=True),
        "a recognizer of speech",
        "vllm serve MODEL",
    ),
    "draft": (configured("Eagle3LlamaForCausalLM"), "a draft for speculative decoding", "--speculative-config"),
    "detector": (configured("DetrForObjectDetection"), "made for images, sound or series of numbers", "Transformers"),
    "mlx": (
        configured(quantization={"group_size": 64, "bits": 4}),
        "quantized for MLX ('quantization' in config.json)",
        "base_model on its card",
    ),
    "bitsandbytes": (
        configured(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "the model is quantized by bitsandbytes, which slipway can't serve",
        "in 16 or 32 bit",
    ),
    "older-gptq": (
        configured() | {"quantize_config.json": b"{}"},
        "quantize_config.json says how the model is quantized, and config.json does not",
        "in 16 or 32 bit",
    ),
    "own-code": (
        configured("ACustomForCausalLM", model_type="a-custom", auto_map={"AutoModel": "modeling.ACustom"}),
        "the model needs its own code to load ('auto_map' in config.json)",
        "name a model that Transformers supports",
    ),
}


COMMITS: dict[str, str] = {}


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        COMMITS.update({name: server.add_repo(f"org/{name}", files) for name, (files, _, _) in REPOSITORIES.items()})
        yield server


@pytest.fixture
def stages(hub: HubServer, tmp_path: Path) -> Stages:
    hub.requests.clear()
    return Stages(hub.url, tmp_path)


def slipway(stages: Stages, *arguments: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "SLIPWAY_"))}
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        env=inherited | {"HF_ENDPOINT": stages.url, "SLIPWAY_STORE": str(stages.store)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("name", REPOSITORIES)
def test_plan_says_what_a_model_is_that_cannot_be_served_and_what_to_use_instead(
    name: str, hub: HubServer, stages: Stages
) -> None:
    ended = slipway(stages, "plan", f"org/{name}")
    _, what, instead = REPOSITORIES[name]
    assert ended.returncode == REFUSED, ended.stderr
    error, hint = ended.stderr.splitlines()
    assert what in error
    assert instead in hint
    assert not hub.requests_for("*.safetensors")


@pytest.mark.parametrize("name", ["gguf", "decoder-as-embedder"])
def test_a_run_is_refused_before_it_starts(name: str, hub: HubServer, stages: Stages) -> None:
    ended = slipway(stages, "run", f"org/{name}")
    assert ended.returncode == REFUSED, ended.stderr
    assert f"error: the {'repository' if name == 'gguf' else 'model'}" in ended.stderr
    assert REPOSITORIES[name][1] in ended.stderr
    assert not stages.store.exists()
    assert all(each.path.endswith("/config.json") for each in hub.requests_for("*/resolve/*"))


def test_a_format_that_this_processor_cannot_compute_is_refused_before_a_run_starts(
    hub: HubServer, stages: Stages
) -> None:
    here = processor()
    if here is None or here.amx or gpus():
        pytest.skip("this machine may serve it")
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    hub.add_repo("org/blocks", configured(quantization_config=blocks))
    ended = slipway(stages, "run", "org/blocks")
    assert ended.returncode == REFUSED, ended.stderr
    assert "vLLM's CPU build has no fp8-block kernel for processors without AMX" in ended.stderr
    assert "such as on a GPU" in ended.stderr
    assert not stages.store.exists()
    assert all(each.range for each in hub.requests_for("*/org/blocks/*.safetensors")), "more than its header was read"


@pytest.mark.parametrize("name", ["gguf", "decoder-as-embedder"])
@pytest.mark.parametrize("stage", ["resolve", "acquire", "check"])
def test_the_stage_that_meets_it_first_refuses_it(stage: str, name: str, hub: HubServer, stages: Stages) -> None:
    arguments = [] if stage == "resolve" else ["--commit", COMMITS[name]]
    ended = stages.run(stage, "--model", f"org/{name}", *arguments)
    assert ended.returncode == REFUSED, ended.stderr
    assert REPOSITORIES[name][1] in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not hub.requests_for("*.safetensors")


def test_a_directory_is_refused_before_its_weights_are_read(stages: Stages) -> None:
    files = REPOSITORIES["encoder"][0] | {"model.safetensors": b"not even safetensors"}
    folder = write_model(stages.folder / "encoder", files)
    for ended in (slipway(stages, "run", str(folder)), stages.run("resolve", "--model", str(folder))):
        assert ended.returncode == REFUSED, ended.stderr
        assert "the model is without a head that writes text" in ended.stderr
