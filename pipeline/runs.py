"""Finding runs in the store, and reading what they left."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from pipeline.local.state import LOGS, RunState, read_run
from stages.errors import MissingRun, UnknownName
from stages.report import JSON, RunReport

RUN_ID: Final = re.compile(r"^\d{8}-\d{6}-[0-9a-f]{4}$")
LATEST: Final = "latest"
FOLLOW_S: Final = 0.2


@dataclass(frozen=True)
class Run:
    """One run's folder and what it says."""

    path: Path
    state: RunState

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def model(self) -> str:
        return self.state.arguments.get("model", "")

    def report(self) -> RunReport | None:
        """What the run's exit handler wrote; None while it runs, or if it was killed before."""
        return RunReport.read(self.path / JSON)

    def log(self, task: str) -> Path:
        """A task's log.

        Raises:
            UnknownName: the run has no such task.
            MissingRun: the task has not started.
        """
        known = [node.name for node in self.state.nodes]
        if task not in known:
            raise UnknownName("task", task, known)
        path = self.path / LOGS / f"{task}.log"
        if not path.exists():
            raise MissingRun(f"{task} of run {self.id} has no log: it has not started, or was cached")
        return path


def new_id(now: datetime) -> str:
    """Sorts by start; the four random digits tell apart what starts in one second."""
    return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def all_runs(store: Path) -> list[Run]:
    """Every run of every model, the newest first."""
    return sorted(_found(store), key=lambda run: run.id, reverse=True)


def find(store: Path, name: str) -> Run:
    """A run by its id, the beginning of its id, or 'latest'.

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


def _found(store: Path) -> Iterator[Run]:
    for path in store.glob("*/runs/*"):
        if RUN_ID.match(path.name):
            with contextlib.suppress(MissingRun):  # killed before it wrote anything
                yield Run(path, read_run(path))


def read_logs(run: Run, task: str | None, *, follow: bool) -> Iterator[str]:
    """The lines of one task's log, or of all that have started, each then led by its task's name.

    With *follow*, waits for more until the run has ended.
    """
    if task is not None:
        run.log(task)
    wanted = [node.name for node in run.state.nodes if task in (None, node.name)]
    positions = dict.fromkeys(wanted, 0)
    while True:
        ended = read_run(run.path).phase not in ("Pending", "Running")
        for name in wanted:
            path = run.path / LOGS / f"{name}.log"
            if not path.exists():
                continue
            with path.open(encoding="utf-8", errors="replace") as log:
                log.seek(positions[name])
                lead = "" if task else f"{name}: "
                yield from (lead + line for line in log)
                positions[name] = log.tell()
        if ended or not follow:
            return
        time.sleep(FOLLOW_S)
