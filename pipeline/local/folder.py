"""The engine's files: those of a run, and what all runs of a store share.

A run's folder has ``run.json`` (how far it is), ``workflow.json`` (what is executed), ``logs/``, and in ``resume/`` a
file for each suspended task that was resumed and that the engine has not seen yet. The engine holds a lock on
``.lock``, which has its process id, while it lives. If a run says that it is running and its lock is free, the engine
was killed; ``read_run`` then reports the run as interrupted.

Runs share mutexes, which are locks on files, and the outputs of memoized tasks, one small JSON file for each key. The
kernel releases locks when the engine ends, however it ends. A hit does not restore files that the task wrote: memoize
only tasks that compute values.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from pydantic import ValidationError

from pipeline.runs.state import RunState
from stages.parts.base.errors import Busy, ConfigError, MissingRun, of_disk
from stages.parts.base.files import content_of, exclusive, holder, write_json
from stages.parts.base.store import Record

STATE: Final = "run.json"
WORKFLOW: Final = "workflow.json"
LOCK: Final = ".lock"
LOGS: Final = "logs"
SCRATCH: Final = "scratch"
"""The emptyDirs of running attempts."""
RESUMED: Final = "resume"
LONGEST: Final = 150
"""Bytes of a node's name in a file name. File systems allow 255, and a suffix is added."""
LOCKS, MEMO = "locks", "memo"
"""Their folders."""
KEY: Final = re.compile(r"[a-zA-Z0-9][-a-zA-Z0-9]*")
"""Argo's rule for keys (workflow/controller/cache)."""


@dataclass(frozen=True)
class RunFolders:
    """The folders of one run."""

    mounts: Mapping[str, Path]
    """The local folder that stands for the claim mounted at a path such as ``/mnt/models``, for each such path."""
    run: Path
    """The run's own folder; see the module."""
    shared: Path
    """The folder that all runs of a store share."""


@contextlib.contextmanager
def opened(folder: Path, manifest: Mapping[str, Any], state: RunState) -> Iterator[None]:
    """Create the folder of a new run and hold its lock."""
    with writable(folder):
        for name in (LOGS, SCRATCH):
            (folder / name).mkdir(parents=True, exist_ok=True)
    with exclusive(folder / LOCK, f"the run in {folder}", wait=False):
        if (folder / STATE).exists():
            raise ConfigError(f"{folder} holds a run already", hint="a new run needs a new name")
        with writable(folder):
            (folder / LOCK).write_text(str(os.getpid()))
            write_json(
                folder / WORKFLOW, {"name": state.name, "arguments": state.arguments, "manifest": dict(manifest)}
            )
        save(folder, state)
        yield


def save(folder: Path, state: RunState) -> None:
    """Write run.json."""
    with writable(folder):
        write_json(folder / STATE, state)


def read_run(folder: Path) -> RunState:
    """Read the current state of the run in *folder*; works in any process."""
    state = _read(folder)
    if state.finished_at is None and holder(folder / LOCK) is None:
        state = _read(folder)  # the engine may have written the last state in between
        if state.finished_at is None:
            state.phase, state.message = "Interrupted", "the engine ended before the run did"
            for node in state.nodes:
                if node.phase == "Running":
                    node.phase, node.message = "Error", "interrupted"
    return state


def _read(folder: Path) -> RunState:
    try:
        return RunState.model_validate_json(content_of(folder / STATE))
    except (FileNotFoundError, NotADirectoryError, ValidationError) as error:
        hint = "runs are in the model's folder of the store, under runs/"
        raise MissingRun(f"there is no run in {folder}", hint=hint) from error


def safe(node: str) -> str:
    """Return a file name for a node: short enough, and different for each."""
    if len(node) <= LONGEST:
        return node
    return f"{node[:LONGEST]}-{hashlib.sha256(node.encode()).hexdigest()[:12]}"


def log_file(node: str) -> str:
    """Return where a node's log is in the run's folder."""
    return f"{LOGS}/{safe(node)}.log"


def resume(folder: Path, task: str | None = None) -> list[str]:
    """Let suspended tasks of a run continue: *task*, or all. Returns their names; does not wait for them."""
    names = read_run(folder).suspended(task)
    with writable(folder):
        (folder / RESUMED).mkdir(exist_ok=True)
        for name in names:
            (folder / RESUMED / safe(name)).touch()
    return names


def take_resumed(folder: Path, suspended: Iterable[str]) -> list[str]:
    """Return those of the *suspended* nodes that were resumed since the last look."""
    resumed = []
    for name in suspended:
        with contextlib.suppress(FileNotFoundError):
            (folder / RESUMED / safe(name)).unlink()
            resumed.append(name)
    return resumed


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Turn errors of writing below *folder* into those of a disk or ConfigError."""
    try:
        yield
    except OSError as error:
        hint = "check its rights, or choose another store with --store"
        other = ConfigError(f"cannot use {folder} as the run's folder: {error.strerror}", hint=hint)
        raise of_disk(error, folder) or other from error


def hold(stack: contextlib.ExitStack, folder: Path, mutexes: Iterable[str]) -> str | None:
    """Hold *mutexes* until *stack* is closed. If one is held elsewhere, hold none and return its title. Never waits."""
    for title, file in ((f"mutex {name}", quote(name, safe="")) for name in mutexes):
        try:
            stack.enter_context(exclusive(folder / file, title, wait=False))
        except Busy:
            stack.close()
            return title
    return None


class MemoEntry(Record):
    template: str
    run: str
    """The run that computed it."""
    created_at: datetime
    outputs: dict[str, str]


def memo_path(folder: Path, cache: str, key: str) -> Path:
    if not KEY.fullmatch(key):
        hint = "pass a sha256 as hex instead of the text"
        raise ConfigError(f"memoize.key {key!r} must be letters, digits and '-'", hint=hint)
    return folder / cache / f"{key}.json"


def remembered(path: Path, max_age_s: float | None) -> MemoEntry | None:
    """Read the entry; None if there is none, it was created more than *max_age_s* ago, or it is damaged."""
    entry = MemoEntry.read_if_intact(path)
    too_old = entry and max_age_s is not None and (datetime.now(UTC) - entry.created_at).total_seconds() > max_age_s
    return None if too_old else entry
