"""A Workflow's status as a run's state, from statuses as Argo writes them."""

from __future__ import annotations

import base64
import gzip
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.argo.status import ended, run_state

SPEC: dict[str, Any] = {
    "entrypoint": "main",
    "onExit": "report",
    "templates": [
        {
            "name": "main",
            "dag": {
                "tasks": [
                    {"name": "last", "template": "inner", "depends": "first.Succeeded"},
                    {"name": "first", "template": "work"},
                ]
            },
        },
        {"name": "inner", "dag": {"tasks": [{"name": "part", "template": "work"}]}},
        {"name": "work", "container": {"image": "one"}},
        {"name": "report", "container": {"image": "one"}},
    ],
}


def workflow(*nodes: dict[str, Any], **status: Any) -> dict[str, Any]:
    by_id = {each["id"]: each for each in nodes}
    return {
        "metadata": {"name": "run", "namespace": "default"},
        "spec": {
            "workflowTemplateRef": {"name": "slipway"},
            "arguments": {"parameters": [{"name": "a", "value": "1"}]},
        },
        "status": {"storedWorkflowTemplateSpec": SPEC, "nodes": by_id, "phase": "Running"} | status,
    }


def node(path: str, phase: str, type_: str = "Pod", **more: Any) -> dict[str, Any]:
    name = f"run.{path}" if path else "run"
    return {"id": f"id-{path}", "name": name, "displayName": path, "type": type_, "phase": phase} | more


def test_a_workflow_that_the_controller_has_not_seen_is_pending():
    new = {"metadata": {"name": "run"}, "spec": {"workflowTemplateRef": {"name": "slipway"}}}
    state = run_state(new)
    assert (state.phase, state.nodes, state.started_at) == ("Pending", [], None)
    assert not ended(new)


def test_the_live_view_shows_a_run_whose_tasks_are_not_known_yet():
    from rich.console import Console

    from pipeline.runs.progress import Tree

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    queued = run_state({"metadata": {"name": "run"}, "spec": {}, "status": {"message": "waiting for a lock"}})
    tree = Tree(console, Path("run"))
    tree.changed(queued)
    tree.finished(queued)
    assert "waiting for a lock" in screen.getvalue()


def test_the_live_view_shows_a_task_that_has_changed_while_the_run_has_not():
    from rich.console import Console

    from pipeline.runs.progress import Tree

    screen = io.StringIO()
    tree = Tree(Console(file=screen, force_terminal=True, width=100), Path("run"))
    tree.changed(run_state(workflow()))
    later = run_state(workflow(node("first", "Running")))
    tree.changed(later)
    deadline = time.monotonic() + 10
    while "▶" not in screen.getvalue() and time.monotonic() < deadline:
        time.sleep(0.05)
    shown = screen.getvalue()
    tree.finished(later)
    assert "▶" in shown


def test_tasks_stand_in_dag_order_with_the_exit_handler_last_before_they_start():
    state = run_state(workflow())
    assert [(each.name, each.phase) for each in state.nodes] == [
        ("first", "Pending"),
        ("last", "Pending"),
        ("onExit", "Pending"),
    ]
    assert state.arguments == {"a": "1"}


def test_a_compressed_status_is_read_too():
    plain = workflow(node("first", "Succeeded"))
    packed = base64.b64encode(gzip.compress(json.dumps(plain["status"]["nodes"]).encode())).decode()
    state = run_state(workflow(compressedNodes=packed, nodes={}))
    assert state.node("first").phase == "Succeeded"


def test_nodes_within_a_task_follow_it():
    state = run_state(
        workflow(
            node("", "Running", "DAG"),
            node("last", "Running", "DAG", boundaryID="id-"),
            node("last.part", "Running", boundaryID="id-last", templateName="work"),
        )
    )
    assert [(each.name, each.kind, each.parent) for each in state.nodes][1:3] == [
        ("last", "DAG", ""),
        ("last.part", "Pod", "last"),
    ]


@pytest.mark.parametrize(
    ("said", "message", "hint"),
    [
        ('Error (exit code 12): {"message":"gated","hint":"ask","exit_code":12}', "gated", "ask"),
        ('main: Error (exit code 12): {"message":"a\\n    b","exit_code":12}\n', "a\n    b", ""),
        ('Error (exit code 12): {"message":"gated","hint":"ask","exit_code":12,"newer":1}', "gated", "ask"),
        ('Error (exit code 137): {"message":"x","exit_code":12}',) * 2 + ("",),
        ('Error (exit code 12): {"message":"cut',) * 2 + ("",),
        ("Error (exit code 1)", "Error (exit code 1)", ""),
        ("The node was low on resource: memory.", "The node was low on resource: memory.", ""),
    ],
)
def test_a_stages_own_error_is_extracted_from_argos_message(said, message, hint):
    tried = node("first(0)", "Failed", message=said, outputs={"exitCode": "12"}, nodeFlag={"retried": True})
    retry = node("first", "Failed", "Retry", message="No more retries left", children=["id-first(0)"])
    state = run_state(workflow(retry, tried, phase="Failed"))
    first = state.node("first")
    assert (first.message, first.hint, first.exit_code, first.attempts) == (message, hint, 12, 1)
    assert state.culprit == "first"
    assert [each.name for each in state.nodes] == ["first", "last", "onExit"]


def test_a_terminated_run_has_no_exit_handler_and_no_exit_code():
    stopped = node("first", "Failed", message="workflow shutdown with strategy:  Terminate")
    state = run_state(workflow(stopped, phase="Failed", message="Stopped with strategy 'Terminate'"))
    assert state.node("onExit").phase == "Omitted"
    assert state.node("first").exit_code is None


def retrying(*nodes: dict[str, Any], **status: Any) -> dict[str, Any]:
    """A workflow whose task ``first`` is retried after 75."""
    made = workflow(*nodes, **status)
    strategy = {"limit": "3", "expression": "lastRetry.exitCode == '75' || lastRetry.message matches '[Ee]vict'"}
    templates = [each | ({"retryStrategy": strategy} if each["name"] == "work" else {}) for each in SPEC["templates"]]
    made["status"]["storedWorkflowTemplateSpec"] = SPEC | {"templates": templates}
    return made


@pytest.mark.parametrize(
    ("said", "exit_code", "phase", "message"),
    [
        ('Error (exit code 12): {"message":"gated","hint":"ask","exit_code":12}', "12", "Failed", "gated"),
        (
            'Error (exit code 75): {"message":"busy","hint":"","exit_code":75}',
            "75",
            "Running",
            "Backoff for 30 seconds: busy",
        ),
        ("The pod was Evicted", None, "Running", "Backoff for 30 seconds: The pod was Evicted"),
    ],
)
def test_a_failure_that_nothing_follows_is_shown_before_argo_has_waited(said, exit_code, phase, message):
    ended: dict[str, Any] = {"outputs": {"exitCode": exit_code}} if exit_code else {}
    tried = node("first(0)", "Failed", message=said, finishedAt="2026-11-22T10:00:09Z", **ended)
    retry = node("first", "Running", "Retry", message="Backoff for 30 seconds", children=["id-first(0)"])
    first = run_state(retrying(retry, tried)).node("first")
    assert (first.phase, first.message) == (phase, message)
    assert (first.finished_at is None) == (phase == "Running")


def test_a_task_that_waited_for_a_lock_runs_once_its_pod_does_and_its_time_begins_then():
    pod = node("first(0)", "Running", startedAt="2026-11-22T10:08:00Z")
    retry = node("first", "Pending", "Retry", startedAt="2026-11-22T10:00:00Z", children=["id-first(0)"])
    first = run_state(workflow(retry, pod)).node("first")
    assert first.phase == "Running"
    assert first.started_at is not None
    assert first.started_at.minute == 8


def test_an_image_that_cannot_be_pulled_is_said_once():
    pulled = (
        'ErrImagePull: failed to pull and unpack image "localhost/x:1": failed to resolve reference: not found',
        'ImagePullBackOff: Back-off pulling image "localhost/x:1": ErrImagePull: failed to resolve reference',
    )
    shown = [run_state(workflow(node("first", "Pending", message=each))).node("first") for each in pulled]
    assert {each.message for each in shown} == {"the image localhost/x:1 can't be pulled"}
