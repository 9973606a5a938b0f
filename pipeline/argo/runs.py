"""Finds runs on a cluster, shows them, reads their logs, stops them and runs them again."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final

from pipeline.argo.follow import PAUSE_S, versions
from pipeline.argo.status import arguments_of, attempts, ended, nodes_of, outputs, run_state
from pipeline.argo.submission import submit
from pipeline.argo.template import installed
from pipeline.runs.state import LATEST, RunState
from pipeline.workflow.parameters import NAME, allowing_incomplete, resolve_key
from stages.parts.base.errors import ClusterRefused, ClusterUnavailable, ConfigError, MissingRun
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import PODS, WORKFLOWS, Object
from stages.parts.cluster.refusals import Absent

UI_VARIABLES: Final = ("ARGO_UI", "ARGO_SERVER")
"""Environment variables with the address of Argo's user interface; the first that is set counts."""
NODE_ID: Final = "workflows.argoproj.io/node-id"
RESUMED: Final = "approved with slipway resume"
EXECUTORS: Final = re.compile(r'time="?\d{4}-\S+ level=\w+ .*\bargo=true\b|\{.*"argo": ?true\b')
"""A line of Argo's executor, as text or as JSON."""
OF_WORKFLOW: Final = "workflows.argoproj.io/workflow"


@dataclass(frozen=True)
class ClusterRun:
    """A run: a Workflow as it was when it was read."""

    workflow: Object

    @cached_property
    def state(self) -> RunState:
        return run_state(self.workflow)

    @property
    def id(self) -> str:
        return self.state.name

    @property
    def model(self) -> str:
        return self.state.arguments.get("model", "")

    @property
    def reference(self) -> str:
        """The run's id with its namespace, as arguments of a command."""
        return f"{self.id} --namespace {self.workflow['metadata']['namespace']}"

    @property
    def directory(self) -> str:
        """The run's folder, relative to the store."""
        return f"{self.state.arguments.get('model-directory', 'MODEL')}/runs/{self.id}"

    @property
    def winner(self) -> str | None:
        return outputs(self.state).get("winner")

    @property
    def outcome(self) -> str | None:
        return outputs(self.state).get("outcome")

    @property
    def link(self) -> str | None:
        """The run's page in Argo's user interface, if its address is known."""
        base = next((os.environ[name] for name in UI_VARIABLES if os.environ.get(name)), None)
        if base is None:
            return None
        base = base if "://" in base else f"https://{base}"
        return f"{base.rstrip('/')}/workflows/{self.workflow['metadata']['namespace']}/{self.id}"

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "run": self.id,
            "engine": "argo",
            "namespace": self.workflow["metadata"]["namespace"],
            "model": self.model,
            "phase": self.state.phase,
            "message": self.state.message,
            **{name: outputs(self.state).get(name) for name in ("winner", "outcome", "reason", "release", "url")},
            "link": self.link,
        }

    def summary(self) -> Any:
        """The result for a terminal: the scores and the reason, if the workflow has them, and where everything is."""
        from rich.console import Group

        said = outputs(self.state)
        lines = [said[name] for name in ("table", "reason") if name in said]
        shown = {"release": said.get("release"), "endpoint": said.get("url"), "workflow": self.link}
        return Group(*lines, *(f"{name:<9} {value}" for name, value in shown.items() if value))


def all_runs(cluster: Cluster) -> list[ClusterRun]:
    """All runs of our template, however they were submitted, the newest first.

    Raises:
        NotInstalled: the cluster has no Argo Workflows.
    """
    try:
        found, _ = cluster.list(WORKFLOWS)
    except Absent:
        cluster.kind(WORKFLOWS.api_version, WORKFLOWS.name)
        raise
    ours = [each for each in found if each["spec"].get("workflowTemplateRef", {}).get("name") == NAME]
    ours.sort(key=lambda each: (each["metadata"]["creationTimestamp"], each["metadata"]["name"]), reverse=True)
    return [ClusterRun(workflow) for workflow in ours]


def find(cluster: Cluster, name: str) -> ClusterRun:
    """Find a run by its name, the beginning of its name, or 'latest'.

    Raises:
        MissingRun: there is none, or more than one.
    """
    runs = all_runs(cluster)
    exact = [run for run in runs if run.id == name]
    matches = exact or (runs[:1] if name == LATEST else [run for run in runs if run.id.startswith(name)])
    if len(matches) == 1:
        return matches[0]
    problem = "matches several runs" if matches else "is not a run"
    known = ", ".join(run.id for run in runs[:5]) or "none yet"
    raise MissingRun(f"{name!r} {problem} in namespace {cluster.namespace}", hint=f"the latest: {known}")


def stop(cluster: Cluster, run: ClusterRun) -> bool:
    """Ask Argo to stop a run; its exit handler still runs. False if the run has ended."""
    if ended(run.workflow):
        return False
    cluster.merge(WORKFLOWS, run.id, {"spec": {"shutdown": "Stop"}})
    return True


def resume(cluster: Cluster, run: ClusterRun, task: str | None = None) -> list[str]:
    """Resume suspended tasks, *task* or all, as ``argo resume`` does. Returns their names; does not wait for them.

    Raises:
        MissingRun: the run has ended.
        UnknownName: *task* is not suspended.
        ConfigError: nothing is suspended.
        ClusterRefused: Argo keeps the run's state where only its own tools can change it.
    """
    chosen, status = run.state.suspended(task), run.workflow["status"]
    if not status.get("nodes"):
        raise ClusterRefused(f"the state of run {run.id} is compressed", hint=f"argo resume {run.id}")
    ended = {"phase": "Succeeded", "finishedAt": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
    nodes = nodes_of(status)
    changes = {nodes[f"{run.id}.{name}"]["id"]: ended | {"message": RESUMED} for name in chosen}
    cluster.merge(WORKFLOWS, run.id, {"status": {"nodes": changes}})
    return chosen


def again(cluster: Cluster, run: ClusterRun, *, allow_incomplete: bool = False) -> tuple[Object, bool]:
    """Submit a run's arguments again; finished work is in the store and is reused.

    Args:
        allow_incomplete: go on without a variant, whatever the run did.
    """
    given = arguments_of(run.workflow)
    if {"model", "revision"} <= given.keys():
        given["resolve-key"] = resolve_key(given["model"], given["revision"])
    if allow_incomplete:  # a run that a trigger started leaves most to the template
        whole = arguments_of(installed(cluster, given)) | given
        given["optimize"] = allowing_incomplete(whole["optimize"])
    return submit(cluster, given)


def read_logs(cluster: Cluster, run: ClusterRun, task: str | None, *, follow: bool) -> Iterator[str]:
    """The lines of one task's pods; or of all tasks, each line led by its task's name.

    Raises:
        UnknownName: the run has no such task.
        MissingRun: it has not started, or its pods are gone.
        ConfigError: *follow* without a task.
    """
    known = [node.name for node in run.state.nodes]
    task = run.state.with_log(task) if task is not None else None
    if follow and task is None:
        raise ConfigError("logs on a cluster are followed one task at a time", hint=f"name one of {', '.join(known)}")
    if follow and task is not None:
        yield from _followed(cluster, run, task)
        return
    lines = 0
    for name in known if task is None else [task]:
        for number, pod in enumerate(_pods(cluster, run.workflow, name)):
            lead = "" if task else f"{name}: "
            yield from ([f"\n--- attempt {number + 1} ---\n"] if number else [])
            for line in _own(cluster.logs(pod)):
                lines += 1
                yield lead + line
    if not lines:
        raise MissingRun(
            f"{task or 'no task'} of run {run.id} has a log: it has not started, was cached, or its pods are gone",
            hint=f"the store's volume keeps the logs of stages: {run.directory}/logs",
        )


def _followed(cluster: Cluster, run: ClusterRun, task: str) -> Iterator[str]:
    """Follow the pods of one task, one after the other, until the task ends."""
    read: set[str] = set()
    for workflow in versions(cluster, WORKFLOWS, run.id):
        for pod in _pods(cluster, workflow, task):
            if pod not in read and _started(cluster, pod):
                yield from ([f"\n--- attempt {len(read) + 1} ---\n"] if read else [])
                read.add(pod)
                yield from _to_its_end(cluster, pod)
        if ended(workflow) or run_state(workflow).node(task).finished:
            return


def _to_its_end(cluster: Cluster, pod: str) -> Iterator[str]:
    """Follow a pod's log; after a lost connection, continue where it broke off."""
    shown = 0
    while True:
        try:
            for number, line in enumerate(_own(cluster.logs(pod, follow=True))):
                if number >= shown:
                    shown = number + 1
                    yield line
        except ClusterUnavailable:
            time.sleep(PAUSE_S)
        except Absent:
            return
        else:
            return


def _own(lines: Iterable[str]) -> Iterator[str]:
    """Without the lines of Argo's executor, which runs in the same container."""
    return (line for line in lines if not EXECUTORS.match(line))


def _started(cluster: Cluster, pod: str) -> bool:
    try:
        return bool(cluster.get(PODS, pod).get("status", {}).get("phase", "Pending") != "Pending")
    except Absent:
        return False


def _pods(cluster: Cluster, workflow: Object, task: str) -> list[str]:
    """The pods of a task that still exist, in the order of the attempts."""
    name, nodes = workflow["metadata"]["name"], nodes_of(workflow.get("status", {}))
    node = nodes.get(f"{name}.{task}")
    if node is None:
        return []
    found, _ = cluster.list(PODS, labels=f"{OF_WORKFLOW}={name}")
    by_node = {each["metadata"].get("annotations", {}).get(NODE_ID): each["metadata"]["name"] for each in found}
    return [by_node[attempt["id"]] for attempt in attempts(node, nodes) if attempt["id"] in by_node]
