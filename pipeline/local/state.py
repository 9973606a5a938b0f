"""A run on disk: ``run.json`` (how far it is), ``workflow.json`` (what is executed), ``logs/``.

The engine holds a lock on ``.lock`` while it lives. A run that says it is running, and whose lock is free, was
interrupted: ``read_run`` tells.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.parts.base.errors import ConfigError, MissingRun
from stages.parts.base.store import exclusive, full_disk_is_an_answer, write_json

Phase = Literal["Pending", "Running", "Succeeded", "Failed", "Error", "Skipped", "Omitted"]
RunPhase = Literal["Pending", "Running", "Succeeded", "Failed", "Error", "Interrupted"]
Kind = Literal["Pod", "DAG", "TaskGroup", "Suspend"]
FINISHED: Final[frozenset[Phase]] = frozenset({"Succeeded", "Failed", "Error", "Skipped", "Omitted"})
FAILED: Final[frozenset[Phase]] = frozenset({"Failed", "Error"})
STATE: Final = "run.json"
WORKFLOW: Final = "workflow.json"
LOCK: Final = ".lock"
LOGS: Final = "logs"
SCRATCH: Final = "scratch"
"""The emptyDirs of running attempts."""


class _Timed(BaseModel):
    model_config = ConfigDict(extra="forbid")

    started_at: datetime | None = None
    finished_at: datetime | None = None

    @property
    def seconds(self) -> float | None:
        """From start to end, or to now; None before the start."""
        if self.started_at is None:
            return None
        return ((self.finished_at or datetime.now(UTC)) - self.started_at).total_seconds()


class Node(_Timed):
    """One task of a run."""

    name: str
    """As in Argo below the workflow's name; see ``names``."""
    template: str
    kind: Kind = "Pod"
    """What it is: a program, or what holds other nodes. Argo's node type."""
    display_name: str = ""
    """Its name within its parent, as in Argo."""
    parent: str = ""
    """The node that holds it; empty for the entrypoint's own tasks and the exit handler."""
    phase: Phase = "Pending"
    message: str = ""
    """While it waits: for what. After a failure: its error. Else why it did not run."""
    hint: str = ""
    """What its error said to do."""
    attempts: int = 0
    exit_code: int | None = None
    """Of the last attempt; 128 + the signal if one ended it."""
    cached: bool = False
    outputs: dict[str, str] = {}
    log: str | None = None
    """Relative to the run's folder."""

    @property
    def finished(self) -> bool:
        return self.phase in FINISHED

    @property
    def title(self) -> str:
        return self.display_name or self.name


class RunState(_Timed):
    """One run. ``Interrupted`` is never written: see ``read_run``."""

    name: str
    workflow: str
    phase: RunPhase = "Pending"
    message: str = ""
    culprit: str | None = None
    """The task for which the run failed."""
    arguments: dict[str, str]
    nodes: list[Node]
    """In DAG order, the exit handler last; what a node holds follows it, from the moment on that it starts."""

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def add(self, node: Node) -> None:
        """Below its parent, after what is there already."""
        holders, at = {node.parent}, len(self.nodes)
        for index, each in enumerate(self.nodes):
            if each.name in holders or each.parent in holders:
                holders.add(each.name)
                at = index + 1
        self.nodes.insert(at, node)


@contextlib.contextmanager
def opened(folder: Path, manifest: Mapping[str, Any], state: RunState) -> Iterator[None]:
    """Make the folder of a new run and hold its lock.

    Raises:
        Busy: another engine runs in it.
        ConfigError: there is a run in it already, or it can't be written.
        NotEnoughSpace: the disk is full.
    """
    with writable(folder):
        for name in (LOGS, SCRATCH):
            (folder / name).mkdir(parents=True, exist_ok=True)
    with exclusive(folder / LOCK, f"the run in {folder}", wait=False):
        if (folder / STATE).exists():
            raise ConfigError(f"{folder} holds a run already", hint="a new run needs a new name")
        with writable(folder):
            write_json(
                folder / WORKFLOW, {"name": state.name, "arguments": state.arguments, "manifest": dict(manifest)}
            )
        save(folder, state)
        yield


def save(folder: Path, state: RunState) -> None:
    """Raises: NotEnoughSpace, ConfigError: the folder can't be written; run.json is as it was."""
    with writable(folder):
        write_json(folder / STATE, state)


def read_run(folder: Path) -> RunState:
    """The run in *folder* as it is now, from any process.

    Raises:
        MissingRun: there is none, or it can't be read.
    """
    state = _read(folder)
    if state.finished_at is None and not _alive(folder):
        state = _read(folder)  # the engine may have had its last word in between
        if state.finished_at is None:
            state.phase, state.message = "Interrupted", "the engine ended before the run did"
            for node in state.nodes:
                if node.phase == "Running":
                    node.phase, node.message = "Error", "interrupted"
    return state


def _read(folder: Path) -> RunState:
    try:
        return RunState.model_validate_json((folder / STATE).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValidationError) as error:
        raise MissingRun(
            f"there is no run in {folder}", hint="runs lie in the model's folder of the store, under runs/"
        ) from error


def _alive(folder: Path) -> bool:
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:
        return False


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Turn the system's refusals to write below *folder* into NotEnoughSpace and ConfigError."""
    try:
        with full_disk_is_an_answer(folder):
            yield
    except OSError as error:
        raise ConfigError(
            f"the run's folder {folder} can't be written: {error.strerror}",
            hint="check the store's path and its rights",
        ) from error
