"""Adapters that can't be served with a model, refused by each command and program that may meet them first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from stages.parts.base.serving_settings import AskedServing
from stages.parts.machine.hardware import processor
from tests.adapters import files, untrained
from tests.extras import need
from tests.hub import HubServer
from tests.hub.models import Stages, tiny_model

REFUSED = 13
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "dtype": "float32",
}
LAYER = {
    **{f"self_attn.{name}_proj": (rows, 64) for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64))},
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
    "input_layernorm": (64,),
    "post_attention_layernorm": (64,),
}
LLAMA: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (512, 64),
    "lm_head.weight": (512, 64),
    "model.norm.weight": (64,),
    **{f"model.layers.{number}.{name}.weight": shape for number in range(2) for name, shape in LAYER.items()},
}
BLOOM = "transformer.h.{}.self_attention.query_key_value"
ADAPTERS: dict[str, dict[str, bytes]] = {
    "support": files(untrained(layers=2)),
    "larger": files(untrained(128, 128), base_model_name_or_path="org/other"),
    "pickled": {"adapter_config.json": b"{}", "adapter_model.bin": b"x"},
    "dora": files(untrained(), use_dora=True),
    "head": files(untrained(), modules_to_save=["lm_head"]),
    "biased": files(untrained(), bias="all"),
    "of-bloom": files(untrained(64, 192, module=BLOOM)),
}


def model(weights: dict[str, tuple[int, ...]], **changed: Any) -> dict[str, bytes]:
    tensors = {name: np.zeros(shape, np.float32) for name, shape in weights.items()}
    config = json.dumps(CONFIG | changed).encode()
    return tiny_model(**{"config.json": config, "model.safetensors": save(tensors)})


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.add_repo("org/base", model(LLAMA))
        bloom = {"model_type": "bloom", "architectures": ["BloomForCausalLM"], "n_layer": 1, "n_head": 4}
        server.add_repo("org/bloom", model({f"{BLOOM.format(0)}.weight": (192, 64)}, **bloom))
        for name, content in ADAPTERS.items():
            server.add_repo(f"org/{name}", content)
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
        cwd=stages.folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", ["plan", "run"])
@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (
            "larger",
            "the adapter org/larger was made for another base than org/base: model.layers.0.self_attn.q_proj has ",
        ),
        ("pickled", "org/pickled holds its weights only as pickles"),
    ],
)
def test_an_adapter_of_another_base_is_refused_before_anything_is_downloaded(
    command: str, adapter: str, message: str, hub: HubServer, stages: Stages
) -> None:
    ended = slipway(stages, command, "org/base", "--set", f"serving.adapters.mine=org/{adapter}")
    assert ended.returncode == REFUSED, ended.stderr
    assert message in ended.stderr
    assert not stages.store.exists()
    read = hub.requests_for("*.safetensors")
    assert all(request.range for request in read), "only headers are read"


def test_a_plan_with_an_adapter_that_fits_is_as_without(stages: Stages) -> None:
    plans = [
        slipway(stages, "plan", "org/base", "--gpu", "l4", "--json", *flags)
        for flags in ((), ("--set", "serving.adapters={mine: org/support@main}"))
    ]
    assert [ended.returncode for ended in plans] == [0, 0], plans[1].stderr
    assert plans[0].stdout == plans[1].stdout


@pytest.mark.parametrize("setting", ["serving.adapters={'a/b': org/support}", "serving.adapters={a: {b: c}}"])
def test_what_is_no_name_or_no_source_is_a_mistake_in_the_settings(stages: Stages, setting: str) -> None:
    ended = slipway(stages, "plan", "org/base", "--set", setting)
    assert ended.returncode == 2
    assert "serving.adapters" in ended.stderr


def test_on_a_cluster_a_directory_has_to_be_on_the_store_s_volume(stages: Stages) -> None:
    where = ("--engine", "argo", "--platform", "gke")
    ended = slipway(stages, "run", "org/base", *where, "--set", "serving.adapters.mine=./adapter")
    assert ended.returncode == 2
    assert f"serving.adapters.mine names {stages.folder}/adapter, which pods on gke can't read" in ended.stderr


def check(stages: Stages, adapter: str, base: str = "org/base") -> subprocess.CompletedProcess[str]:
    serving = AskedServing(adapters={"mine": f"org/{adapter}"}).model_dump_json()
    flags = ("--settings", '{"variants": ["fp16", "int8"]}', "--serving", serving)
    return stages.run("check", "--model", base, *flags, SLIPWAY_RUN="r1", XDG_CACHE_HOME=str(stages.folder))


@pytest.mark.parametrize(
    ("adapter", "base", "message"),
    [
        ("larger", "org/base", "the adapter org/larger was made for another base than org/base"),
        ("dora", "org/base", "vLLM can't serve the adapter mine (org/dora): vLLM does not yet support DoRA."),
        ("head", "org/base", "Unsupported modules_to_save: ['lm_head']"),
        ("biased", "org/base", "Adapter bias is not supported."),
        ("of-bloom", "org/bloom", "its class BloomForCausalLM takes none"),
    ],
)
def test_what_the_installed_vllm_cannot_serve_ends_the_stage(
    stages: Stages, adapter: str, base: str, message: str
) -> None:
    need("vllm")
    ended = check(stages, adapter, base)
    assert ended.returncode == REFUSED, ended.stderr
    assert message in ended.stderr
    assert not (stages.folder / "outputs" / "variants").exists()


def test_what_vllm_serves_with_adapters_here_goes_on(stages: Stages) -> None:
    need("vllm")
    ended = check(stages, "support")
    assert ended.returncode == 0, ended.stderr
    here = processor()
    assert ended.stdout.strip() == ("fp16,int8" if here and here.amx else "fp16")
    passed = json.loads((stages.folder / "outputs" / "serving").read_text())
    assert passed["adapters"] == {"mine": "org/support"}
