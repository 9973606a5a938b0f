"""Finds runs in the store, reads their logs and results, and stops them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from pipeline.local.folder import LOCK, LOGS, WORKFLOW, read_run
from pipeline.local.node_names import log_file
from pipeline.runs.state import LATEST, RunState
from stages.parts.base.errors import ConfigError, MissingRun
from stages.report.run_report import JSON, RunReport

RUN_ID: Final = re.compile(r"^\d{8}-\d{6}-[0-9a-f]{4}$")
FOLLOW_S: Final = 0.2


@dataclass(frozen=True)
class Run:
    """One run: its folder and its state."""

    path: Path
    state: RunState

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def model(self) -> str:
        return self.state.arguments.get("model", "")

    def report(self) -> RunReport | None:
        """The report that the exit handler wrote; None while the run goes on, or if it was killed before."""
        return RunReport.read(self.path / JSON)

    @property
    def winner(self) -> str | None:
        report = self.report()
        return report.decision.winner if report and report.decision else None

    @property
    def outcome(self) -> str | None:
        report = self.report()
        return report.decision.outcome if report and report.decision else None

    def log(self, task: str) -> Path:
        """The file of a task's log. Raises: MissingRun: the task has not started."""
        path = self.path / LOGS / log_file(task)
        if not path.exists():
            raise MissingRun(f"{task} of run {self.id} has no log: it has not started, or was cached")
        return path


def new_id(now: datetime) -> str:
    """A new run's id. Ids sort by start; four random digits distinguish runs that start in the same second."""
    return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def all_runs(store: Path) -> list[Run]:
    """All runs of all models, the newest first."""
    return sorted(_found(store), key=lambda run: run.id, reverse=True)


def find(store: Path, name: str) -> Run:
    """Find a run by its id, the beginning of its id, or 'latest'.

    Raises:
        MissingRun: there is none, or more than one.
    """
    runs = all_runs(store)
    matches = runs[:1] if name == LATEST else [run for run in runs if run.id.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    known = ", ".join(run.id for run in runs[:5]) or "none yet"
    problem = "matches several runs" if matches else "is not a run"
    raise MissingRun(f"{name!r} {problem} in {store}", hint=f"the latest: {known}")


def folder(store: Path, name: str) -> Path:
    """The folder of a run as ``find``, also of one that a cluster made, which keeps its state there.

    Raises:
        MissingRun: there is none, or more than one.
    """
    runs = sorted(store.glob("*/runs/*"), key=lambda each: each.stat().st_mtime, reverse=True)
    exact = [run for run in runs if run.name == name]
    matches = exact or [run for run in runs if name == LATEST or run.name.startswith(name)]
    if len(matches) == 1 or (matches and name == LATEST):
        return matches[0]
    problem = "matches several runs" if matches else "is not a run"
    known = ", ".join(run.name for run in runs[:5]) or "none yet"
    raise MissingRun(f"{name!r} {problem} in {store}", hint=f"the latest: {known}")


def read_workflow(run: Path) -> dict[str, Any]:
    """Read what a run executed: its ``manifest`` and its ``arguments``."""
    kept: dict[str, Any] = json.loads((run / WORKFLOW).read_text(encoding="utf-8"))
    return kept


def stop(run: Run) -> bool:
    """Ask the engine of a run to stop its tasks and write its report, and wait; False if the run has ended.

    Raises:
        ConfigError: the run belongs to another user.
    """
    lock = run.path / LOCK
    engine = _engine(lock)
    if engine is None:
        return False
    try:
        os.kill(engine, signal.SIGTERM)
    except PermissionError as error:
        raise ConfigError(f"run {run.id} belongs to another user (process {engine})") from error
    except ProcessLookupError:  # it has just ended
        return False
    while _engine(lock) == engine:
        time.sleep(FOLLOW_S)
    return True


def _engine(lock: Path) -> int | None:
    """The process that holds a run's lock, as the kernel reports it."""
    import psutil

    try:
        inode = lock.stat().st_ino
        entries = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return None
    for entry in entries:
        if entry[1] == "FLOCK" and entry[5].rpartition(":")[2] == str(inode):
            with contextlib.suppress(psutil.Error):  # inodes are unique only within one file system: check the path
                if any(Path(file.path) == lock.resolve() for file in psutil.Process(int(entry[4])).open_files()):
                    return int(entry[4])
    return None


def _found(store: Path) -> Iterator[Run]:
    for path in store.glob("*/runs/*"):
        if RUN_ID.match(path.name):
            with contextlib.suppress(MissingRun):  # killed before it wrote anything
                yield Run(path, read_run(path))


def read_logs(run: Run, task: str | None, *, follow: bool) -> Iterator[str]:
    """The lines of one task's log; or of all tasks that have started, each line led by its task's name.

    Args:
        follow: wait for more lines until the run has ended.

    Raises:
        UnknownName: the run has no such task.
        MissingRun: it has not started.
    """
    if task is not None:
        task = run.state.with_log(task)
        run.log(task)
    positions: dict[str, int] = {}
    while True:
        state = read_run(run.path)
        ended = state.phase not in ("Pending", "Running")
        for name in [node.name for node in state.nodes if task in (None, node.name)]:
            path = run.path / LOGS / log_file(name)
            if not path.exists():
                continue
            with path.open(encoding="utf-8", errors="replace") as log:
                log.seek(positions.get(name, 0))
                lead = "" if task else f"{name}: "
                yield from (lead + line for line in log)
                positions[name] = log.tell()
        if ended or not follow:
            return
        time.sleep(FOLLOW_S)
