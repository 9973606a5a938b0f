"""Reads a Workflow's status as the state of a run, so that tables and progress are those of the local engine."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final, cast

from pipeline.argo.pending import explained
from pipeline.runs.expressions import holds, parse
from pipeline.runs.graph import Graph
from pipeline.runs.state import EXIT_NODE, FAILED, FINISHED, Kind, Node, Phase, RunPhase, RunState
from stages.parts.base.errors import ConfigError
from stages.parts.base.program import StageFailure
from stages.parts.cluster.kinds import Object

TERMINAL: Final = frozenset({"Succeeded", "Failed", "Error"})
HOLDERS: Final[dict[str, Kind]] = {
    "DAG": "DAG",
    "Steps": "DAG",
    "Suspend": "Suspend",
}
SUSPENDED: Final = "waits for an approval: in Argo's user interface, or with slipway resume"
OUT_OF_MEMORY: Final = "OOMKilled"
UNPULLED: Final = re.compile(r"^(?:ErrImagePull|ImagePullBackOff|InvalidImageName)\b.*?image \"([^\"]+)\"", re.DOTALL)
"""The kubelet's messages alternate while it tries; they differ in nothing that a person needs."""
CANT_BE_PULLED: Final = "can't be pulled"
TERMINATION_MESSAGE: Final = re.compile(r"\(exit code (?P<exit_code>\d+)\): (?P<document>\{.*\})", re.DOTALL)


def ended(workflow: Object) -> bool:
    """Whether the workflow has ended. One without a phase, which the controller has not seen yet, has not."""
    return workflow.get("status", {}).get("phase") in TERMINAL


def run_state(workflow: Object) -> RunState:
    """The state of a Workflow. Tasks that have not started are Pending, once the controller has read the template."""
    status, name = workflow.get("status", {}), str(workflow["metadata"]["name"])
    spec = spec_of(workflow)
    nodes = nodes_of(status)
    state = RunState(
        name=name,
        workflow=workflow["spec"].get("workflowTemplateRef", {}).get("name", name),
        phase=cast(RunPhase, status.get("phase") or "Pending"),
        message=status.get("message") or "",
        arguments=arguments_of(workflow) or arguments_of({"spec": spec}),
        nodes=[
            _node(task["name"], task["template"], nodes.get(f"{name}.{task['name']}"), nodes, _retried(spec, task))
            for task in tasks(spec)
        ],
        started_at=_time(status.get("startedAt")),
        finished_at=_time(status.get("finishedAt")),
    )
    if on_exit := spec.get("onExit"):
        node = _node(EXIT_NODE, on_exit, nodes.get(f"{name}.onExit"), nodes)
        if node.phase == "Pending" and state.phase in TERMINAL:
            node.phase, node.message = "Omitted", "the run was terminated"
        state.nodes.append(node)
    _add_inner(state, nodes)
    known = templates(workflow)
    for each in state.nodes:
        of_argo = nodes.get(f"{name}.{each.name}", {})
        each.message = explained(each.message, known.get(each.template, {}), of_argo)
    if state.phase in ("Failed", "Error"):
        state.culprit = _culprit(spec, state)
    return state


def spec_of(workflow: Object) -> Object:
    """What is run: the installed template's spec as it was when the controller read it."""
    return dict(workflow.get("status", {}).get("storedWorkflowTemplateSpec") or workflow["spec"])


def templates(workflow: Object) -> dict[str, Object]:
    return {each["name"]: each for each in spec_of(workflow).get("templates", [])}


def arguments_of(workflow: Object) -> dict[str, str]:
    parameters = workflow["spec"].get("arguments", {}).get("parameters", [])
    return {parameter["name"]: parameter["value"] for parameter in parameters if "value" in parameter}


def tasks(spec: Object) -> list[Object]:
    """The entrypoint's tasks in DAG order; empty while the controller has not read the template."""
    graph = _graph(spec)
    known = {each["name"]: each for each in _dag(spec).get("tasks", [])}
    return [known[name] for name in (graph.depends if graph else known)]


def nodes_of(status: Object) -> dict[str, Object]:
    """The nodes of a status, by name, such as ``slipway-1.resolve(0)``; also those that Argo compressed."""
    nodes = status.get("nodes") or {}
    if not nodes and status.get("compressedNodes"):
        nodes = json.loads(gzip.decompress(base64.b64decode(status["compressedNodes"])))
    return {node["name"]: node for node in nodes.values()}


def attempts(node: Object, nodes: Mapping[str, Object]) -> list[Object]:
    """The pod nodes of a task's attempts: the children of a Retry node, or the node itself."""
    if node["type"] != "Retry":
        return [node] if node["type"] == "Pod" else []
    by_id = {each["id"]: each for each in nodes.values()}
    return [by_id[child] for child in node.get("children", []) if child in by_id]


def outputs(state: RunState) -> dict[str, str]:
    """The results of the run: the outputs of select and serve."""
    found: dict[str, str] = {}
    for node in state.nodes:
        if node.name in ("select", "serve"):
            found |= node.outputs
    return found


def _node(name: str, template: str, node: Object | None, nodes: Mapping[str, Object], retried: str = "") -> Node:
    """The node of a task.

    Args:
        retried: the condition under which a failed attempt is followed by another one.
    """
    if node is None:
        return Node(name=name, template=template)
    tries = attempts(node, nodes)
    last = tries[-1] if tries else node
    code = (last.get("outputs") or {}).get("exitCode")
    phase = _phase(node, last, code, retried)
    message, hint = _said(last.get("message") or "")
    own = node.get("message") or "" if last is not node else ""
    if phase == "Succeeded":
        message, hint = "", ""
    elif phase not in FINISHED:  # a Retry node says that it waits; its last attempt says why
        message = ": ".join(filter(None, (own, message)))
    message = message or own or (_waiting(node) if node["type"] == "Suspend" and phase == "Running" else "")
    made = (node.get("outputs") or {}).get("parameters") or (last.get("outputs") or {}).get("parameters") or []
    return Node(
        name=name,
        template=template,
        kind=HOLDERS.get(node["type"], "Pod"),
        phase=phase,
        message=message,
        hint=hint,
        attempts=len(tries),
        exit_code=int(code) if code is not None and phase in FINISHED else None,
        cached=bool((node.get("memoizationStatus") or last.get("memoizationStatus") or {}).get("hit")),
        outputs={each["name"]: each["value"] for each in made if "value" in each},
        # A Retry node starts when it begins to wait for a lock.
        started_at=_time((tries[0] if tries else node).get("startedAt")) if phase != "Pending" else None,
        finished_at=_time(node.get("finishedAt") or (last.get("finishedAt") if phase in FINISHED else None)),
    )


def _waiting(node: Object) -> str:
    """That a Suspend node waits, after what it was told of."""
    given = {each["name"]: each.get("value", "") for each in (node.get("inputs") or {}).get("parameters", [])}
    return "; ".join(filter(None, (given.get("message", ""), SUSPENDED)))


def _phase(node: Object, last: Object, code: str | None, retried: str) -> Phase:
    """The phase of a task, of whose attempts *last* is the latest.

    Argo leaves the Retry node of a task that waited for a lock Pending while its pod runs, and after a failure that no
    attempt will follow it Running until the back-off is over.
    """
    own, latest = (cast(Phase, each.get("phase") or "Pending") for each in (node, last))
    if own == "Pending" and latest == "Running":
        return latest
    if own in FINISHED or latest not in FAILED or code is None or not retried:
        return own
    failure = {"lastRetry.exitCode": code, "lastRetry.status": latest, "lastRetry.message": last.get("message") or ""}
    with contextlib.suppress(ConfigError, KeyError):  # a template that is not ours
        return own if holds(parse(retried, "expression"), failure.__getitem__) else latest
    return own


def _retried(spec: Object, task: Object) -> str:
    template: Object = next((each for each in spec.get("templates", []) if each["name"] == task["template"]), {})
    return str((template.get("retryStrategy") or {}).get("expression") or "")


def _said(message: str) -> tuple[str, str]:
    """A stage's own error and hint, which Argo shows as JSON behind the exit code; else Argo's message."""
    found = TERMINATION_MESSAGE.search(message)
    if found and (failure := StageFailure.parse(found["document"], int(found["exit_code"]))):
        return failure.message, failure.hint
    if unpulled := UNPULLED.search(message):
        return f"the image {unpulled[1]} {CANT_BE_PULLED}", "check its name, and that the nodes may pull it"
    hint = (
        "give the stage more memory in the platform's file, then: slipway install" if OUT_OF_MEMORY in message else ""
    )
    return message.strip(), hint


def _add_inner(state: RunState, nodes: Mapping[str, Object]) -> None:
    """Add the nodes within tasks: those of nested templates and of fan-outs."""
    by_id = {each["id"]: each for each in nodes.values()}
    known = {node.name for node in state.nodes}
    for name, each in nodes.items():
        below = name.removeprefix(f"{state.name}.")
        skipped = below in known or name == state.name or each.get("nodeFlag", {}).get("retried")
        if skipped or below == EXIT_NODE or each["type"] == "StepGroup" or not name.startswith(f"{state.name}."):
            continue
        holder = by_id.get(each.get("boundaryID", ""), {}).get("name", state.name)
        node = _node(below, each.get("templateName", ""), each, nodes)
        node.parent = holder.removeprefix(f"{state.name}.") if holder != state.name else ""
        state.add(node)


def _culprit(spec: Object, state: RunState) -> str | None:
    graph = _graph(spec)
    own = {node.name: node.phase for node in state.nodes if node.phase in FINISHED}
    phases = {name: own[name] for name in (graph.depends if graph else {}) if name in own}
    found = graph.culprit(phases) if graph else None
    failed = (node.name for node in state.nodes if node.phase in ("Failed", "Error"))
    return found or next(failed, None)


def _dag(spec: Object) -> dict[str, Any]:
    entry: Object = next((each for each in spec.get("templates", []) if each["name"] == spec.get("entrypoint")), {})
    return dict(entry.get("dag") or {})


def _graph(spec: Object) -> Graph | None:
    with contextlib.suppress(ConfigError):  # a template that is not ours may use what Graph does not know
        return Graph.of({each["name"]: each.get("depends", "") for each in _dag(spec).get("tasks", [])})
    return None


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None


def changed(before: RunState | None, now: RunState) -> Iterator[Node]:
    """The nodes that have changed since *before*."""
    known = {node.name: _shown(node) for node in before.nodes} if before else {}
    for node in now.nodes:
        new = node.name not in known and (node.phase != "Pending" or node.message)
        if new or (node.name in known and known[node.name] != _shown(node)):
            yield node


def _shown(node: Node) -> tuple[Any, ...]:
    return node.phase, node.message, node.cached
