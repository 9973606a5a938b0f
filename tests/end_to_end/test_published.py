"""Checkpoints that somebody else quantized: as the only source of a run, and as candidates beside a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stages.parts.base.store import ModelStore
from stages.parts.machine.hardware import processor
from stages.parts.records.acquired import ACQUIRED, Acquired
from stages.parts.records.evaluation import Evaluation
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.releases.release import current_release
from stages.parts.vllm.client import answers_chat
from tests.demo import DEMO
from tests.end_to_end.command_line import API_KEY, CONFIG, TOKEN, Pipeline
from tests.hub.server import HubServer
from tests.published import copied, quantized, truncated, with_template, with_token

pytestmark = pytest.mark.e2e
INT8, GPTQ = "publisher/demo-llama-W8A8", "publisher/demo-llama-GPTQ"
ROLLOUT = [
    text
    for name in ("steps=[100]", "step_s=5", "min_requests=5", "ttft_slack_ms=5000", "tpot_slack_ms=500")
    for text in ("--set", f"rollout.{name}")
]
DAMAGED, STRANGER = "publisher/demo-llama-damaged", "publisher/demo-llama-stranger"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("publisher")
    int8, gptq = quantized("int8", folder), quantized("gptq", folder)
    with HubServer() as server:
        repositories = {
            INT8: int8,
            GPTQ: with_template(copied(gptq, folder / "with-template")),
            DAMAGED: truncated(copied(gptq, folder / "damaged")),
            STRANGER: with_token(copied(gptq, folder / "stranger")),
        }
        server.tokens[TOKEN] = set(repositories)
        for name, path in repositories.items():
            server.add_repo(name, path)
        yield server


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, published: HubServer) -> Iterator[Pipeline]:
    made = Pipeline(tmp_path_factory.mktemp("published"), published)
    yield made
    made.call("serve", INT8, "--stop")


def decided(pipeline: Pipeline, *arguments: str) -> tuple[dict[str, Any], str]:
    ended = pipeline.call("run", *arguments, *CONFIG, "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout), ended.stderr


@pytest.mark.skipif(not ((here := processor()) and here.avx512), reason="vLLM serves no 4 bit here")
def test_a_published_gptq_checkpoint_is_the_only_source_of_a_decision(pipeline: Pipeline) -> None:
    document, said = decided(pipeline, GPTQ)
    assert document["decision"]["winner"] == "gptq"
    assert answers(document, GPTQ)
    pipeline.call("serve", GPTQ, "--stop")
    assert "note: without int8: it is made from 16-bit weights, and the model is published in gptq" in said or (
        "int8" not in " ".join(CONFIG)
    )
    store = ModelStore(pipeline.root, GPTQ)
    base, variant = Acquired.read(store.base / ACQUIRED), Variant.read(store.optimized("gptq") / VARIANT)
    evaluation = Evaluation.read(store.evaluation("gptq"))
    assert base is not None
    assert variant is not None
    assert evaluation is not None
    assert (base.format, variant.method, variant.published) == ("gptq", "gptq", True)
    assert base.parameters == weights_of_the_demo()
    assert "gptq" in str(evaluation.engine.quantization)
    assert (variant.bits, evaluation.memory.weights_bytes) == (4, variant.weights_bytes)


def weights_of_the_demo() -> int:
    index = json.loads((DEMO / "model" / "model.safetensors.index.json").read_text())
    return int(index["metadata"]["total_size"]) // 2


def test_candidates_are_measured_beside_a_published_int8_checkpoint_and_the_winner_is_served(
    pipeline: Pipeline,
) -> None:
    beside = [text for name in (GPTQ, DAMAGED) for text in ("--candidate", name)]
    document, said = decided(pipeline, INT8, *beside, "--allow-incomplete")
    decision, store = document["decision"], ModelStore(pipeline.root, INT8)
    candidates = {candidate["variant"]: candidate for candidate in decision["candidates"]}
    assert candidates.keys() >= {"int8", "publisher-gptq", "damaged"}
    assert "note: candidate publisher/demo-llama-GPTQ: its own chat template differs" in said
    assert decision["profile"]["reference"] == "int8"
    assert decision["missing"] == ["damaged"]
    assert "is truncated" in candidates["damaged"]["excluded"]
    for name in ("int8", "publisher-gptq"):
        assert candidates[name]["raw"]["quality"] > 0
        directory = store.optimized(name)
        assert (directory / "chat_template.jinja").read_text() == (DEMO / "model" / "chat_template.jinja").read_text()
    verified = pipeline.call("verify-decision", document["run"])
    assert verified.returncode == 0, verified.stderr
    scored = pipeline.call("score", document["run"], "--profile", "quality")
    assert scored.returncode == 0, scored.stderr
    assert answers(document, INT8)
    again, _ = decided(pipeline, INT8, *beside, "--allow-incomplete")
    assert again["decision"]["key"] == decision["key"]


def answers(document: dict[str, Any], model: str) -> bool:
    return answers_chat(document["endpoint"], model, API_KEY, timeout_s=120)


def test_a_candidate_is_released_and_rolled_back(pipeline: Pipeline, tmp_path: Path) -> None:
    store, profile = ModelStore(pipeline.root, INT8), tmp_path / "small.yaml"
    profile.write_text("name: small\nweights: {quality: 0, latency: 0, throughput: 0, memory: 1}\n")
    releases = []
    for winner, candidate in (("int8", ()), ("publisher-gptq", ("--candidate", GPTQ))):
        document, _ = decided(pipeline, INT8, *ROLLOUT, "--profile", str(profile), "--force-publish", *candidate)
        assert document["decision"]["winner"] == winner
        assert answers(document, INT8)
        releases.append(current_release(store))
    ended = pipeline.call("rollback", INT8, *CONFIG, *ROLLOUT)
    assert ended.returncode == 0, ended.stderr
    assert current_release(store) == releases[0] != releases[1]


def test_another_model_is_refused_before_anything_is_fetched(pipeline: Pipeline, published: HubServer) -> None:
    published.requests.clear()
    ended = pipeline.call("run", INT8, *CONFIG, "--candidate", STRANGER)
    assert ended.returncode == 13
    assert f"candidate {STRANGER} is another model: token " in ended.stderr
    assert all(each.range for each in published.requests_for("*.safetensors")), "more than a header was read"
