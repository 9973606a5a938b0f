"""KServe's own SDK accepts what we render."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import ModelStore
from stages.parts.cluster.kinds import Object
from stages.rollout.kserve.modes import MODES, render
from stages.rollout.kserve.objects import KServeEndpoint
from stages.rollout.kserve.settings import KServe

SDK = Path(__file__).with_name("sdk")
FIRST, SECOND = "0001-fp16-aaaaaaaaaaaa", "0002-awq-bbbbbbbbbbbb"
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "scaled": {"prometheus": "http://prometheus:9090"},
    "placed": {"node_selector": {"gpu": "l4"}, "tolerations": [{"key": "gpu"}]},
    "on the CPU": {"gpu": None, "image": "example.com/slipway/evaluate:1"},
    "scheduled, from copies": {"llm": {"scheduler": True, "source": "s3://bucket/models", "cache_nodes": "gpus"}},
}


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The SDK in an environment of its own."""
    folder = tmp_path_factory.mktemp("sdk")
    python = folder / "bin" / "python"
    install: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--requirement", SDK / "requirements.lock"]
    make: list[str | Path] = [sys.executable, "-m", "venv", folder]
    for command in (make, install):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if ended.returncode:
            pytest.skip(f"KServe's SDK can't be installed: {ended.stderr.strip().splitlines()[-1:]}")
    return python


def validated(interpreter: Path, bodies: list[Object]) -> tuple[list[str], list[str]]:
    """The SDK's complaints, and the kinds that it checked."""
    text = json.dumps(bodies)
    command = [interpreter, SDK / "validate.py"]
    ended = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=True)
    return ended.stdout.splitlines(), ended.stderr.split()


@pytest.mark.slow
def test_the_sdk_accepts_the_objects_of_every_mode(interpreter: Path, tmp_path: Path) -> None:
    store = ModelStore(tmp_path, "org/name")
    bodies = []
    for settings in SETTINGS.values():
        endpoint = KServeEndpoint(store, AskedServing(), KServe.model_validate(settings), "slipway")
        for mode in MODES:
            bodies += [*render(endpoint, FIRST, None, mode, 100), *render(endpoint, SECOND, FIRST, mode, 10)]
    complaints, kinds = validated(interpreter, bodies)
    assert complaints == []
    assert set(kinds) == {"InferenceService", "LLMInferenceService", "LocalModelNamespaceCache"}
    (service,) = [body for body in render(endpoint, FIRST, None, "standard", 100) if body["kind"] == "InferenceService"]
    service["spec"]["predictor"]["model"]["argss"] = service["spec"]["predictor"]["model"].pop("args")
    assert validated(interpreter, [service])[0] == ["InferenceService.spec.predictor.model.argss is unknown"]
