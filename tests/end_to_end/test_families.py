"""Models with experts, and models that see, whole: from the Hub to an answered question."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from stages.parts.base.store import ModelStore
from stages.parts.records.evaluation import Evaluation
from stages.parts.vllm.client import answers_chat
from tests.end_to_end.command_line import API_KEY, CONFIG, TOKEN, Pipeline
from tests.hub.server import HubServer
from tests.models.servable import publish

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
KINDS: Final = ("qwen3_moe", "qwen3_5", "gemma3")
VARIANTS: Final = ("fp16", "int8", "gptq", "awq")
CHANGED: Final = {
    "optimize.variants": f"[{', '.join(VARIANTS)}]",
    "serving.max_model_len": "512",
    "serving.extra_arguments": "[]",
    "workload.quality_limit": "20",
    "profile.task_loss": "0.9",  # what so few items can show
}
SETTINGS: Final = (*CONFIG, *(text for name, value in CHANGED.items() for text in ("--set", f"{name}={value}")))
SEES: Final = importlib.util.find_spec("torchvision") is not None


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("published")
    with HubServer() as server:
        server.tokens[TOKEN] = {f"publisher/{kind}" for kind in KINDS}
        for kind in KINDS:
            publish(kind, folder / kind)
            server.add_repo(f"publisher/{kind}", folder / kind)
        yield server


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_moe",
        *(
            pytest.param(kind, marks=pytest.mark.skipif(not SEES, reason="needs torchvision"))
            for kind in ("qwen3_5", "gemma3")
        ),
    ],
)
def test_a_model_runs_whole_without_a_variant_made_in_vain(hub: HubServer, tmp_path: Path, kind: str) -> None:
    pipeline, model = Pipeline(tmp_path, hub), f"publisher/{kind}"
    store = ModelStore(tmp_path, model)
    try:
        ended = pipeline.call("run", model, *SETTINGS, "--json")
        assert ended.returncode == 0, ended.stderr
        document: dict[str, Any] = json.loads(ended.stdout)
        measured = [name for name in VARIANTS if Evaluation.read(store.evaluation(name))]
        made = {path.name for path in store.optimized(VARIANTS[0]).parent.iterdir() if not path.name.startswith(".")}
        assert made == set(measured)
        for name in set(VARIANTS) - made:
            assert re.search(rf"optimize-{name} +Skipped +left out: ", ended.stderr)
        endpoint = document["endpoint"]
        assert answers_chat(endpoint, model, api_key=API_KEY, picture=kind != "qwen3_moe")
    finally:
        pipeline.call("serve", model, "--stop")


@pytest.mark.skipif(SEES, reason="torchvision is there")
@pytest.mark.parametrize("kind", ["qwen3_5", "gemma3"])
def test_without_torchvision_a_model_that_sees_is_refused_before_anything_is_fetched(
    hub: HubServer, tmp_path: Path, kind: str
) -> None:
    hub.requests.clear()
    ended = Pipeline(tmp_path, hub).call("run", f"publisher/{kind}", *SETTINGS)
    assert ended.returncode == 61
    assert "torchvision" in ended.stderr
    assert all(each.range for each in hub.requests_for("*.safetensors")), "more than a header was read"
