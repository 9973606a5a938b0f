"""Follows a Workflow and the logs of its pods, in spite of lost connections, expired watches and a busy API."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, Literal

from pipeline.argo.status import CANT_BE_PULLED, Rooms, attempts, ended, nodes_of, run_state, templates
from pipeline.runs.progress import RunObserver, observer_for
from pipeline.runs.state import RunState
from stages.parts.base.errors import ClusterUnavailable, Interrupted, MissingRun, NotInstalled
from stages.parts.cluster.api import Absent, Cluster, Expired
from stages.parts.cluster.kinds import PODS, WORKFLOWS, Kind, Object

PATIENCE_S: Final = 600.0
"""How long the API may not answer."""
UNPULLED_S: Final = 600.0
"""After so long the registry is not having a bad moment: the image is not there, or may not be pulled."""
PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 15.0
NODE_ID: Final = "workflows.argoproj.io/node-id"
EXECUTORS: Final = re.compile(r'time="?\d{4}-\S+ level=\w+ .*\bargo=true\b|\{.*"argo": ?true\b')
"""A line of Argo's executor, as text or as JSON."""


def show_until_ended(
    cluster: Cluster, name: str, *, interrupted: Interrupted, unpulled: Literal["Stop", "Terminate"]
) -> Object:
    """Show a workflow's progress on stderr until it has ended, and return it in its last version.

    After Ctrl-C, and if the API does not answer for too long, it continues; if an image can't be pulled, it is shut
    down as *unpulled* says. Raises: *interrupted*, or as ``follow``.
    """
    try:
        return follow(cluster, name, observer_for(sys.stderr, Path(name)))
    except KeyboardInterrupt as error:
        raise interrupted from error
    except NotInstalled:
        cluster.merge(WORKFLOWS, name, {"spec": {"shutdown": unpulled}})
        raise


def follow(cluster: Cluster, name: str, observer: RunObserver, *, patience_s: float = PATIENCE_S) -> Object:
    """Tell *observer* of every change until the workflow has ended. Returns the workflow in its last version.

    Raises:
        MissingRun: there is no such workflow, or it was deleted.
        ClusterUnavailable: the API did not answer for *patience_s*. The run itself continues.
        NotInstalled: the image of a task could not be pulled for ``UNPULLED_S``. The run itself continues.
    """
    state: RunState | None = None
    rooms, unpulled = Rooms(cluster), dict[str, float]()

    def lost(error: ClusterUnavailable) -> None:
        if state is not None and state.message != str(error):
            state.message = str(error)
            observer.changed(state)

    for workflow in versions(cluster, WORKFLOWS, name, lost=lost, patience_s=patience_s):
        state = run_state(workflow)
        rooms.fill(state, templates(workflow), nodes_of(workflow.get("status", {})))
        if ended(workflow):
            observer.finished(state)
            return workflow
        unpulled = _unpulled(state, unpulled)
        observer.changed(state)
    raise AssertionError("an endless iterator ended")


def _unpulled(state: RunState, since: dict[str, float]) -> dict[str, float]:
    """Return *since* when the image of each task can't be pulled, for which Argo itself would wait until the task's
    deadline. Raises: NotInstalled: see ``follow``."""
    nodes = [node for node in state.nodes if node.message.endswith(CANT_BE_PULLED) and not node.finished]
    since = {node.name: since.get(node.name, time.monotonic()) for node in nodes}
    for node in nodes:
        if time.monotonic() - since[node.name] > UNPULLED_S:
            raise NotInstalled(f"{node.name}: {node.message}, for {UNPULLED_S / 60:.0f} minutes", hint=node.hint)
    return since


def versions(
    cluster: Cluster,
    kind: Kind,
    name: str,
    *,
    lost: Callable[[ClusterUnavailable], None] = lambda _: None,
    patience_s: float = PATIENCE_S,
) -> Iterator[Object]:
    """Yield an object now and after each change; call *lost* while the API does not answer.

    Versions may be left out, but never the last one.
    """
    heard, pause_s = time.monotonic(), PAUSE_S
    while True:
        try:
            fields = f"metadata.name={name}"
            objects, version = cluster.list(kind, fields=fields)
            heard = time.monotonic()
            if not objects:
                raise MissingRun(f"there is no {kind.name} {name} in {cluster.namespace}: was it deleted?")
            yield objects[0]
            while True:
                for change, body in cluster.watch(kind, version, fields=fields):
                    heard, pause_s, version = time.monotonic(), PAUSE_S, body["metadata"]["resourceVersion"]
                    if change == "DELETED":
                        raise MissingRun(f"{kind.name} {name} was deleted")
                    if change != "BOOKMARK":
                        yield body
                time.sleep(PAUSE_S)  # the server ended the watch, as it does every few minutes
        except Expired:
            time.sleep(PAUSE_S)
        except ClusterUnavailable as error:
            lost(error)
            if time.monotonic() - heard + pause_s > patience_s:
                raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


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
            if pod in read:
                continue
            status = (cluster.find(PODS, pod) or {}).get("status", {})
            if status.get("phase", "Pending") != "Pending":
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


def _pods(cluster: Cluster, workflow: Object, task: str) -> list[str]:
    """Find the pods of a task that still exist, in the order of the attempts."""
    name, nodes = workflow["metadata"]["name"], nodes_of(workflow.get("status", {}))
    if (node := nodes.get(f"{name}.{task}")) is None:
        return []
    pods, _ = cluster.list(PODS, labels=f"workflows.argoproj.io/workflow={name}")
    by_node = {pod["metadata"].get("annotations", {}).get(NODE_ID): pod["metadata"]["name"] for pod in pods}
    return [by_node[attempt["id"]] for attempt in attempts(node, nodes) if attempt["id"] in by_node]
