"""The state of a run, on either engine."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

from stages.parts.base.errors import ConfigError, MissingRun, RunFailed, check_known
from stages.parts.base.store import Record

Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Error", "Skipped", "Omitted"]
RunPhase = Literal["Pending", "Running", "Succeeded", "Failed", "Error", "Interrupted"]
Kind = Literal["Pod", "DAG", "Suspend"]
FINISHED: Final[frozenset[Phase]] = frozenset({"Succeeded", "Failed", "Error", "Skipped", "Omitted"})
FAILED: Final[frozenset[Phase]] = frozenset({"Failed", "Error"})
EXIT_NODE: Final = "onExit"
"""The name of the exit handler's node, as in Argo."""
LEFT_OUT: Final = "left-out"
"""The output of the task check with a line for each variant that can't be served: its name, a colon, and why."""


class _Timed(BaseModel):
    model_config = ConfigDict(extra="forbid")

    started_at: datetime | None = None
    finished_at: datetime | None = None

    @property
    def seconds(self) -> float | None:
        """Seconds from the start to the end, or to now; None before the start."""
        if self.started_at is None:
            return None
        return ((self.finished_at or datetime.now(UTC)) - self.started_at).total_seconds()


class FailedAttempt(Record):
    """Why an attempt of a task failed."""

    phase: Phase
    """Failed, or Error if the program succeeded and a promised output is missing."""
    message: str
    hint: str = ""
    exit_code: int
    """-1, as in Argo's expressions, if the attempt was stopped rather than ended by itself."""


class Node(_Timed):
    """One task of a run."""

    name: str
    """Its path below the workflow's name, as in Argo: ``evaluate``; ``evaluate.load`` within that dag; ``onExit``."""
    template: str
    kind: Kind = "Pod"
    """Argo's node type: a program (Pod), a suspension, or a node that holds others."""
    display_name: str = ""
    """Its name within its parent, as in Argo."""
    parent: str = ""
    """The node that holds it; empty for the entrypoint's own tasks and the exit handler."""
    phase: Phase = "Pending"
    message: str = ""
    """What it waits for; after a failure its error; or why it did not run."""
    hint: str = ""
    """What the error suggests to do."""
    attempts: int = 0
    retried: list[FailedAttempt] = []
    """The attempts that failed and were followed by another one, in their order."""
    exit_code: int | None = None
    """The exit code of the last attempt; 128 + the signal if a signal ended it."""
    cached: bool = False
    outputs: dict[str, str] = {}
    log: str | None = None
    """Its log, relative to the run's folder."""

    @property
    def finished(self) -> bool:
        return self.phase in FINISHED

    @property
    def title(self) -> str:
        return self.display_name or self.name


class RunState(_Timed):
    """One run. ``Interrupted`` is never written: see ``pipeline.local.folder.read_run``."""

    name: str
    workflow: str
    phase: RunPhase = "Pending"
    message: str = ""
    culprit: str | None = None
    """The task because of which the run failed."""
    arguments: dict[str, str]
    nodes: list[Node]
    """In DAG order, the exit handler last. The nodes that a node holds follow it, once it has started."""

    @property
    def model(self) -> str:
        return self.arguments.get("model", "")

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def with_log(self, task: str) -> str:
        """Return the task whose log is meant: of a DAG with one task, that task; of the exit handler, its first one."""
        check_known("task", task, [node.name for node in self.nodes])
        inner = [node.name for node in self.nodes if node.parent == task]
        return inner[0] if len(inner) == 1 or (inner and task == EXIT_NODE) else task

    def suspended(self, task: str | None) -> list[str]:
        """Return the names of the tasks that wait for an approval: *task*, or all."""
        if self.phase != "Running":
            hint = "only a running run can be resumed"
            raise MissingRun(f"run {self.name} is not running: it is {self.phase}", hint=hint)
        waiting = [node.name for node in self.nodes if node.kind == "Suspend" and node.phase == "Running"]
        if not waiting:
            raise ConfigError(f"nothing in run {self.name} is suspended")
        if task is not None:
            check_known("suspended task", task, waiting)
        return [name for name in waiting if task in (None, name)]

    def message_of(self, node: Node) -> str:
        """Return a node's message; if a variant is not made, the reason instead of the condition that was false."""
        task, _, variant = node.name.partition("-")
        if node.phase != "Skipped" or task != "optimize":
            return node.message
        lines = next((one.outputs.get(LEFT_OUT, "") for one in self.nodes if one.name == "check"), "").splitlines()
        why = next((line.partition(": ")[2] for line in lines if line.startswith(f"{variant}: ")), "")
        return f"left out: {why}" if why else "not among optimize.variants"

    def add(self, node: Node) -> None:
        """Insert *node* below its parent, after the nodes that are there already."""
        holders, at = {node.parent}, len(self.nodes)
        for index, present in enumerate(self.nodes):
            if present.name in holders or present.parent in holders:
                holders.add(present.name)
                at = index + 1
        self.nodes.insert(at, node)


def failure(state: RunState, where: str = "") -> RunFailed:
    """Return the error of a run that failed: the message, hint and exit code of the task that made it fail.

    *where* has the options that let a command find the run.
    """
    if state.culprit is None:
        hint = f"slipway show {state.name}{where}"
        return RunFailed(f"run {state.name} {state.phase.lower()}: {state.message}", hint=hint)
    task = state.node(state.culprit)
    # A task that holds others has no exit code of its own.
    node = next((inner for inner in state.nodes if inner.parent == task.name and inner.phase in FAILED), task)
    return RunFailed(
        f"{task.name}: {node.message or 'no message'}",
        hint=f"{node.hint + '; ' if node.hint else ''}slipway logs {state.name} {task.name}{where}",
        exit_code=node.exit_code or RunFailed.exit_code,
    )
