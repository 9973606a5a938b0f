"""The end of a run on a cluster: what its Workflow shows afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.ending.shown import DESCRIPTION, TITLE, told
from stages.parts.base.program import RUN_VARIABLE
from stages.parts.base.store import STORE_VARIABLE
from tests.kubernetes import KubernetesServer

RUN = "slipway-0123456789-261123-1"
DECISION = {"winner": "int8", "outcome": "decided", "reason": "int8 is 1.2 times as fast as fp16"}
FAILED = {"stage": "acquire", "result": "failed", "reason": "org/name is gated"}


@pytest.fixture
def server() -> Iterator[KubernetesServer]:
    with KubernetesServer() as server:
        metadata = {"name": RUN, "namespace": "default", "annotations": {TITLE: "org/name"}}
        workflow = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": metadata}
        workflow["spec"] = {"workflowTemplateRef": {"name": "slipway"}}
        server.put(workflow)
        yield server


def ended(server: KubernetesServer, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "KUBECONFIG": str(server.kubeconfig(folder / "kubeconfig")),
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",  # as in every pod
        STORE_VARIABLE: str(folder / "store"),
        RUN_VARIABLE: RUN,
    }
    command = [sys.executable, "-m", "stages.ending", "--model", "org/name", "--status", "Failed"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_workflow_says_how_the_run_ended_and_where_the_report_is(server: KubernetesServer, tmp_path: Path) -> None:
    assert ended(server, tmp_path).returncode == 0
    shown = server.find("Workflow", RUN)["metadata"]["annotations"]
    assert shown[TITLE] == "org/name (failed)"
    assert f"`org--name/runs/{RUN}/report.html`" in shown[DESCRIPTION]
    assert (tmp_path / "store" / "org--name" / "runs" / RUN / "report.html").is_file()


def test_a_run_does_not_fail_because_its_workflow_may_not_be_changed(server: KubernetesServer, tmp_path: Path) -> None:
    server.fail("patch", "*/workflows/*", 403, times=None)
    said = ended(server, tmp_path)
    assert (said.returncode, "does not show what came of it" in said.stderr) == (0, True)


def test_the_title_names_the_winner_and_the_description_why() -> None:
    shown = told("org/name", "Succeeded", {"decision": DECISION, "outcomes": []}, "x/report.html")
    assert shown[TITLE] == "org/name → int8"
    assert shown[DESCRIPTION].startswith("**int8** (decided): int8 is 1.2 times as fast as fp16\n\n")
    kept = DECISION | {"standing": {"release": "1-awq", "relation": "worse"}}
    told_kept = told("org/name", "Succeeded", {"decision": kept, "outcomes": []}, "x/report.html")
    assert told_kept[TITLE] == f"{shown[TITLE]}, kept"
    failed = told("org/name", "Failed", {"decision": None, "outcomes": [FAILED]}, "x/report.html")
    assert failed[TITLE] == "org/name (failed)"
    assert failed[DESCRIPTION].startswith("**Failed**: acquire: org/name is gated\n\n")
