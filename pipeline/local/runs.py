"""Finds runs in the store, reads their logs and results, and stops them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from rich.console import Group

from pipeline.local.folder import LOCK, log_file, read_run, resume
from pipeline.runs.engine import Printout, choose_run
from pipeline.runs.state import RunState
from pipeline.runs.tables import score_table, tasks_table
from stages.parts.base.errors import ConfigError, MissingRun
from stages.parts.base.files import end_holder, holder
from stages.parts.records.production import Production
from stages.parts.releases.signing import signer_of
from stages.report.run_report import JSON, RunReport

FOLLOW_S: Final = 0.2


@dataclass(frozen=True)
class LocalRun:
    """One run: its folder and its state. See ``pipeline.runs.engine.PipelineRun``."""

    path: Path
    state: RunState

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def page(self) -> Path:
        return self.path / "report.html"

    @property
    def link(self) -> str | None:
        return str(self.page.absolute()) if self.page.exists() else None

    @cached_property
    def written(self) -> RunReport | None:
        """The report that the exit handler wrote; None while the run goes on, or if it was killed before."""
        return RunReport.read(self.path / JSON)

    @property
    def decision(self) -> Production | None:
        return self.written.decision if self.written else None

    @property
    def winner(self) -> str | None:
        return self.decision.winner if self.decision else None

    @property
    def outcome(self) -> str | None:
        return self.decision.ended if self.decision else None

    def show(self) -> Printout:
        parts: list[Any] = [f"{self.state.model}  run {self.id}  {self.state.phase}\n", tasks_table(self)]
        if self.decision:
            parts += ["", score_table(self.decision), "", self.decision.reason, *self.decision.notes]
        if self.written:
            parts += [*(f"watched: {look}" for look in self.written.watched), f"report: {self.page}"]
        report = self.written and self.written.model_dump(mode="json")
        document = {"run": self.state.model_dump(mode="json"), "report": report}
        if (production := self.path.parents[1] / "production").is_dir():
            release, signer = production.resolve().name, signer_of(production)
            by = f"signed by {signer[:16]}…{signer[64:]}" if signer else "not signed"
            parts.append(f"in production: {release}, {by}")
            document["production"] = {"release": release, "signer": signer}
        return Printout(document, Group(*parts))

    def report(self) -> Printout:
        if self.written is None:
            raise MissingRun(f"run {self.id} has no report: it is {self.state.phase}", hint=f"slipway show {self.id}")
        return Printout(self.written.model_dump(mode="json"), str(self.page.absolute()))

    def logs(self, task: str | None, *, follow: bool) -> Iterator[str]:
        if task is not None:
            task = self.state.with_log(task)
            if not (self.path / log_file(task)).exists():
                raise MissingRun(f"{task} of run {self.id} has no log: it has not started, or was cached")
        positions: dict[str, int] = {}
        while True:
            state = read_run(self.path)
            for name in [node.name for node in state.nodes if task in (None, node.name)]:
                path = self.path / log_file(name)
                if not path.exists():
                    continue
                with path.open(encoding="utf-8", errors="replace") as log:
                    log.seek(positions.get(name, 0))
                    lead = "" if task else f"{name}: "
                    yield from (lead + line for line in log)
                    positions[name] = log.tell()
            if state.phase not in ("Pending", "Running") or not follow:
                return
            time.sleep(FOLLOW_S)

    def stop(self) -> bool:
        """Ask the engine to stop the run's tasks and write its report, and wait; False if the run has ended."""
        if not (engine := holder(self.path / LOCK)):
            return False
        try:
            end_holder(self.path / LOCK, engine, f"run {self.id}")
        except PermissionError as error:
            raise ConfigError(f"run {self.id} belongs to another user (process {engine})") from error
        while holder(self.path / LOCK) == engine:
            time.sleep(FOLLOW_S)
        return True

    def resume(self, task: str | None) -> list[str]:
        return resume(self.path, task)


def folder(store: Path, name: str) -> Path:
    """Find the folder of a run by its id, the beginning of its id, or 'latest', also of one that a cluster made; or by
    its path, such as a copy from another machine."""
    if (Path(name) / "measurements").is_dir():
        return Path(name).resolve()
    newest_first = sorted(store.glob("*/runs/*"), key=lambda path: path.stat().st_mtime, reverse=True)
    return choose_run(name, {path.name: path for path in newest_first}, str(store))
