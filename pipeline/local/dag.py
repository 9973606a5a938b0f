"""What follows from the phases of a DAG's tasks: which may start, which never will, whether the DAG failed.

As in Argo (workflow/controller/dag.go, ``evaluateDependsLogic`` and ``assessDAGPhase``): a task is decided once all
that it depends on is finished; the DAG is judged by its leaves; a leaf that did not run inherits the failure of
what kept it from running. ``failFast`` is as Argo documents it: nothing starts any more once a leaf is certain to fail.

``steps`` are read as a DAG in which each step depends on all steps of the group before it.
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from pipeline.local.expressions import DEPENDS, Expression, Value, decide, names, parse
from pipeline.local.manifest import Dag, Step, Task
from pipeline.local.state import Phase
from stages.parts.base.errors import ConfigError

Phases: TypeAlias = Mapping[str, Phase]
"""Of the finished tasks only."""
Members: TypeAlias = Mapping[str, tuple[Phase, ...]]
"""The phases of a fanned-out task's items, by task."""
FAILED: Final[frozenset[Phase]] = frozenset({"Failed", "Error"})
RESULTS: Final[dict[str, Phase]] = {
    "Succeeded": "Succeeded",
    "Failed": "Failed",
    "Errored": "Error",
    "Skipped": "Skipped",
    "Omitted": "Omitted",
}
OF_ITEMS: Final = ("AnySucceeded", "AllFailed")
"""Results of a task with withItems, withParam or withSequence; false for any other (docs/enhanced-depends-logic.md)."""


@dataclass(frozen=True)
class Graph:
    tasks: dict[str, Task]
    """In DAG order: what a task depends on comes before it, otherwise as in the manifest."""
    depends: dict[str, Expression | None]
    fail_fast: bool = True

    @classmethod
    def of(cls, dag: Dag) -> Graph:
        """Raises: ConfigError: a ``depends`` that can't be read, names no task or no result, or a cycle."""
        _check(dag)
        known = {task.name: task for task in dag.tasks}
        depends = {task.name: _depends(task, known) for task in dag.tasks}
        order = _order({name: _named(expression) for name, expression in depends.items()})
        return cls({name: known[name] for name in order}, depends, dag.fail_fast)

    @classmethod
    def of_steps(cls, groups: Sequence[Sequence[Step]]) -> Graph:
        """Raises: ConfigError: two steps have one name."""
        tasks: list[Task] = []
        before: tuple[str, ...] = ()
        for group in groups:
            tasks += [Task.model_construct(**{**vars(step), "depends": "", "dependencies": before}) for step in group]
            before = tuple(step.name for step in group)
        known = {task.name: task for task in tasks}
        if len(known) < len(tasks):
            raise ConfigError("two steps have the same name")
        # A group runs to its end even if one of its steps fails; the next one then doesn't start.
        return cls(known, {name: _depends(task, known) for name, task in known.items()}, fail_fast=False)

    def parents(self, task: str) -> tuple[str, ...]:
        return _named(self.depends[task])

    def ancestors(self, task: str) -> set[str]:
        found: set[str] = set()
        wave = set(self.parents(task))
        while wave:
            found |= wave
            wave = {parent for each in wave for parent in self.parents(each)} - found
        return found

    def condition(self, task: str) -> str:
        """Its ``depends`` as written, for messages."""
        return self.tasks[task].depends or " && ".join(self.tasks[task].dependencies)

    def leaves(self) -> Iterator[str]:
        inner = {parent for task in self.tasks for parent in self.parents(task)}
        return (task for task in self.tasks if task not in inner)

    def may_run(self, task: str, phases: Phases, members: Members) -> bool | None:
        """None while something that it depends on is not finished."""
        if any(parent not in phases for parent in self.parents(task)):
            return None
        return self._holds(task, phases, members)

    def culprit(self, phases: Phases, members: Members) -> str | None:
        """The failed task for which the DAG fails, given what is finished so far; None if none is certain to."""
        certain = dict(phases)
        blamed: dict[str, str] = {}
        for task in self.tasks:
            if task not in certain and self._holds(task, certain, members) is False:
                certain[task] = "Omitted"
            if task in certain and (name := self._blamed(task, certain, members, blamed)):
                blamed[task] = name
        return next(
            (
                blamed[leaf]
                for leaf in self.leaves()
                if leaf in blamed and not self._tolerated(leaf, certain[blamed[leaf]])
            ),
            None,
        )

    def _holds(self, task: str, phases: Phases, members: Members) -> bool | None:
        expression = self.depends[task]
        return True if expression is None else decide(expression, lambda name: self._result(name, phases, members))

    def _result(self, name: str, phases: Phases, members: Members) -> Value:
        task, _, result = name.partition(".")
        if task not in phases:
            return None
        phase, items = phases[task], members.get(task, ())
        if result == "AnySucceeded":
            return "Succeeded" in items
        if result == "AllFailed":
            return set(items) == {"Failed"}
        if result:
            return phase == RESULTS[result]
        return phase in ("Succeeded", "Skipped") or self._tolerated(task, phase)

    def _tolerated(self, task: str, phase: Phase) -> bool:
        allowed = self.tasks[task].continue_on
        return allowed is not None and ((allowed.failed and phase == "Failed") or (allowed.error and phase == "Error"))

    def _blamed(self, task: str, phases: Phases, members: Members, blamed: Mapping[str, str]) -> str | None:
        """The failed task whose failure *task* stands for: itself, or what kept it from running."""
        if phases[task] in FAILED:
            return task
        if phases[task] == "Succeeded":
            return None
        guilty = [parent for parent in self.parents(task) if parent in blamed]
        # Of several, the one without whose failure the task might have run; others may be failures it tolerates.
        for parent in guilty:
            if self._holds(task, {**phases, parent: "Succeeded"}, members) is not False:
                return blamed[parent]
        return blamed[guilty[0]] if guilty else None


def _check(dag: Dag) -> None:
    """What Argo forbids between tasks (workflow/validate/validate.go, ``validateDAG``)."""
    by_depends = [task for task in dag.tasks if task.depends]
    for task in dag.tasks:
        if task.dependencies and by_depends:
            raise ConfigError(
                f"task {task.name!r} has dependencies and {by_depends[0].name!r} depends; "
                "a dag can't have both depends and dependencies"
            )
        if task.continue_on is not None and by_depends:
            raise ConfigError(
                f"task {task.name!r} has continueOn, which goes only with dependencies; "
                f"with depends, write '{task.name}.Failed' or '{task.name}.Errored' where it is depended on"
            )
        if (by_depends or task.dependencies) and task.name[0].isdigit():
            raise ConfigError(f"task {task.name!r}: with depends or dependencies, names begin with a letter")


def _depends(task: Task, known: Mapping[str, Task]) -> Expression | None:
    if not (text := task.depends or " && ".join(task.dependencies)):
        return None
    expression = parse(text, DEPENDS)
    for name in names(expression):
        dependency, _, result = name.partition(".")
        if dependency not in known:
            raise ConfigError(f"task {task.name!r} depends on {dependency!r}, which is no task of the dag")
        if result == "Daemoned":
            raise ConfigError(f"depends of task {task.name!r}: {name!r}: daemons don't run here")
        if result and result not in (*RESULTS, *OF_ITEMS):
            known_results = ", ".join((*RESULTS, *OF_ITEMS))
            raise ConfigError(f"depends of task {task.name!r}: {name!r}: known results are {known_results}")
    return expression


def _named(expression: Expression | None) -> tuple[str, ...]:
    """The tasks in a ``depends``, each once."""
    return tuple(dict.fromkeys(name.partition(".")[0] for name in names(expression))) if expression else ()


def _order(parents: Mapping[str, tuple[str, ...]]) -> list[str]:
    """By depth, then as in the manifest."""
    depth: dict[str, int] = {}
    try:
        for task in graphlib.TopologicalSorter(parents).static_order():
            depth[task] = 1 + max((depth[parent] for parent in parents[task]), default=0)
    except graphlib.CycleError as error:
        raise ConfigError(f"tasks depend on each other in a circle: {' → '.join(error.args[1])}") from error
    return sorted(parents, key=lambda task: depth[task])
