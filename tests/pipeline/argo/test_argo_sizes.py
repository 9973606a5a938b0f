"""Runs that can't fit are refused before anything is submitted, and the others say what their pods need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.settings.config import load
from pipeline.workflow.definition import workflow_template
from tests.hub import HubServer
from tests.hub.models import tiny_model
from tests.kubernetes import KubernetesServer

PUBLISHED: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[2] / "scoring" / "published_models.yaml").read_text()
)
ONLY = "optimize.variants=[fp16]"
SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    index = {"metadata": {"total_size": 2 * 70_553_706_496}, "weight_map": {"weight": SHARD}}
    config = PUBLISHED["llama-3.1-70b"]["config"] | {"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
    files = {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": None,
        "model.safetensors.index.json": json.dumps(index).encode(),
        SHARD: b"weights",
    }
    with HubServer() as server:
        server.add_repo("org/large", tiny_model(**files))
        yield server


@pytest.mark.parametrize(
    ("platform", "settings", "said"),
    [
        ("gke", ["serving.tensor_parallel_size=4", ONLY], "fp16 on 4 × l4: weights 32.9"),
        ("aks", [ONLY], "fp16 on 1 × a100-80: weights 131.4"),
        ("onprem", ["serving.max_model_len=900"], "requests have up to 960 tokens, and max_model_len is 900"),
        ("cluster", ["serving.tensor_parallel_size=6"], "64 attention heads are not divisible by 6"),
    ],
)
def test_a_run_that_cannot_fit_is_refused_before_any_pod(
    server: KubernetesServer, slipway: Any, hub: HubServer, platform: str, settings: list[str], said: str
) -> None:
    given = [part for each in settings for part in ("--set", each)]
    where = ("--engine", "argo", "--platform", platform, "--namespace", "slipway", "--no-follow")
    ended = slipway("run", "org/large", *where, *given, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0")
    assert ended.returncode == 2, ended.stderr
    assert said in ended.stderr
    assert server.all("Workflow") == []
    assert not hub.requests_for("*.safetensors")


def test_the_pod_that_measures_gets_what_check_found() -> None:
    spec = workflow_template(load(chosen={"platform": "gke"}))["spec"]
    templates = {each["name"]: each for each in spec["templates"]}
    (task,) = (each for each in templates["pipeline"]["dag"]["tasks"] if each["name"] == "evaluate")
    given = {each["name"]: each["value"] for each in task["arguments"]["parameters"]}
    names = ("variants", "serving", "gpus", "memory", "shm")
    assert given == {name: f"{{{{tasks.check.outputs.parameters.{name}}}}}" for name in names}
    patch = json.loads(templates["evaluate"]["podSpecPatch"])
    amounts = {"nvidia.com/gpu": "{{inputs.parameters.gpus}}", "memory": "{{inputs.parameters.memory}}"}
    assert patch["containers"] == [{"name": "main", "resources": {"requests": amounts, "limits": amounts}}]
    assert patch["volumes"][0]["emptyDir"]["sizeLimit"] == "{{inputs.parameters.shm}}"
    arguments = templates["check"]["container"]["args"]
    assert arguments[arguments.index("--gpus") + 1] == "8"
    assert templates["check"]["container"]["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_what_a_platform_says_itself_stays(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: gke\nstages:\n  evaluate: {gpus: 2, memory: 90Gi, shm: 8Gi}\n")
    spec = workflow_template(load(chosen={"platform": str(path)}))["spec"]
    templates = {each["name"]: each for each in spec["templates"]}
    assert "podSpecPatch" not in templates["evaluate"]
    assert templates["evaluate"]["container"]["resources"]["limits"] == {"memory": "90Gi", "nvidia.com/gpu": "2"}
    arguments = templates["check"]["container"]["args"]
    assert arguments[arguments.index("--gpus") + 1] == "2"
