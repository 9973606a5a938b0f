"""``slipway trigger``: from a registry's webhook to a run, here and on a cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from pipeline.settings.config import load
from pipeline.workflow.definition import workflow_template
from stages.parts.records.acquired import ACQUIRED, Acquired
from tests.hub import HubServer
from tests.hub.models import tiny_model
from tests.kubernetes import KubernetesServer
from tests.pipeline.events.receiving import (
    COMMIT,
    PUSH,
    WEBHOOKS,
    changed,
    environment,
    normalized,
    push,
    written,
)

Trigger = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def server() -> Iterator[KubernetesServer]:
    with KubernetesServer() as server:
        template = workflow_template(load(chosen={"platform": "cluster"}))
        template["metadata"]["namespace"] = "default"
        server.put(template)
        yield server


@pytest.fixture
def trigger(tmp_path: Path) -> Trigger:
    def run(payload: object, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pipeline", "trigger", "--payload", str(written(tmp_path, payload)), *arguments],
            env=environment(SLIPWAY_STORE=str(tmp_path / "store")) | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    return run


@pytest.fixture
def argo(server: KubernetesServer, trigger: Trigger, tmp_path: Path) -> Trigger:
    """The same, on a cluster."""
    kubeconfig = str(server.kubeconfig(tmp_path / "kubeconfig"))
    there = ("--engine", "argo", "--namespace", "default", "--no-follow")
    return lambda payload, *arguments: trigger(payload, *there, *arguments, KUBECONFIG=kubeconfig)


def given(workflow: dict[str, object]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in workflow["spec"]["arguments"]["parameters"]}  # type: ignore[index]


@pytest.mark.parametrize("provider", WEBHOOKS)
def test_a_push_becomes_a_workflow(server: KubernetesServer, argo: Trigger, provider: str):
    ended = argo(WEBHOOKS[provider], "--provider", provider)
    assert ended.returncode == 0, ended.stderr
    (workflow,) = server.all("Workflow")
    assert ended.stdout.strip() == workflow["metadata"]["name"] == normalized(provider)["name"]
    assert workflow["metadata"]["labels"]["slipway/trigger"] == provider
    assert (given(workflow)["model"], given(workflow)["revision"]) == ("some-user/some-repo", COMMIT)
    assert server.mistakes == []


def test_a_commit_is_started_once_on_a_cluster_whichever_provider_reports_it(server: KubernetesServer, argo: Trigger):
    assert argo(PUSH).returncode == 0
    for provider, event in WEBHOOKS.items():
        again = argo(event, "--provider", provider)
        assert again.returncode == 52
        assert "was started before: slipway-push-" in again.stderr
        assert "slipway retry slipway-push-" in again.stderr
    assert len(server.all("Workflow")) == 1


def test_a_lost_answer_starts_no_second_run(server: KubernetesServer, argo: Trigger):
    server.lose_answer("create", "*/workflows")
    ended = argo(PUSH)
    assert ended.returncode == 0, ended.stderr
    assert len(server.all("Workflow")) == 1


def test_without_the_template_and_with_settings_that_it_does_not_take_nothing_is_started(
    server: KubernetesServer, argo: Trigger
):
    settings = argo(PUSH, "--profile", "chatbot")
    assert settings.returncode == 2
    assert "the settings of the installed template" in settings.stderr
    server.remove("WorkflowTemplate", "slipway")
    missing = argo(PUSH)
    assert missing.returncode == 61
    assert "slipway install" in missing.stderr
    assert server.all("Workflow") == []


def test_a_push_becomes_a_run_of_the_commit_here(trigger: Trigger, tmp_path: Path):
    with HubServer() as hub:
        pushed = hub.add_repo("some-user/some-repo", tiny_model())
        later = hub.add_repo("some-user/some-repo", tiny_model(**{"README.md": b"newer"}))
        assert pushed != later
        options = ["optimize.variants=[fp16]", "workload.tasks_path=/nowhere", "serving.port=0"]
        ended = trigger(
            push(commit=pushed), *(part for each in options for part in ("--set", each)), HF_ENDPOINT=hub.url
        )
    assert "some-user/some-repo was pushed at" in ended.stderr
    assert ended.returncode != 0  # its check refuses a folder that is not there
    (run,) = (tmp_path / "store").glob("*/runs/*")
    kept = json.loads((run / "workflow.json").read_text())["arguments"]
    assert (kept["model"], kept["revision"], kept["serve"]) == ("some-user/some-repo", pushed, "true")
    base = tmp_path / "store" / "some-user--some-repo" / "base"
    assert Acquired.read(base / ACQUIRED).commit == pushed


def test_a_dry_run_shows_the_workflow_and_starts_nothing(trigger: Trigger, tmp_path: Path):
    ended = trigger(PUSH, "--dry-run")
    assert ended.returncode == 0, ended.stderr
    workflow = yaml.safe_load(ended.stdout)
    assert given(workflow)["model-directory"] == "some-user--some-repo"
    assert json.loads(trigger(PUSH, "--dry-run", "--json").stdout) == workflow
    assert not (tmp_path / "store").exists()


def test_an_event_that_starts_no_run_is_explained_and_ends_with_52(server: KubernetesServer, argo: Trigger):
    refused = argo(changed(PUSH, {"repo.type": "dataset"}))
    assert refused.returncode == 52
    assert "error: repo.type is 'dataset', not 'model'" in refused.stderr
    as_json = argo(changed(PUSH, {"event.scope": "discussion"}), "--json")
    assert json.loads(as_json.stdout)["exit_code"] == 52
    assert server.all("Workflow") == []


def test_a_payload_comes_from_standard_input_and_has_to_be_json(tmp_path: Path):
    command = [sys.executable, "-m", "pipeline", "trigger", "--dry-run", "--payload", "-"]
    for text, code in ((json.dumps(PUSH), 0), ("{", 2)):
        ended = subprocess.run(command, input=text, env=environment(), capture_output=True, text=True, check=False)
        assert ended.returncode == code, ended.stderr
    missing = [*command[:-1], str(tmp_path / "nowhere.json")]
    ended = subprocess.run(missing, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "cannot read" in ended.stderr


@pytest.mark.parametrize("command", ["trigger", "receive"])
def test_the_commands_have_help_with_an_example(command: str):
    ended = subprocess.run(
        [sys.executable, "-m", "pipeline", command, "--help"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0
    assert f"Example: slipway {command}" in " ".join(ended.stdout.split())
