"""Follows a Workflow to its end, in spite of lost connections, expired watches and a busy API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from pipeline.argo.pending import Rooms
from pipeline.argo.status import CANT_BE_PULLED, changed, ended, nodes_of, run_state, templates
from pipeline.runs.progress import RunObserver
from pipeline.runs.state import RunState
from stages.parts.base.errors import ClusterUnavailable, MissingRun, NotInstalled
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import WORKFLOWS, Kind, Object
from stages.parts.cluster.refusals import Expired

PATIENCE_S: Final = 600.0
"""How long the API may not answer."""
UNPULLED_S: Final = 600.0
"""After so long the registry is not having a bad moment: the image is not there, or may not be pulled."""
PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 15.0


def follow(cluster: Cluster, name: str, observer: RunObserver, *, patience_s: float = PATIENCE_S) -> Object:
    """Tell *observer* of every change until the workflow has ended. Returns the workflow in its last version.

    Raises:
        MissingRun: there is no such workflow, or it was deleted.
        ClusterUnavailable: the API did not answer for *patience_s*. The run itself continues.
        NotInstalled: the image of a task could not be pulled for ``UNPULLED_S``. The run itself continues.
    """
    state: RunState | None = None
    rooms, unpulled = Rooms(cluster), _Unpulled()

    def lost(error: ClusterUnavailable) -> None:
        if state is not None and state.message != str(error):
            state.message = str(error)
            observer.run_changed(state)

    for workflow in versions(cluster, WORKFLOWS, name, lost=lost, patience_s=patience_s):
        earlier, state = state, run_state(workflow)
        rooms.fill(state, templates(workflow), nodes_of(workflow.get("status", {})))
        if not ended(workflow):
            unpulled.check(state)
            if earlier is None or (earlier.phase, earlier.message) != (state.phase, state.message):
                observer.run_changed(state)
        for node in changed(earlier, state):
            observer.node_changed(state, node)
        if ended(workflow):
            observer.finished(state)
            return workflow
    raise AssertionError("an endless iterator ended")


class _Unpulled:
    """Since when the image of each task can't be pulled. Argo itself would wait until the task's deadline."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def check(self, state: RunState) -> None:
        """Note which images can't be pulled now. Raises: NotInstalled: see ``follow``."""
        nodes = [node for node in state.nodes if node.message.endswith(CANT_BE_PULLED) and not node.finished]
        self._since = {node.name: self._since.get(node.name, time.monotonic()) for node in nodes}
        for node in nodes:
            if time.monotonic() - self._since[node.name] > UNPULLED_S:
                minutes = f"{UNPULLED_S / 60:.0f} minutes"
                raise NotInstalled(f"{node.name}: {node.message}, for {minutes}", hint=node.hint)


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
