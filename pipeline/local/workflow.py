"""A compiled workflow with the graphs of its dags, and the state of its tasks during a run.

``Workflow.bind`` adds the arguments of one run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.local.attempt import Attempt, Prepared
from pipeline.local.manifest import Manifest, Spec, Task, Template, Unresolved, Volume, substitute
from pipeline.local.resources import MachineResources, request
from pipeline.runs import expressions
from pipeline.runs.graph import Graph
from pipeline.runs.state import EXIT_NODE, Node, Phase, RunState
from stages.parts.base.errors import ConfigError, check_known
from stages.parts.base.settings import parse as parse_model


@dataclass(frozen=True)
class Workflow:
    name: str
    spec: Spec
    templates: dict[str, Template]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The entrypoint's, in DAG order."""
        tasks = {task.name: task for task in self.templates[self.spec.entrypoint].tasks}
        return tuple(tasks[name] for name in graph_of(tuple(tasks.values())).depends)

    @property
    def ending(self) -> tuple[Task, ...]:
        """The exit handler as a DAG of one task; none without one."""
        return (Task(name=EXIT_NODE, template=self.spec.on_exit),) if self.spec.on_exit else ()

    def bind(self, arguments: Mapping[str, str]) -> dict[str, str]:
        """Return the values of the workflow's parameters for one run: *arguments*, else the manifest's own values."""
        parameters = {parameter.name: parameter for parameter in self.spec.arguments.parameters}
        for name in arguments:
            check_known("workflow parameter", name, parameters)
        values = {name: arguments.get(name, parameter.value) for name, parameter in parameters.items()}
        bound = {name: value for name, value in values.items() if value is not None}
        if unbound := [name for name in values if name not in bound]:
            lines = "".join(f"\n    {name}: needs a value" for name in unbound)
            raise ConfigError(f"the workflow's arguments{lines}")
        return bound

    def check_machine(
        self, mounts: Mapping[str, Path], capacity: MachineResources, environment: Mapping[str, str]
    ) -> None:
        """Check GPUs, folders and secrets before anything starts. Raises: ConfigError: names what each task lacks."""

        def lacks(template: Template) -> Iterator[str]:
            resources, volumes = template.program.resources, self.volumes(template)
            if (gpus := request(resources.requests, resources.limits).gpus) > len(capacity.gpus):
                yield f"asks for {gpus} GPU{'s' * (gpus > 1)}, this machine has {len(capacity.gpus)}"
            for mount in template.program.volume_mounts:
                if volumes[mount.name].persistent_volume_claim and mount.mount_path not in mounts:
                    yield f"mounts volume {mount.name!r} at {mount.mount_path}, and no local folder stands for it"
            for name, optional in template.program.secrets().items():
                if not optional and name not in environment:
                    yield f"needs a secret: set the environment variable {name}"

        if lines := [f"    {task} {lack}" for task, template in self.used() for lack in lacks(template)]:
            raise ConfigError(
                "this machine can't run the workflow\n" + "\n".join(lines),
                hint="change what the platform's configuration asks for, or run it on a larger machine",
            )

    def volumes(self, template: Template) -> dict[str, Volume]:
        return {volume.name: volume for volume in (*self.spec.volumes, *template.volumes)}

    def used(self) -> Iterator[tuple[str, Template]]:
        """Every container that may run, with the name of its node; the exit handler comes last."""
        return ((task.name, self.templates[task.template]) for task in (*self.tasks, *self.ending))


def graph_of(tasks: tuple[Task, ...]) -> Graph:
    return Graph.of({task.name: task.depends for task in tasks})


def parse(manifest: Mapping[str, Any]) -> Workflow:
    """Read a compiled WorkflowTemplate or Workflow.

    Raises:
        ConfigError: it has fields that the local engine does not run, each of which is named by its path, or tasks
            that run no container, or that depend on each other in a circle.
    """
    read = parse_model(Manifest, manifest, "the workflow")
    templates = {template.name: template for template in read.spec.templates}
    workflow = Workflow(read.metadata.name or "workflow", read.spec, templates)
    for task in (*workflow.tasks, *workflow.ending):
        template = templates.get(task.template)
        if template is None or template.container is None:
            raise ConfigError(f"task {task.name!r} runs {task.template!r}, which is no template with a container")
    return workflow


@dataclass
class Job:
    """One task, which runs a container."""

    task: Task
    template: Template
    node: Node
    dag: ActiveDag
    """The DAG that it is a task of."""
    memo: Path | None = None
    """The file that keeps its outputs for other runs, once its inputs are known."""
    prepared: Prepared | None = None
    """Set once its dependencies are met and its ``when`` holds."""
    running: Attempt | None = None
    locks: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    not_before: float = 0.0
    """The end of a retry's backoff, as time.monotonic()."""

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
            f"inputs.parameters.{parameter.name}": substitute(parameter.value or "", scope)
            for parameter in self.task.arguments.parameters
        }

    def skipped_by(self) -> str:
        """Its ``when`` with values, if it is false; else empty."""
        text = substitute(self.task.when, self.dag.scope())
        if not text or expressions.holds(expressions.parse(text, "when"), str):
            return ""
        return text

    def release(self) -> None:
        """Release its locks; it no longer runs."""
        self.locks.close()
        self.running = None


@dataclass
class ActiveDag:
    """The entrypoint's tasks, or the exit handler, during a run."""

    graph: Graph
    base: Mapping[str, str]
    """The values of references to the workflow."""
    jobs: dict[str, Job] = field(default_factory=dict)
    """The key is the task; in the order of the DAG."""

    @classmethod
    def of(cls, workflow: Workflow, state: RunState, tasks: tuple[Task, ...], base: Mapping[str, str]) -> ActiveDag:
        """Return a dag with its jobs, whose nodes *state* has."""
        dag = cls(graph_of(tasks), base)
        dag.jobs = {
            task.name: Job(task, workflow.templates[task.template], state.node(task.name), dag) for task in tasks
        }
        return dag

    def phases(self) -> dict[str, Phase]:
        return {name: job.node.phase for name, job in self.jobs.items() if job.node.finished}

    def scope(self) -> Scope:
        return Scope(self.base, self.jobs)


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
