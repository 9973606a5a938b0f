"""Reads the logs of a run's pods."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import Final

from pipeline.argo.follow import PAUSE_S, versions
from pipeline.argo.status import attempts, ended, nodes_of, run_state
from stages.parts.base.errors import ClusterUnavailable
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import PODS, WORKFLOWS, Object
from stages.parts.cluster.refusals import Absent

NODE_ID: Final = "workflows.argoproj.io/node-id"
EXECUTORS: Final = re.compile(r'time="?\d{4}-\S+ level=\w+ .*\bargo=true\b|\{.*"argo": ?true\b')
"""A line of Argo's executor, as text or as JSON."""


def read_logs(cluster: Cluster, workflow: Object, task: str) -> Iterator[str]:
    """Yield the lines of one task's pods that still exist."""
    for number, pod in enumerate(_pods(cluster, workflow, task)):
        yield from _lead(number)
        yield from _without_executor(cluster.logs(pod))


def follow_logs(cluster: Cluster, name: str, task: str) -> Iterator[str]:
    """Follow the pods of one task of workflow *name*, one after the other, until the task ends."""
    read: set[str] = set()
    for workflow in versions(cluster, WORKFLOWS, name):
        for pod in _pods(cluster, workflow, task):
            if pod not in read and _started(cluster, pod):
                yield from _lead(len(read))
                read.add(pod)
                yield from _to_its_end(cluster, pod)
        if ended(workflow) or run_state(workflow).node(task).finished:
            return


def _lead(earlier_attempts: int) -> list[str]:
    return [f"\n--- attempt {earlier_attempts + 1} ---\n"] if earlier_attempts else []


def _to_its_end(cluster: Cluster, pod: str) -> Iterator[str]:
    """Follow a pod's log; after a lost connection, continue where it broke off."""
    shown = 0
    while True:
        try:
            for number, line in enumerate(_without_executor(cluster.logs(pod, follow=True)), 1):
                if number > shown:
                    shown = number
                    yield line
        except ClusterUnavailable:
            time.sleep(PAUSE_S)
        except Absent:
            return
        else:
            return


def _without_executor(lines: Iterable[str]) -> Iterator[str]:
    """Leave out the lines of Argo's executor, which runs in the same container."""
    return (line for line in lines if not EXECUTORS.match(line))


def _started(cluster: Cluster, pod: str) -> bool:
    try:
        return bool(cluster.get(PODS, pod).get("status", {}).get("phase", "Pending") != "Pending")
    except Absent:
        return False


def _pods(cluster: Cluster, workflow: Object, task: str) -> list[str]:
    """Find the pods of a task that still exist, in the order of the attempts."""
    name, nodes = workflow["metadata"]["name"], nodes_of(workflow.get("status", {}))
    node = nodes.get(f"{name}.{task}")
    if node is None:
        return []
    pods, _ = cluster.list(PODS, labels=f"workflows.argoproj.io/workflow={name}")
    by_node = {pod["metadata"].get("annotations", {}).get(NODE_ID): pod["metadata"]["name"] for pod in pods}
    return [by_node[attempt["id"]] for attempt in attempts(node, nodes) if attempt["id"] in by_node]
