"""Commands that need the store's volume, asked for from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from pipeline.argo.template import call_in_pod
from pipeline.cluster import store_commands
from pipeline.settings.config import load
from pipeline.workflow.parameters import STORE_COMMAND, store_settings
from stages.parts.base.errors import NotInstalled
from stages.parts.base.program import PRINTED
from tests.kubernetes import Outcome

COMMAND_LINES = {
    ("releases", "org/name", "--history"): ["releases", "org/name", "--history"],
    ("rollback", "org/name", "--to", "3", "--json"): ["rollback", "org/name", "--to=3", "--json"],
    ("rollout", "status", "org/name"): ["rollout", "status", "org/name"],
    ("rollout", "promote", "org/name", "--set", "rollout.step_s=5"): ["rollout", "promote", "org/name"],
    ("store", "prune", "org/name", "--keep", "0"): ["store", "prune", "org/name", "--keep=0"],
    ("store", "prune", "--all", "--dry-run"): ["store", "prune", "--all", "--keep=3", "--dry-run"],
    ("store", "check"): ["store", "check"],
    ("drill", "all", "org/name", "--peak", "2.5", "--workload", "chat", "--short"): [
        *("drill", "all", "org/name", "--short", "--peak=2.5", "--workload=chat"),
    ],
    ("store", "du", "org/name"): ["store", "du", "org/name"],
    ("verify-decision", "latest"): ["verify-decision", "latest"],
}


@pytest.fixture
def commands(argo, config):
    for each in store_commands.of(config):
        argo.server.put(each)
    return argo


@pytest.mark.parametrize("words", COMMAND_LINES, ids=" ".join)
def test_a_command_runs_in_a_pod_with_the_words_and_the_settings_that_were_given(commands, slipway, words):
    commands.script["command"] = [Outcome(outputs={PRINTED: "what it says\n"})]
    ended = slipway(*words, "--engine", "argo")
    assert (ended.returncode, ended.stdout) == (0, "what it says\n"), ended.stderr
    (workflow,) = commands.server.all("Workflow")
    given = {each["name"]: each["value"] for each in workflow["spec"]["arguments"]["parameters"]}
    assert json.loads(given["arguments"]) == COMMAND_LINES[words]
    settings = json.loads(given["config"])
    assert settings["platform"]["namespace"] == "default"
    assert settings["rollout"]["step_s"] == (5 if "--set" in words else 60)
    assert commands.server.mistakes == []


def test_an_error_in_the_pod_is_the_commands_own(commands, slipway):
    commands.script["command"] = [Outcome.failed(42, "a rollout is under way", "abort it first")]
    ended = slipway("rollback", "org/name", "--engine", "argo")
    assert ended.returncode == 42
    assert "error: a rollout is under way\n" in ended.stderr
    assert "hint: abort it first" in ended.stderr
    assert ended.stdout == ""


def test_a_result_that_is_bad_news_is_printed_with_its_exit_code(commands, slipway):
    commands.script["command"] = [Outcome("Failed", 41, outputs={PRINTED: '{"verified": false}\n'})]
    ended = slipway("verify-decision", "--json", "--engine", "argo")
    assert (ended.returncode, json.loads(ended.stdout)) == (41, {"verified": False})


def test_a_rollback_is_not_tried_again_by_itself(commands, slipway):
    commands.script["command"] = [Outcome.failed(75, "the API does not answer"), Outcome()]
    assert slipway("rollback", "org/name", "--engine", "argo").returncode == 75
    assert len(commands.script["command"]) == 1


def test_a_command_whose_image_can_not_be_pulled_is_not_left_behind(commands, cluster, config, monkeypatch):
    monkeypatch.setattr("pipeline.argo.follow.UNPULLED_S", 0.3)
    commands.script["command"] = [Outcome(unpulled="localhost/x:1")]
    with pytest.raises(NotInstalled, match="localhost/x:1 can't be pulled"):
        call_in_pod(cluster, config, ["rollback", "org/name"])
    (workflow,) = commands.server.all("Workflow")
    assert workflow["spec"]["shutdown"] == "Terminate"


def test_without_the_template_it_says_what_to_install(argo, slipway):
    ended = slipway("releases", "org/name", "--engine", "argo")
    assert ended.returncode == 61
    assert f"the template {STORE_COMMAND} is not installed in namespace default" in ended.stderr
    assert "slipway install" in ended.stderr


def test_every_template_runs_a_command_that_there_is(tmp_path):
    """As its container would, on a store without releases."""
    settings = {"SLIPWAY_CONFIG": str(tmp_path / "config.yaml"), "SLIPWAY_STORE": str(tmp_path / "store")}
    local = load(chosen={"platform": "local"})
    kept, *templates = store_commands.of(load(chosen={"platform": "kind"}))
    assert yaml.safe_load(kept["data"]["config"])["platform"]["name"] == "kind"
    (tmp_path / "config.yaml").write_text(store_settings(local))
    given = {"model": "org/name", "to": "", "arguments": '["releases", "org/name"]'}
    for template in templates:
        container = template["spec"]["templates"][0]["container"]
        outputs = tmp_path / template["metadata"]["name"]
        outputs.mkdir()
        words = [*container["command"][1:], *(_filled(each, given) for each in container["args"])]
        environment = os.environ | settings | {"SLIPWAY_OUTPUTS": str(outputs)}
        ended = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
        said = outputs / PRINTED
        if "abort" in words or "releases" in "".join(words):
            assert ended.returncode == 0, ended.stderr
            assert said.read_text() == ended.stdout
            assert "org/name" in ended.stdout
        else:
            assert ended.returncode == 33, ended.stderr
            assert json.loads((outputs / "failure.json").read_text())["exit_code"] == 33
            assert not said.exists()


def _filled(text, given):
    return re.sub(r"\{\{workflow\.parameters\.(\w+)\}\}", lambda found: given[found[1]], text)
