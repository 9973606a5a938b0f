"""The command line against a cluster: real processes, exit codes, what stands on stdout and stderr."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.kubernetes import KubernetesServer, Outcome
from tests.pipeline.argo.argo_bench import environment_of


def test_a_run_is_followed_shown_listed_and_its_logs_and_report_read(argo, slipway):
    selected = {"winner": "awq", "promotion": "promoted", "reason": "awq is best", "release": "1-awq"}
    argo.script["select"] = [Outcome(outputs=selected)]
    ended = slipway("run", "org/name", "--engine", "argo", "--json")
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    run = document["run"]
    assert document["phase"] == "Succeeded"
    assert document["winner"] == "awq"
    assert document["link"] == f"https://argo.example/workflows/default/{run}"
    assert f"submitted {run}" in ended.stderr
    assert document["link"] in ended.stderr
    assert re.search(r"acquire +Succeeded", ended.stderr)

    assert [each["name"] for each in json.loads(slipway("runs", "--engine", "argo", "--json").stdout)] == [run]
    assert re.search(rf"{run} +org/name +Succeeded +awq", slipway("runs", "--engine", "argo").stdout)
    shown = slipway("show", run)
    assert re.search(r"select +Succeeded", shown.stdout)
    assert "awq is best" in shown.stdout
    assert "acquire(0) works" in slipway("logs", run, "acquire").stdout
    assert json.loads(slipway("report", run, "--json").stdout)["reason"] == "awq is best"
    assert "has ended already" in slipway("stop", run).stdout
    assert argo.server.mistakes == []


def test_a_failed_stage_ends_with_its_exit_code_message_and_hint(argo, slipway):
    argo.script["acquire"] = [Outcome.failed(12, "org/name is gated", "ask for access")]
    ended = slipway("run", "org/name", "--engine", "argo")
    assert ended.returncode == 12
    assert "error: acquire: org/name is gated" in ended.stderr
    assert re.search(r"hint: ask for access; slipway logs \S+ acquire --namespace default", ended.stderr)
    assert "Traceback" not in ended.stderr


def test_what_fails_within_a_task_ends_the_command_with_its_exit_code(argo, slipway):
    argo.script["commit"] = [Outcome.failed(10, "org/name is not on the Hub", "check the name")]
    ended = slipway("run", "org/name", "--engine", "argo")
    assert ended.returncode == 10
    assert "error: resolve: org/name is not on the Hub" in ended.stderr
    assert re.search(r"hint: check the name; slipway logs \S+ resolve --namespace default", ended.stderr)


def test_a_run_that_is_not_followed_is_stopped_and_retried(argo, slipway):
    argo.script["acquire"] = [Outcome(until=threading.Event()), Outcome()]
    submitted = slipway("run", "org/name", "--engine", "argo", "--no-follow")
    run = submitted.stdout.strip()
    again = slipway("run", "org/name", "--engine", "argo", "--no-follow")
    assert again.stdout.strip() == run
    assert "active already" in again.stderr
    assert slipway("stop", run).stdout.strip() == f"stopped {run}"
    retried = slipway("retry", run, "--json")
    assert retried.returncode == 0, retried.stderr
    assert json.loads(retried.stdout)["run"] != run


def test_ctrl_c_ends_the_command_but_not_the_run(argo, config, tmp_path: Path):
    argo.script["acquire"] = [Outcome(until=threading.Event())]
    command = [sys.executable, "-m", "pipeline", "run", "org/name", "--engine", "argo"]
    process = subprocess.Popen(
        command, env=environment_of(argo.server, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if re.search(r"acquire +Running", line):
            break
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "continues in the cluster" in said
    (workflow,) = argo.server.all("Workflow")
    assert workflow["status"]["phase"] == "Running"


@pytest.mark.slow
def test_a_local_directory_and_a_local_platform_are_refused(installed, slipway):
    ended = slipway("run", "./my-model", "--engine", "argo")
    assert ended.returncode == 2
    assert "which the cluster can't read" in ended.stderr
    ended = slipway("run", "org/name", "--engine", "argo", "--platform", "local")
    assert ended.returncode == 2
    assert "is one machine, not a cluster" in ended.stderr
    assert installed.all("Workflow") == []


@pytest.mark.slow
def test_a_template_with_other_tasks_is_refused_and_one_with_other_details_is_reported(argo, slipway):
    fewer = slipway("run", "org/name", "--engine", "argo", "--set", "rollout.steps=[100]")
    assert fewer.returncode == 61
    assert "has other tasks than this configuration" in fewer.stderr
    assert argo.server.all("Workflow") == []
    other = ("--set", "optimize.variants=[fp16, int8]", "--set", "workload.protocol=thorough")
    assert slipway("run", "org/name", "--engine", "argo", "--no-follow", *other).returncode == 0
    bigger = slipway("run", "org/name", "--engine", "argo", "--no-follow", "--set", "platform.retries.limit=7")
    assert bigger.returncode == 0, bigger.stderr
    assert "warning: the installed template is not what this configuration renders" in bigger.stderr


@pytest.mark.slow
def test_an_unknown_context_and_an_api_that_is_not_there_are_clear_errors(server: KubernetesServer, slipway):
    ended = slipway("run", "org/name", "--engine", "argo", "--context", "nowhere")
    assert ended.returncode == 2
    assert "nowhere" in ended.stderr
    server.stop()
    ended = slipway("runs", "--engine", "argo")
    assert ended.returncode == 75
    assert "does not answer" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_token_never_appears(argo, slipway):
    argo.server.token = "another-token-than-the-file"
    ended = slipway("run", "org/name", "--engine", "argo")
    assert ended.returncode == 0
    argo.server.token = "changed"
    refused = slipway("runs", "--engine", "argo", KUBECONFIG="/nonexistent")
    assert refused.returncode == 2
    assert "another-token" not in ended.stdout + ended.stderr + refused.stderr


@pytest.mark.parametrize("command", ["stop", "retry", "report", "install"])
def test_the_commands_have_help_with_an_example(slipway, command):
    ended = slipway(command, "--help")
    assert ended.returncode == 0
    assert f"Example: slipway {command}" in " ".join(ended.stdout.split())


def test_cluster_commands_import_neither_the_official_client_nor_hera(argo, slipway):
    for command in (("runs", "--engine", "argo"), ("show", "latest", "--engine", "argo")):
        ended = slipway(*command, PYTHONPROFILEIMPORTTIME="1")
        imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in ended.stderr.splitlines()}
        assert "pipeline" in imported
        assert not {"kubernetes", "hera", "requests"} & imported
