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
from pipeline.local.manifest import Dag, Manifest, Spec, Task, Template, Unresolved, Volume, substitute
from pipeline.local.resources import MachineResources, request
from pipeline.runs import expressions
from pipeline.runs.graph import Graph
from pipeline.runs.state import EXIT_NODE, Kind, Node, Phase, RunState
from stages.parts.base.errors import ConfigError, check_known
from stages.parts.base.settings import parse as parse_model


@dataclass(frozen=True)
class Workflow:
    name: str
    spec: Spec
    templates: dict[str, Template]
    graphs: dict[str, Graph]
    """The graphs of the dag templates, by template."""

    @property
    def entrypoint(self) -> Template:
        return self.templates[self.spec.entrypoint]

    @property
    def exit_handler(self) -> Template | None:
        """A dag with the exit handler as its only task."""
        return self.templates.get(EXIT_NODE)

    def nodes(self, template: Template, parent: str = "") -> list[Node]:
        """Make the nodes of a dag's tasks, in the order of the dag. *parent* is the node that holds them."""
        tasks, nodes = {task.name: task for task in template.tasks}, []
        for name in self.graphs[template.name].depends:
            runs = self.templates[tasks[name].template]
            kind: Kind = "DAG" if runs.dag else "Suspend" if runs.suspend else "Pod"
            nodes.append(
                Node(name=inside(parent, name), display_name=name, template=runs.name, kind=kind, parent=parent)
            )
        return nodes

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
            hint = "change what the platform's configuration asks for, or run it on a larger machine"
            raise ConfigError("this machine can't run the workflow\n" + "\n".join(lines), hint=hint)

    def volumes(self, template: Template) -> dict[str, Volume]:
        return {volume.name: volume for volume in (*self.spec.volumes, *template.volumes)}

    def used(self) -> Iterator[tuple[str, Template]]:
        """Every container that may run, with the name of its node; the exit handler comes last."""
        for template in filter(None, (self.entrypoint, self.exit_handler)):
            yield from self._within("", template)

    def _within(self, name: str, template: Template) -> Iterator[tuple[str, Template]]:
        if template.container:
            yield name, template
        for task in template.tasks:
            yield from self._within(inside(name, task.name), self.templates[task.template])


def inside(outer: str, name: str) -> str:
    """Name a node within another one, as Argo does: ``evaluate.load``."""
    return f"{outer}.{name}" if outer else name


def parse(manifest: Mapping[str, Any]) -> Workflow:
    """Read a compiled WorkflowTemplate or Workflow. Raises: ConfigError: it has fields that the local engine does not
    run, each of which is named by its path, or its tasks depend on each other in a circle."""
    read = parse_model(Manifest, manifest, "the workflow")
    templates = {template.name: template for template in read.spec.templates}
    if read.spec.on_exit:
        ending = {"tasks": [{"name": EXIT_NODE, "template": read.spec.on_exit}], "failFast": False}
        templates[EXIT_NODE] = Template(name=EXIT_NODE, dag=Dag.model_validate(ending))
    graphs = {
        name: Graph.of({task.name: task.depends for task in template.tasks})
        for name, template in templates.items()
        if template.dag
    }
    return Workflow(read.metadata.name or "workflow", read.spec, templates, graphs)


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
            f"inputs.parameters.{each.name}": substitute(each.value, scope) for each in self.task.arguments.parameters
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
        return {each.name: substitute(each.value_from.parameter, scope) for each in self.template.outputs.parameters}


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
