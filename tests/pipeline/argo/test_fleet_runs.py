"""A fleet file on a cluster: real commands, the runs that they submit, and what is known of them later."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.argo.template import LAST
from pipeline.cluster import store_commands
from pipeline.cluster.manifests import documents_of
from stages.parts.base.program import PRINTED
from tests.hub.models import tiny_model
from tests.hub.server import HubServer
from tests.kubernetes import Outcome
from tests.kubernetes.access import may

FLEET = """
defaults: {owner: platform}
models:
  - {model: org/chat, owner: team-chat, profile: chatbot, serving: {port: 8001}}
  - {model: org/code, owner: team-code, profile: quality, serving: {port: 8002}, schedule: nightly}
  - {model: org/search, serving: {port: 8003}, rollout: {approval: true}}
"""
NAMES = ("org/chat", "org/code", "org/search")
Apply = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def models(hub: HubServer) -> HubServer:
    for name in NAMES:
        hub.add_repo(name, tiny_model())
    return hub


@pytest.fixture
def slipway_here(argo, slipway, models: HubServer) -> Apply:
    there = {"HF_ENDPOINT": models.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return lambda *words: slipway(*words, "--engine", "argo", **there)


@pytest.fixture
def apply(slipway_here: Apply, tmp_path: Path) -> Apply:
    def apply(text: str, *words: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "fleet.yaml").write_text(text)
        return slipway_here("apply", str(tmp_path / "fleet.yaml"), *words)

    return apply


def given(workflow: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in workflow["spec"]["arguments"]["parameters"]}


def submitted(argo: Any) -> list[str]:
    return sorted(given(each)["model"] for each in argo.server.all("Workflow"))


def test_three_models_of_three_owners_are_run_by_one_apply_each_with_its_own_settings(
    argo, apply: Apply, models
) -> None:
    ended = apply(FLEET)
    assert ended.returncode == 0, ended.stderr
    runs = {given(each)["model"]: given(each) for each in argo.server.all("Workflow")}
    assert sorted(runs) == [*NAMES]
    assert [json.loads(runs[name]["profile"])["name"] for name in NAMES] == ["chatbot", "quality", "balanced"]
    assert [runs[name]["approval"] for name in NAMES] == ["false", "false", "true"]
    assert runs["org/chat"]["revision"] == models.add_repo("org/chat", tiny_model())
    assert "org/code (team-code): runs: it was not run yet" in ended.stderr
    assert argo.server.mistakes == []


def test_what_is_in_force_is_not_run_again_and_a_change_of_one_profile_runs_one_model(argo, apply: Apply) -> None:
    assert apply(FLEET).returncode == 0
    again = apply(FLEET)
    assert "nothing to do: what " in again.stdout, again.stderr
    assert len(argo.server.all("Workflow")) == 3
    changed = FLEET.replace("profile: quality", "profile: batch")
    shown = apply(changed, "--dry-run")
    assert "would run: its settings are not those of run slipway-" in shown.stdout
    assert '  - profile.name: "quality"\n  + profile.name: "batch"\n' in shown.stdout
    assert len(argo.server.all("Workflow")) == 3
    assert apply(changed).returncode == 0
    assert submitted(argo) == sorted([*NAMES, "org/code"])


def test_a_poll_runs_the_model_with_a_new_commit_and_the_night_what_is_scheduled(argo, apply: Apply, models) -> None:
    assert apply(FLEET).returncode == 0
    newer = models.add_repo("org/chat", tiny_model(**{"README.md": b"newer"}))
    polled = json.loads(apply(FLEET, "--json").stdout)
    assert [each["model"] for each in polled if each["starts"]] == ["org/chat"]
    assert [given(each)["revision"] for each in argo.server.all("Workflow")].count(newer) == 1
    night = json.loads(apply(FLEET, "--nightly", "--json").stdout)
    assert [(each["model"], each["reason"]) for each in night if each["starts"]] == [
        ("org/code", "its schedule is nightly")
    ]


def test_a_push_runs_one_model_with_its_own_settings_once(argo, apply: Apply, models) -> None:
    pushed = models.add_repo("org/code", tiny_model(**{"README.md": b"pushed"}))
    words = ("--model", "org/code", "--commit", pushed)
    assert apply(FLEET, *words).returncode == 0
    (workflow,) = argo.server.all("Workflow")
    run = given(workflow)
    assert (run["model"], run["revision"], json.loads(run["profile"])["name"]) == ("org/code", pushed, "quality")
    assert "nothing to do" in apply(FLEET, *words).stdout
    foreign = apply(FLEET, "--model", "org/other", "--commit", pushed)
    assert (foreign.returncode, len(argo.server.all("Workflow"))) == (52, 1)


def test_the_last_run_of_each_model_is_kept_and_those_before_it_expire(argo, apply: Apply) -> None:
    assert apply(FLEET).returncode == 0
    assert apply(FLEET.replace("profile: quality", "profile: batch")).returncode == 0
    kept = [given(each)["model"] for each in argo.server.all("Workflow") if each["spec"].get("ttlStrategy") == LAST]
    assert (sorted(kept), len(argo.server.all("Workflow"))) == ([*NAMES], 4)
    (former,) = [each for each in argo.server.all("Workflow") if "ttlStrategy" not in each["spec"]]
    assert json.loads(given(former)["profile"])["name"] == "quality"


def test_a_model_that_can_not_be_run_does_not_keep_the_others(argo, apply: Apply) -> None:
    ended = apply(FLEET.replace("org/chat", "org/none"))
    assert ended.returncode == 10
    assert "org/none (team-chat): " in ended.stderr
    assert submitted(argo) == ["org/code", "org/search"]


def test_a_mistake_starts_nothing(argo, apply: Apply) -> None:
    ended = apply(FLEET.replace("port: 8003", "port: http"))
    assert ended.returncode == 0, "an address does not count on a cluster"
    before = len(argo.server.all("Workflow"))
    ended = apply(FLEET.replace("owner: team-chat", "ownr: team-chat"))
    assert (ended.returncode, len(argo.server.all("Workflow"))) == (2, before)
    assert "org/chat: ownr: unknown field" in ended.stderr
    alone = apply(FLEET, "--commit", "c" * 40)
    assert (alone.returncode, len(argo.server.all("Workflow"))) == (2, before)


def test_a_model_that_left_the_file_goes_on_serving_and_the_command_that_ends_it_is_said(argo, apply: Apply) -> None:
    served = {"name": "org-old-123456", "namespace": "default", "annotations": {"slipway/model": "org/old"}}
    labels = {"app.kubernetes.io/part-of": "slipway", "slipway/endpoint": "org-old-123456"}
    service = {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "spec": {"predictor": {}}}
    argo.server.put(service | {"metadata": served | {"labels": labels}})
    ended = apply(FLEET, "--dry-run")
    assert "org/old is not in " in ended.stdout, ended.stderr
    assert "kubectl -n default delete inferenceservices org-old-123456" in ended.stdout


def test_the_teams_page_has_what_pods_read_and_what_workflows_say(argo, apply, slipway_here, config, tmp_path) -> None:
    for each in store_commands.of(config):
        argo.server.put(each)
    row = {"model": "org/chat", "release": "0001-int8-0123456789ab", "health": "up", "servers": 2, "up": 2}
    argo.script["command"] = [Outcome(outputs={PRINTED: json.dumps([row])})]
    assert apply(FLEET).returncode == 0
    ended = slipway_here("models", str(tmp_path / "fleet.yaml"), "--page", str(tmp_path / "models.html"), "--json")
    assert ended.returncode == 0, ended.stderr
    rows = {each["model"]: each for each in json.loads(ended.stdout)}
    assert [rows[name]["owner"] for name in NAMES] == ["team-chat", "team-code", "platform"]
    assert (rows["org/chat"]["release"], rows["org/chat"]["up"]) == ("0001-int8-0123456789ab", 2)
    assert all(rows[name]["run"].startswith("slipway-") for name in NAMES)
    assert rows["org/chat"]["page"] == f"https://argo.example/workflows/default/{rows['org/chat']['run']}"
    assert f'<a href="{rows["org/chat"]["page"]}">org/chat</a>' in (tmp_path / "models.html").read_text()


def test_the_pod_that_applies_the_file_may_do_all_that_it_needs(argo, apply: Apply, config) -> None:
    """It has the rights of slipway-submitter: what else is asked of the cluster is refused, and not missed."""
    for each in documents_of(config):
        if each["kind"] in ("Role", "RoleBinding") and each["metadata"]["namespace"] == "default":
            argo.server.put(each)
    for pattern in (
        "*/apis/serving.kserve.io/*/namespaces/*",
        "*/apis/apiextensions.k8s.io/*",
        "*/namespaces/kserve/*",
    ):
        for verb in ("get", "list"):
            argo.server.fail(verb, pattern, 403, times=None)
    unset = ("--model=", "--commit=")  # as the template does where nothing was pushed
    assert apply(FLEET, *unset).returncode == 0
    assert "nothing to do" in apply(FLEET, *unset).stdout
    assert len(argo.server.all("Workflow")) == 3
    answered = {(each.verb, each.path) for each in argo.server.requests if each.status < 400}
    for verb, path in answered:
        if found := re.fullmatch(r"/apis?/(?:([a-z.]+)/)?\w+/namespaces/default/(\w+)(?:/(.+))?", path):
            group, resource, name = found.groups(default="")
            asks = {"group": group, "resource": resource, "name": name, "verb": verb, "namespace": "default"}
            assert may(argo.server, "system:serviceaccount:default:slipway-submitter", asks), (verb, path)
    assert "create" in {verb for verb, _ in answered}
