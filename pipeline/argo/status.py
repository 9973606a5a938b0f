"""Reads a Workflow's status as the state of a run, so that tables and progress are those of the local engine.

A pod that finds no node is shown with what it asks for and, where nodes may be read, how much of it they have left.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import re
import time
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final, cast

from pipeline.runs.expressions import holds, parse
from pipeline.runs.graph import Graph
from pipeline.runs.state import EXIT_NODE, FAILED, FINISHED, FailedAttempt, Kind, Node, Phase, RunPhase, RunState
from stages.parts.base.errors import ConfigError, SlipwayError
from stages.parts.base.program import StageFailure
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import NODES, Object
from stages.parts.cluster.nodes import Amounts, admits, free, quantity, takes_pods

TERMINAL: Final = frozenset({"Succeeded", "Failed", "Error"})
HOLDERS: Final[dict[str, Kind]] = {"DAG": "DAG", "Steps": "DAG", "Suspend": "Suspend"}
SUSPENDED: Final = "waits for an approval: in Argo's user interface, or with slipway resume"
UNPULLED: Final = re.compile(r"^(?:ErrImagePull|ImagePullBackOff|InvalidImageName)\b.*?image \"([^\"]+)\"", re.DOTALL)
"""The kubelet's messages alternate while it tries; they differ in nothing that a person needs."""
CANT_BE_PULLED: Final = "can't be pulled"
TERMINATION_MESSAGE: Final = re.compile(r"\(exit code (?P<exit_code>\d+)\): (?P<document>\{.*\})", re.DOTALL)
UNSCHEDULABLE: Final = re.compile(r"Unschedulable: 0/\d+ nodes are available: (?P<why>.*)", re.DOTALL)
"""The scheduler's sentence, as Argo repeats it."""
REST: Final = re.compile(r"\.? (no new claims|preemption: ).*", re.DOTALL)
"""The part of it that says nothing new."""
NONE_FREE: Final = "no node has it free"
UNITS: Final = {"cpu": (Decimal(1), "CPU"), "memory": (Decimal(1024**3), "GiB"), "nvidia.com/gpu": (Decimal(1), "GPU")}
"""What each resource that stages ask for is shown in. All else that a node may lack is left to the scheduler."""
AGAIN_S: Final = 30.0
"""How often nodes are looked at while a run is followed."""
PARAMETER: Final = re.compile(r"\{\{inputs\.parameters\.([\w-]+)\}\}")


def ended(workflow: Object) -> bool:
    """Whether the workflow has ended. One without a phase, which the controller has not seen yet, has not."""
    return workflow.get("status", {}).get("phase") in TERMINAL


def run_state(workflow: Object) -> RunState:
    """Read the state of a Workflow. Tasks that have not started are Pending, once the controller knows the template."""
    status, name = workflow.get("status", {}), str(workflow["metadata"]["name"])
    spec = spec_of(workflow)
    nodes, by_name = nodes_of(status), templates(workflow)
    state = RunState(
        name=name,
        workflow=workflow["spec"].get("workflowTemplateRef", {}).get("name", name),
        phase=cast(RunPhase, status.get("phase") or "Pending"),
        message=status.get("message") or "",
        arguments=arguments_of(workflow) or arguments_of({"spec": spec}),
        nodes=[
            _node(task["name"], task["template"], nodes.get(f"{name}.{task['name']}"), nodes, by_name)
            for task in tasks(spec)
        ],
        started_at=status.get("startedAt"),
        finished_at=status.get("finishedAt"),
    )
    if on_exit := spec.get("onExit"):
        node = _node(EXIT_NODE, on_exit, nodes.get(f"{name}.onExit"), nodes, {})
        if node.phase == "Pending" and state.phase in TERMINAL:
            node.phase, node.message = "Omitted", "the run was terminated"
        state.nodes.append(node)
    _add_inner(state, nodes)
    graph = _graph(spec)
    phases = {node.name: node.phase for node in state.nodes if graph and node.finished and node.name in graph.depends}
    for node in state.nodes:
        if graph and node.name in phases and node.phase == "Omitted":
            node.message = graph.why_not(node.name, phases)
        else:
            argo_node = nodes.get(f"{name}.{node.name}", {})
            node.message = explained(node.message, by_name.get(node.template, {}), argo_node)
    if state.phase in ("Failed", "Error"):
        failed = (node.name for node in state.nodes if node.phase in FAILED)
        state.culprit = (graph and graph.culprit(phases)) or next(failed, None)
    return state


def spec_of(workflow: Object) -> Object:
    """Return the spec that is run: the installed template's as it was when the controller read it."""
    return dict(workflow.get("status", {}).get("storedWorkflowTemplateSpec") or workflow["spec"])


def templates(workflow: Object) -> dict[str, Object]:
    return {template["name"]: template for template in spec_of(workflow).get("templates", [])}


def arguments_of(workflow: Object) -> dict[str, str]:
    parameters = workflow["spec"].get("arguments", {}).get("parameters", [])
    return {parameter["name"]: parameter["value"] for parameter in parameters if "value" in parameter}


def tasks(spec: Object) -> list[Object]:
    """Return the entrypoint's tasks in DAG order; empty while the controller has not read the template."""
    graph = _graph(spec)
    by_name = {task["name"]: task for task in _dag(spec).get("tasks", [])}
    return [by_name[name] for name in (graph.depends if graph else by_name)]


def nodes_of(status: Object) -> dict[str, Object]:
    """Return the nodes of a status, by name, such as ``slipway-1.resolve(0)``; also those that Argo compressed."""
    nodes = status.get("nodes") or {}
    if not nodes and status.get("compressedNodes"):
        nodes = json.loads(gzip.decompress(base64.b64decode(status["compressedNodes"])))
    return {node["name"]: node for node in nodes.values()}


def attempts(node: Object, nodes: Mapping[str, Object]) -> list[Object]:
    """Return the pod nodes of a task's attempts: the children of a Retry node, or the node itself."""
    if node["type"] != "Retry":
        return [node] if node["type"] == "Pod" else []
    by_id = {one["id"]: one for one in nodes.values()}
    return [by_id[child] for child in node.get("children", []) if child in by_id]


def _node(
    name: str, template: str, node: Object | None, nodes: Mapping[str, Object], manifests: Mapping[str, Object]
) -> Node:
    """Read the node of a task, whose template's manifest says what is retried."""
    if node is None:
        return Node(name=name, template=template)
    tries = attempts(node, nodes)
    last = tries[-1] if tries else node
    code = (last.get("outputs") or {}).get("exitCode")
    phase = _phase(node, last, code, (manifests.get(template, {}).get("retryStrategy") or {}).get("expression") or "")
    message, hint = _message_and_hint(last.get("message") or "")
    waits = node.get("message") or "" if last is not node else ""
    if phase == "Succeeded":
        message, hint = "", ""
    elif phase not in FINISHED:  # a Retry node says that it waits; its last attempt says why
        message = ": ".join(filter(None, (waits, message)))
    message = message or waits
    if not message and node["type"] == "Suspend" and phase == "Running":
        message = "; ".join(filter(None, (inputs_of(node).get("message"), SUSPENDED)))
    parameters = _outputs(node) or _outputs(last)
    return Node(
        name=name,
        template=template,
        kind=HOLDERS.get(node["type"], "Pod"),
        phase=phase,
        message=message,
        hint=hint,
        attempts=len(tries),
        retried=[_failure(attempt) for attempt in tries[:-1] if attempt.get("phase") in FAILED],
        exit_code=int(code) if code is not None and phase in FINISHED else None,
        cached=bool((node.get("memoizationStatus") or last.get("memoizationStatus") or {}).get("hit")),
        outputs={output["name"]: output["value"] for output in parameters if "value" in output},
        # A Retry node starts when it begins to wait for a lock.
        started_at=(tries[0] if tries else node).get("startedAt") if phase != "Pending" else None,
        finished_at=node.get("finishedAt") or (last.get("finishedAt") if phase in FINISHED else None),
    )


def _failure(attempt: Object) -> FailedAttempt:
    """Why an attempt failed, which another one followed."""
    message, hint = _message_and_hint(attempt.get("message") or "")
    code = int((attempt.get("outputs") or {}).get("exitCode", -1))
    return FailedAttempt(phase=attempt["phase"], message=message, hint=hint, exit_code=code)


def _outputs(node: Object) -> list[Object]:
    return (node.get("outputs") or {}).get("parameters") or []


def _phase(node: Object, last: Object, code: str | None, retried: str) -> Phase:
    """Return the phase of a task, of whose attempts *last* is the latest.

    Argo leaves the Retry node of a task that waited for a lock Pending while its pod runs, and after a failure that no
    attempt will follow it Running until the back-off is over.
    """
    phase, latest = (cast(Phase, one.get("phase") or "Pending") for one in (node, last))
    if phase == "Pending" and latest == "Running":
        return latest
    if phase in FINISHED or latest not in FAILED or code is None or not retried:
        return phase
    failure = {"lastRetry.exitCode": code, "lastRetry.status": latest, "lastRetry.message": last.get("message") or ""}
    with contextlib.suppress(ConfigError, KeyError):  # a template that is not ours
        return phase if holds(parse(retried, "expression"), failure.__getitem__) else latest
    return phase


def _message_and_hint(message: str) -> tuple[str, str]:
    """Return a stage's own error and hint, which Argo shows as JSON behind the exit code; else Argo's message."""
    match = TERMINATION_MESSAGE.search(message)
    if match and (failure := StageFailure.parse(match["document"], int(match["exit_code"]))):
        return failure.message, failure.hint
    if unpulled := UNPULLED.search(message):
        return f"the image {unpulled[1]} {CANT_BE_PULLED}", "check its name, and that the nodes may pull it"
    more_memory = "give the stage more memory in the platform's file, then: slipway install"
    return message.strip(), more_memory if "OOMKilled" in message else ""


def _add_inner(state: RunState, nodes: Mapping[str, Object]) -> None:
    """Add the nodes within tasks: those of nested templates and of fan-outs."""
    names = {node["id"]: node["name"] for node in nodes.values()}
    outer, prefix = {EXIT_NODE, *(node.name for node in state.nodes)}, f"{state.name}."
    for name, node in nodes.items():
        below = name.removeprefix(prefix)
        is_attempt = node.get("nodeFlag", {}).get("retried")
        if not name.startswith(prefix) or below in outer or is_attempt or node["type"] == "StepGroup":
            continue
        inner = _node(below, node.get("templateName", ""), node, nodes, {})
        holder = names.get(node.get("boundaryID", ""), state.name)
        inner.parent = holder.removeprefix(prefix) if holder != state.name else ""
        state.add(inner)


def _dag(spec: Object) -> dict[str, Any]:
    entry: Object = next((one for one in spec.get("templates", []) if one["name"] == spec.get("entrypoint")), {})
    return dict(entry.get("dag") or {})


def _graph(spec: Object) -> Graph | None:
    with contextlib.suppress(ConfigError):  # a template that is not ours may use what Graph does not know
        return Graph.of({task["name"]: task.get("depends", "") for task in _dag(spec).get("tasks", [])})
    return None


def explained(message: str, template: Object, node: Object) -> str:
    """*message* of a node of a workflow; a scheduler's one becomes a short sentence."""
    if (match := UNSCHEDULABLE.search(message)) is None:
        return message
    why = REST.sub("", match["why"]).rstrip(". ")
    amounts = requested(template, node)
    short = f"room: asks for {shown(amounts)}; {NONE_FREE}" if "Insufficient" in why and amounts else f"a node: {why}"
    return f"{message[: match.start()]}waits for {short}"


def requested(template: Object, node: Object) -> Amounts:
    """Return what a stage's container requests, whose patch refers to the inputs of *node*; empty if it can't be
    read."""
    inputs = inputs_of(node)
    try:
        patch = json.loads(PARAMETER.sub(lambda match: inputs.get(match[1], ""), template.get("podSpecPatch") or "{}"))
    except ValueError:  # a template that is not ours may have YAML there
        return {}
    containers = [template.get("container") or {}, *patch.get("containers", [])]
    amounts: dict[str, str] = {}
    for kind in ("limits", "requests"):
        for container in containers:
            amounts |= container.get("resources", {}).get(kind) or {}
    return {name: quantity(str(amounts[name])) for name in UNITS if amounts.get(name)}


def inputs_of(node: Object) -> dict[str, str]:
    """Return the values of a node's inputs, by name."""
    return {one["name"]: one.get("value", "") for one in (node.get("inputs") or {}).get("parameters", [])}


class Rooms:
    """The room on the nodes of a cluster, looked at no more often than needed."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._looked: float | None = None
        self._free: list[tuple[Object, Amounts]] | None = None
        """Each node with what is left of it."""

    def fill(self, state: RunState, templates: Mapping[str, Object], nodes: Mapping[str, Object]) -> None:
        """Complete the messages of *nodes* of a workflow that wait for room, if this cluster's nodes may be read."""
        for node in state.nodes:
            if node.message.endswith(NONE_FREE) and (argo_node := nodes.get(f"{state.name}.{node.name}")):
                template = templates.get(node.template, {})
                room = self._describe_free(template, requested(template, argo_node))
                node.message = node.message.replace(NONE_FREE, room)

    def _describe_free(self, template: Object, asks: Amounts) -> str:
        if self._looked is None or time.monotonic() - self._looked > AGAIN_S:
            self._looked, self._free = time.monotonic(), None
            with contextlib.suppress(SlipwayError):  # nodes, or other people's pods, can't be read
                nodes = [node for node in self._cluster.list(NODES)[0] if takes_pods(node)]
                self._free = list(zip(nodes, free(self._cluster, nodes, UNITS), strict=True))
        if self._free is None:
            return NONE_FREE
        fitting = [left for node, left in self._free if admits(node, template)]
        if not fitting:
            return f"none of {len(self._free)} nodes has the labels and taints for it"
        best = max(fitting, key=lambda left: min(left.get(name, Decimal(0)) / asks[name] for name in asks))
        count = "the node that matches" if len(fitting) == 1 else f"the best of {len(fitting)} nodes that match"
        return f"{count} has {shown({name: best.get(name, Decimal(0)) for name in asks})} left"


def shown(amounts: Amounts) -> str:
    return ", ".join(f"{float(round(size / UNITS[name][0], 2)):g} {UNITS[name][1]}" for name, size in amounts.items())
