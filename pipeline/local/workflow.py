"""A compiled workflow, with the graphs of its dags. ``Workflow.bind`` adds the arguments of one run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.local.manifest import Dag, Manifest, Spec, Template, Volume
from pipeline.local.resources import MachineResources, request
from pipeline.runs.graph import Graph
from pipeline.runs.state import EXIT_NODE, Kind, Node
from stages.parts.base.errors import ConfigError, UnknownName
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
            if name not in parameters:
                raise UnknownName("workflow parameter", name, parameters)
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
            if lack := request(resources.requests, resources.limits).lacking_gpus(capacity):
                yield lack
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
    """Read a compiled WorkflowTemplate or Workflow.

    Raises:
        ConfigError: it has fields that the local engine does not run, each of which is named by its path, or its tasks
            depend on each other in a circle.
    """
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
