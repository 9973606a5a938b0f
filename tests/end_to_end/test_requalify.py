"""A release under another version of vLLM, on two real ones: kept where its answers are spoiled, promoted where nothing
is worse, and rolled back with the version that it was measured on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import pytest

from stages.parts.endpoint.endpoint import endpoint
from stages.parts.machine.environment import engine_of
from stages.parts.records.rollout import read_journal
from stages.parts.releases.release import current_release
from stages.parts.vllm.client import http
from tests.demo import MODEL
from tests.end_to_end.command_line import CONFIG, Pipeline, processes_naming
from tests.hub.server import HubServer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
OTHER: Final = "0.31.0"
CHANGED: Final = (
    "optimize.variants=[fp16]",
    "serving.extra_arguments=[]",
    # Two servers on two shared cores differ by more than any margin that is worth having.
    "profile.weights={quality: 0.5, latency: 0, throughput: 0, memory: 0.5}",
    "profile.margins={quality: 0.1}",
    "workload.slo=null",
    "workload.concurrency=2",
    "workload.quality_limit=40",
    "workload.divergence_documents=2",
    "rollout.steps=[50, 100]",
    "rollout.step_s=5",
    "rollout.min_requests=5",
    "rollout.ttft_slack_ms=5000",
    "rollout.tpot_slack_ms=500",
)
SETTINGS: Final = (*CONFIG, *(text for each in CHANGED for text in ("--set", each)))
SPOILED: Final = '["--hf-overrides", "{\\"rms_norm_eps\\": 10.0}"]'


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, demo_hub: HubServer) -> Iterator[Pipeline]:
    made = Pipeline(tmp_path_factory.mktemp("store"), demo_hub)
    yield made
    made.call("serve", MODEL, "--stop")
    assert processes_naming(str(made.root)) == []


def ended(pipeline: Pipeline, *command: str) -> dict[str, Any]:
    done = pipeline.call(*command, *SETTINGS, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def verified(pipeline: Pipeline, found: dict[str, Any]) -> bool:
    return pipeline.call("verify-decision", found["run"]).returncode == 0


def serving_version(pipeline: Pipeline) -> str:
    """What the server says that answers for the release in production."""
    running = endpoint(pipeline.store)
    assert running
    server = running.server(running.release)
    assert server
    return str(http().get(f"{server.url}/version").raise_for_status().json()["version"]).partition("+")[0]


def test_a_release_is_requalified_for_another_engine_and_rolled_back_with_its_own(pipeline: Pipeline) -> None:
    here = engine_of().version("vllm").partition("+")[0]
    first = ended(pipeline, "run", MODEL)["decision"]
    assert first["engine"]["stack"]["vLLM"] == serving_version(pipeline) == here != OTHER

    found = ended(pipeline, "requalify", MODEL, "--set", f"engine.version={OTHER}")
    print(found["decision"]["reason"])
    decision = found["decision"]
    assert decision["standing"]["relation"] in ("better", "not worse")
    assert decision["recipe"]["engine_version"] == decision["engine"]["stack"]["vLLM"] == OTHER
    assert decision["engine"]["version"].partition("+")[0] == OTHER
    assert current_release(pipeline.store) == decision["release"] != first["release"]
    assert serving_version(pipeline) == OTHER
    journal = read_journal(pipeline.store)
    assert journal
    assert [step.percent for step in journal.observed] == [50], "both versions answered beside each other"
    assert verified(pipeline, found)  # the next run goes on with what was measured of the release

    back = pipeline.call("rollback", MODEL, *SETTINGS)
    assert back.returncode == 0, back.stderr
    assert current_release(pipeline.store) == first["release"]
    assert serving_version(pipeline) == here

    kept = ended(pipeline, "requalify", MODEL, "--set", f"engine.arguments={SPOILED}")
    print(kept["decision"]["reason"])
    assert kept["decision"]["winner"] == f"production+vllm-{here}"
    assert (kept["decision"]["standing"]["relation"], kept["decision"]["outcome"]) == ("worse", "decided")
    assert current_release(pipeline.store) == first["release"]
    assert verified(pipeline, kept)
