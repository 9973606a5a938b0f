"""A workflow that is known to be runnable: every name it uses exists, every expression can be read.

``parse`` finds all mistakes of a manifest before anything runs; ``Workflow.bind`` adds the arguments of one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.local.checking import Check
from pipeline.local.dag import Graph
from pipeline.local.manifest import Argument, Arguments, Dag, Spec, Task, Template, Volume
from pipeline.local.names import EXIT_NODE, inside
from pipeline.local.reading import read, refused
from stages.parts.base.errors import ConfigError, UnknownName, UnsupportedField


@dataclass(frozen=True)
class Workflow:
    name: str
    spec: Spec
    templates: dict[str, Template]
    graphs: dict[str, Graph]
    """Of the dag and steps templates, by name."""
    graph: Graph
    """Of the entrypoint; a template that is no graph is its only task."""
    exit_graph: Graph | None
    """One task named ``onExit``, or None."""

    def bind(self, arguments: Mapping[str, str]) -> dict[str, str]:
        """The workflow's parameters for one run: *arguments* over the manifest's own values.

        Raises:
            UnknownName: an argument that the workflow has no parameter for.
            ConfigError: a parameter without a value, or with one outside its enum; all at once.
        """
        parameters = {parameter.name: parameter for parameter in self.spec.arguments.parameters}
        for name in arguments:
            if name not in parameters:
                raise UnknownName("workflow parameter", name, parameters)
        values = {name: arguments.get(name, parameter.given) for name, parameter in parameters.items()}
        lines = [f"{name}: needs a value" for name, value in values.items() if value is None]
        for name, value in values.items():
            allowed = parameters[name].enum
            if value is not None and allowed and value not in allowed:
                lines.append(f"{name}: {value!r} is not one of {', '.join(allowed)}")
        if lines:
            raise ConfigError("the workflow's arguments\n" + "\n".join(f"    {line}" for line in lines))
        return {name: value for name, value in values.items() if value is not None}

    def volumes(self, template: Template) -> dict[str, Volume]:
        return {volume.name: volume for volume in (*self.spec.volumes, *template.volumes)}

    def used(self) -> Iterator[tuple[str, Template]]:
        """Every container that may run, by the name of its node (without items), the exit handler last."""
        for graph in filter(None, (self.graph, self.exit_graph)):
            yield from self._within("", graph)

    def _within(self, outer: str, graph: Graph) -> Iterator[tuple[str, Template]]:
        for task in graph.tasks.values():
            name = inside(outer, task.name)
            yield from self._of(name, task.template)
            if task.hooks.exit:
                yield from self._of(inside(name, EXIT_NODE), task.hooks.exit.template)

    def _of(self, name: str, template: str) -> Iterator[tuple[str, Template]]:
        if template in self.graphs:
            yield from self._within(name, self.graphs[template])
        elif self.templates[template].container:
            yield name, self.templates[template]


def parse(manifest: Mapping[str, Any]) -> Workflow:
    """The workflow of a compiled WorkflowTemplate or Workflow.

    Raises:
        UnsupportedField: it uses what the local engine does not know; every such field is named.
        ConfigError: it contradicts itself; every mistake found is named.
    """
    shape = read(manifest)
    check = Check(shape)
    check.whole()
    if check.unsupported or check.wrong:
        raise refused(UnsupportedField if check.unsupported else ConfigError, [*check.unsupported, *check.wrong])
    spec, known, graphs = shape.spec, check.known, check.graphs
    return Workflow(
        name=shape.metadata.name or "workflow",
        spec=spec,
        templates=known,
        graphs=graphs,
        graph=graphs.get(spec.entrypoint) or _single(spec.entrypoint, known[spec.entrypoint], spec),
        exit_graph=_single(EXIT_NODE, known[spec.on_exit], spec) if spec.on_exit else None,
    )


def _single(name: str, template: Template, spec: Spec) -> Graph:
    """A template as the only task of a DAG; like Argo, the workflow's parameters are its arguments."""
    given = {parameter.name for parameter in spec.arguments.parameters}
    arguments = tuple(
        Argument(name=parameter.name, value=f"{{{{workflow.parameters.{parameter.name}}}}}")
        for parameter in template.inputs.parameters
        if parameter.name in given
    )
    task = Task(name=name, template=template.name, arguments=Arguments(parameters=arguments))
    return Graph.of(Dag(tasks=(task,)))
