"""A DAG of tasks: which tasks may start, which never will, and whether the DAG failed, given the phases so far.

As in Argo (workflow/controller/dag.go, ``evaluateDependsLogic`` and ``assessDAGPhase``): a task is decided once all
that it depends on is finished; the DAG is judged by its leaves; a leaf that did not run inherits the failure of
what kept it from running.
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from pipeline.runs.expressions import Condition, Junction, Operand, holds, names, parse
from pipeline.runs.state import FAILED, Phase
from stages.parts.base.errors import ConfigError

Phases: TypeAlias = Mapping[str, Phase]
"""The phases of the finished tasks, by task."""
RESULTS: Final[dict[str, Phase]] = {
    "Succeeded": "Succeeded",
    "Failed": "Failed",
    "Errored": "Error",
    "Skipped": "Skipped",
    "Omitted": "Omitted",
}
ENDS: Final[dict[Phase, str]] = {
    "Succeeded": "succeeded",
    "Failed": "failed",
    "Error": "failed",
    "Skipped": "was skipped",
    "Omitted": "was not started",
}
"""How a task with a phase ended, in a sentence."""


@dataclass(frozen=True)
class Graph:
    depends: dict[str, Condition | None]
    """In DAG order: a task comes after those that it depends on; otherwise the order is that of the manifest."""

    @classmethod
    def of(cls, tasks: Mapping[str, str]) -> Graph:
        """Read the graph from the ``depends`` of each task; an empty text where it depends on nothing."""
        depends = {name: _read(name, text, tasks) for name, text in tasks.items()}
        parents = {name: _tasks(condition) for name, condition in depends.items()}
        return cls({name: depends[name] for name in _order(parents)})

    def parents(self, task: str) -> tuple[str, ...]:
        return _tasks(self.depends[task])

    def may_run(self, task: str, phases: Phases) -> bool | None:
        """Whether the task may run; None while a task that it depends on is not finished."""
        if any(parent not in phases for parent in self.parents(task)):
            return None
        return self._allowed(task, phases)

    def why_not(self, task: str, phases: Phases) -> str:
        """Return a sentence that says which tasks keep *task* from being started."""
        blamed = dict.fromkeys(_failing(self.depends[task], phases))
        ends = [f"{name} {ENDS[phases[name]]}" for name in blamed if name in phases]
        return f"not started, because {' and '.join(ends)}" if ends else "not started"

    def culprit(self, phases: Phases) -> str | None:
        """Return the failed task because of which the DAG failed; None if it did not fail."""
        blamed: dict[str, str] = {}
        for task in self.depends:
            if task in phases and (name := self._blamed(task, phases, blamed)):
                blamed[task] = name
        inner = {parent for task in self.depends for parent in self.parents(task)}
        return next((blamed[task] for task in self.depends if task in blamed and task not in inner), None)

    def _allowed(self, task: str, phases: Phases) -> bool:
        condition = self.depends[task]
        return condition is None or holds(condition, lambda name: _result(name, phases))

    def _blamed(self, task: str, phases: Phases, blamed: Mapping[str, str]) -> str | None:
        """Return the failed task that *task* stands for: itself, or the one that kept it from running."""
        if phases[task] in FAILED:
            return task
        if phases[task] == "Succeeded":
            return None
        guilty = [parent for parent in self.parents(task) if parent in blamed]
        # The task tolerates the other failures: it might have run if the first of these had succeeded.
        decisive = (parent for parent in guilty if self._allowed(task, {**phases, parent: "Succeeded"}))
        culprit = next(decisive, guilty[0] if guilty else None)
        return blamed[culprit] if culprit else None


def _read(task: str, depends: str, tasks: Mapping[str, str]) -> Condition | None:
    if not depends:
        return None
    condition = parse(depends, "depends")
    for name in names(condition):
        dependency, _, result = name.partition(".")
        if dependency not in tasks:
            raise ConfigError(f"task {task!r} depends on {dependency!r}, which is not a task of the dag")
        if result and result not in RESULTS:
            raise ConfigError(f"depends of task {task!r}: {name!r}: known results are {', '.join(RESULTS)}")
    return condition


def _result(name: str, phases: Phases) -> bool:
    task, _, result = name.partition(".")
    if result:
        return phases.get(task) == RESULTS[result]
    return phases.get(task) in ("Succeeded", "Skipped")


def _failing(condition: Condition | None, phases: Phases) -> Iterator[str]:
    """Return the tasks by which a ``depends`` does not hold."""
    match condition:
        case Operand(name) if not _result(name, phases):
            yield name.partition(".")[0]
        case Junction(_, parts) if not holds(condition, lambda name: _result(name, phases)):
            for part in parts:
                yield from _failing(part, phases)


def _tasks(condition: Condition | None) -> tuple[str, ...]:
    """Return the tasks in a ``depends``, each once."""
    return tuple(dict.fromkeys(name.partition(".")[0] for name in names(condition))) if condition else ()


def _order(parents: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Sort by depth, then as in the manifest."""
    depth: dict[str, int] = {}
    try:
        for task in graphlib.TopologicalSorter(parents).static_order():
            depth[task] = 1 + max((depth[parent] for parent in parents[task]), default=0)
    except graphlib.CycleError as error:
        raise ConfigError(f"tasks depend on each other in a circle: {' → '.join(error.args[1])}") from error
    return sorted(parents, key=lambda task: depth[task])
