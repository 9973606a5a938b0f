"""An adapter through the real pipeline: measured on each variant, released, served, exchanged and rolled back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import openai
import pytest

from stages.parts.base.store import ModelStore
from stages.parts.endpoint.clients import Client, add
from stages.parts.endpoint.endpoint import endpoint
from stages.parts.model.adapter import WEIGHTS
from stages.parts.records.acquired import read_intact
from stages.parts.records.evaluation import Evaluation
from stages.parts.releases.release import current_release
from tests.adapters import train, untrained, write
from tests.demo import DEMO, MODEL
from tests.end_to_end.command_line import API_KEY, CONFIG, TOKEN, Pipeline, processes_naming
from tests.hub.server import HubServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ADAPTER: Final = "slipway/support"
PROMPT: Final = "Dear customer, the lamp"
LEARNED: Final = (" is in the second drawer, under the maps.", " was sold on a Friday to three tall sailors.")
"""What the two versions of the adapter go on with."""
ROLLOUT: Final = {
    "steps": "[50,100]",
    "step_s": "5",
    "min_requests": "5",
    "ttft_slack_ms": "5000",
    "tpot_slack_ms": "500",
}
CHANGED: Final = {
    "optimize.variants": "[fp16, gptq, int8]",
    "optimize.allow_incomplete": "true",
    "workload.quality_limit": "20",
    "profile.task_loss": "0.9",  # what so few items can show; what the adapter forgot is little to lose
    "profile.constraints": "{}",
    "serving.extra_arguments": "[]",
    **{f"rollout.{name}": value for name, value in ROLLOUT.items()},
}
SETTINGS: Final = (*CONFIG, *(text for name, value in CHANGED.items() for text in ("--set", f"{name}={value}")))


@dataclass(frozen=True)
class Released:
    """A run that published an adapter, and what clients got after it."""

    release: str
    answers: dict[str, str]
    """To the same prompt, by model."""
    models: list[str]


def clients_see(store: ModelStore) -> Released:
    running = endpoint(store)
    assert running
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=API_KEY) as client:
        models = sorted(model.id for model in client.models.list())
        answers = {
            model: client.completions.create(model=model, prompt=PROMPT, max_tokens=12, temperature=0).choices[0].text
            for model in models
        }
    return Released(running.release, answers, models)


def run(pipeline: Pipeline, source: str = ADAPTER) -> Released:
    asked = ("--set", f"serving.adapters.support={source}", "--force-publish")  # a release has its own adapters
    ended = pipeline.call("run", MODEL, *SETTINGS, *asked, "--json")
    assert ended.returncode == 0, ended.stderr
    return clients_see(pipeline.store)


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.tokens[TOKEN] = {MODEL, ADAPTER}
        server.add_repo(MODEL, DEMO / "model")
        yield server


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, hub: HubServer) -> Iterator[Pipeline]:
    made = Pipeline(tmp_path_factory.mktemp("store"), hub)
    yield made
    made.call("serve", MODEL, "--stop")
    assert processes_naming(str(made.root)) == []


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The two versions of the adapter."""
    folders = [tmp_path_factory.mktemp("adapter") / f"{number}" for number in range(len(LEARNED))]
    for folder, text in zip(folders, LEARNED, strict=True):
        losses = train(DEMO / "model", folder, PROMPT + text, named=MODEL)
        assert losses[-1] < 0.1 < losses[0]
    return folders


@pytest.fixture(scope="module")
def first(adapted: Pipeline, hub: HubServer, versions: list[Path]) -> Released:
    hub.add_repo(ADAPTER, versions[0])
    return run(adapted)


@pytest.fixture(scope="module")
def second(adapted: Pipeline, hub: HubServer, versions: list[Path], first: Released) -> Released:
    hub.add_repo(ADAPTER, versions[1])
    return run(adapted)


@pytest.fixture(scope="module")
def back(adapted: Pipeline, second: Released) -> Released:
    ended = adapted.call("rollback", MODEL, *SETTINGS)
    assert ended.returncode == 0, ended.stderr
    return clients_see(adapted.store)


def test_an_adapter_is_served_beside_the_model_under_its_own_name(first: Released) -> None:
    assert first.models == sorted([MODEL, "support"])
    assert LEARNED[0].startswith(first.answers["support"].rstrip())
    assert len(first.answers["support"]) > len(LEARNED[0]) // 2
    assert first.answers[MODEL] != first.answers["support"]


def test_every_variant_was_asked_with_the_adapter(adapted: Pipeline, first: Released) -> None:
    for name in ("fp16", "gptq"):
        evaluation = Evaluation.read(adapted.store.evaluation(name))
        assert evaluation
        scores = {score.task: score for score in evaluation.quality}
        assert scores.keys() == {
            f"{task}{of}" for task in ("demo_continuation", "demo_perplexity") for of in ("", "@support")
        }
        # It was taught one sentence for so long that it forgot the rest.
        assert scores["demo_perplexity@support"].value > scores["demo_perplexity"].value
        assert evaluation.adapters == {"support": read_intact(adapted.store.adapter("support")).digest}


def test_a_client_of_the_model_alone_may_not_ask_the_adapter(adapted: Pipeline, first: Released) -> None:
    key = add(adapted.root, Client(name="search", key_sha256="", models=(MODEL,)))
    running = endpoint(adapted.store)
    assert running
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=key) as client:
        assert client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1).usage
        with pytest.raises(openai.PermissionDeniedError, match="search may not ask support"):
            client.completions.create(model="support", prompt=PROMPT, max_tokens=1)
    adapted.call("clients", "rm", "search")


def test_usage_is_under_the_adapter_s_own_name(adapted: Pipeline, first: Released) -> None:
    rows = json.loads(adapted.call("usage", "--by", "model", "--json").stdout)
    by_model: dict[str, Any] = {row["model"]: row for row in rows}
    assert by_model["support"]["output_tokens"] >= 12
    assert by_model[MODEL]["output_tokens"] >= 12


def test_another_version_of_the_adapter_is_another_release(
    adapted: Pipeline, first: Released, second: Released
) -> None:
    assert second.release != first.release
    assert LEARNED[1].startswith(second.answers["support"].rstrip())
    assert second.answers[MODEL] == first.answers[MODEL] or second.release.split("-")[1] != first.release.split("-")[1]
    assert current_release(adapted.store) == second.release


def test_a_rollback_brings_the_earlier_adapter_back(
    adapted: Pipeline, first: Released, second: Released, back: Released, versions: list[Path]
) -> None:
    assert back.release == first.release
    assert back.answers == first.answers
    kept = adapted.store.releases / back.release / "adapters" / "support" / WEIGHTS
    assert kept.read_bytes() == (versions[0] / WEIGHTS).read_bytes()


def test_the_decision_with_its_adapter_is_verified(adapted: Pipeline, back: Released) -> None:
    ended = adapted.call("verify-decision")
    assert ended.returncode == 0, ended.stderr


def test_an_adapter_of_another_base_changes_nothing_that_is_served(
    adapted: Pipeline, back: Released, tmp_path: Path
) -> None:
    other = write(tmp_path / "other", untrained(128, 128), base_model_name_or_path="org/other")
    ended = adapted.call("run", MODEL, *SETTINGS, "--set", f"serving.adapters.support={other}")
    assert ended.returncode == 13
    assert f"the adapter {other} was made for another base than {MODEL}" in ended.stderr
    assert "its adapter_config.json names org/other" in ended.stderr
    assert clients_see(adapted.store) == back
