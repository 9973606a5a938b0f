"""The state of a task during a run: its inputs, its attempts, or the tasks within it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.local.attempt import Attempt, Prepared
from pipeline.local.manifest import Task, Template, Unresolved, substitute
from pipeline.local.workflow import Workflow
from pipeline.runs import expressions
from pipeline.runs.graph import Graph
from pipeline.runs.state import Node, Phase, RunState


@dataclass
class Job:
    """One task: it runs a container or an inner DAG, or is suspended."""

    task: Task
    template: Template
    node: Node
    dag: ActiveDag
    """The DAG that it is a task of."""
    memo: Path | None = None
    """The file that keeps its outputs for other runs, once its inputs are known."""
    prepared: Prepared | None = None
    """For a container: set once its dependencies are met and its ``when`` holds."""
    inner: ActiveDag | None = None
    """For a dag template: the DAG, from the same moment."""
    running: Attempt | None = None
    locks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    not_before: float = 0.0
    """The end of a retry's backoff, as time.monotonic()."""

    @property
    def suspended(self) -> bool:
        return self.template.suspend is not None and self.node.phase == "Running"

    @property
    def entered(self) -> bool:
        """Whether its dependencies were met and its ``when`` held."""
        return bool(self.prepared or self.inner) or self.suspended

    def deadline(self) -> tuple[float, str] | None:
        """Return the time at which its attempt is stopped, as time.monotonic(), and the message."""
        limit_s = self.template.active_deadline_seconds
        if limit_s is None or self.running is None or self.running.reason:
            return None
        return self.running.since + limit_s, f"took longer than {limit_s:g} s (activeDeadlineSeconds)"

    def inputs(self) -> dict[str, str]:
        """Return the values of its template's inputs, by reference."""
        scope = self.dag.scope()
        return {
            f"inputs.parameters.{parameter.name}": substitute(parameter.value, scope)
            for parameter in self.task.arguments.parameters
        }

    def skipped_by(self) -> str:
        """Its ``when`` with values, if it is false; else empty."""
        text = substitute(self.task.when, self.dag.scope())
        if not text or expressions.holds(expressions.parse(text, "when"), str):
            return ""
        return text

    def origin(self) -> Job:
        """Return the innermost task that made it fail; itself if it holds none."""
        within = self.inner.culprit() if self.inner else None
        return within.origin() if within else self

    def release(self) -> None:
        """Release its locks; it no longer runs."""
        self.locks.close()
        self.running = None


@dataclass
class ActiveDag:
    """A dag during a run: the entrypoint's, or one that a task of another runs."""

    template: Template
    graph: Graph
    base: Mapping[str, str]
    """The values of references to the workflow."""
    inputs: Mapping[str, str]
    jobs: dict[str, Job] = field(default_factory=dict)
    """The key is the task; in the order of the DAG."""

    @classmethod
    def of(
        cls,
        workflow: Workflow,
        state: RunState,
        template: Template,
        base: Mapping[str, str],
        inputs: Mapping[str, str] | None = None,
        parent: str = "",
    ) -> ActiveDag:
        """Return a dag with its jobs; nodes that the run lacks are added to it."""
        dag = cls(template, workflow.graphs[template.name], base, inputs or {})
        tasks, present = {task.name: task for task in template.tasks}, {node.name: node for node in state.nodes}
        for node in workflow.nodes(template, parent):
            if node.name not in present:
                state.add(node)
            task = tasks[node.display_name]
            job = Job(task, workflow.templates[task.template], present.get(node.name, node), dag)
            dag.jobs[task.name] = job
        return dag

    @property
    def finished(self) -> bool:
        return all(job.node.finished for job in self.jobs.values())

    def phases(self) -> dict[str, Phase]:
        return {name: job.node.phase for name, job in self.jobs.items() if job.node.finished}

    def culprit(self) -> Job | None:
        """Return the failed task that made it fail; None if it did not fail."""
        name = self.graph.culprit(self.phases())
        return self.jobs[name] if name else None

    def scope(self) -> Scope:
        return Scope({**self.base, **self.inputs}, self.jobs)

    def outputs(self) -> dict[str, str]:
        """Return the outputs of its template, once its tasks have ended."""
        scope = self.scope()
        return {
            parameter.name: substitute(parameter.value_from.parameter, scope)
            for parameter in self.template.outputs.parameters
        }


@dataclass(frozen=True)
class Scope:
    """The values of references: those known by name, and the outputs of the tasks of the same DAG."""

    values: Mapping[str, str]
    jobs: Mapping[str, Job] = field(default_factory=dict)

    def __call__(self, reference: str) -> str:
        """Look a reference up. Raises: Unresolved."""
        if reference in self.values:
            return self.values[reference]
        match reference.split("."):
            case ["tasks", task, "outputs", "parameters", name] if task in self.jobs:
                node = self.jobs[task].node
                if name not in node.outputs:
                    raise Unresolved(reference, f"{task} is {node.phase}")
                return node.outputs[name]
        raise Unresolved(reference, "it is known only in the exit handler")
