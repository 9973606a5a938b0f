"""A workflow that is known to be runnable: every name it uses exists, every expression can be read.

``parse`` finds all mistakes of a manifest before anything runs; ``Workflow.bind`` adds the arguments of one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipeline.local import expressions
from pipeline.local.dag import Graph
from pipeline.local.manifest import Argument, Arguments, Dag, Manifest, Spec, Task, Template, Volume
from pipeline.local.reading import read, refused
from pipeline.local.resources import request
from pipeline.local.templates import REFERENCE, references
from stages.errors import ConfigError, UnknownName, UnsupportedField

EXIT_NODE: Final = "onExit"
EXIT_ONLY: Final = frozenset({"workflow.status", "workflow.duration"})
LAST_RETRY: Final = frozenset({"lastRetry.exitCode", "lastRetry.status", "lastRetry.duration", "lastRetry.message"})
PLACEHOLDER: Final = "x"
CONTAINERS_ONLY: Final = ("memoize", "retry_strategy", "active_deadline_seconds")


@dataclass(frozen=True)
class Workflow:
    name: str
    spec: Spec
    templates: dict[str, Template]
    graph: Graph
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

    def used(self) -> Iterator[tuple[Task, Template]]:
        """Every task that may run, the exit handler last."""
        for graph in filter(None, (self.graph, self.exit_graph)):
            for task in graph.tasks.values():
                yield task, self.templates[task.template]


def parse(manifest: Mapping[str, Any]) -> Workflow:
    """The workflow of a compiled WorkflowTemplate or Workflow.

    Raises:
        UnsupportedField: it uses what the local engine does not know; every such field is named.
        ConfigError: it contradicts itself; every mistake found is named.
    """
    shape = read(manifest)
    check = _Check(shape)
    check.templates()
    graph = check.graph()
    if graph is None or check.unsupported or check.wrong:
        raise refused(UnsupportedField if check.unsupported else ConfigError, [*check.unsupported, *check.wrong])
    exit_graph = _single(EXIT_NODE, check.known[shape.spec.on_exit], shape.spec) if shape.spec.on_exit else None
    return Workflow(shape.metadata.name or "workflow", shape.spec, check.known, graph, exit_graph)


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


class _Check:
    """Collects every mistake of a manifest whose form is right."""

    def __init__(self, manifest: Manifest) -> None:
        self.spec = manifest.spec
        self.known = {template.name: template for template in self.spec.templates}
        self.unsupported: list[str] = []
        self.wrong: list[str] = []
        self.of_workflow = {"workflow.name"} | {
            f"workflow.parameters.{parameter.name}" for parameter in self.spec.arguments.parameters
        }

    def templates(self) -> None:
        self._unique("spec.templates", [template.name for template in self.spec.templates])
        self._references(
            "spec.synchronization", self.of_workflow, *(mutex.name for mutex in self.spec.synchronization.mutexes)
        )
        for template in self.spec.templates:
            path = f"spec.templates[{template.name}]"
            if (template.container is None) == (template.dag is None):
                self.wrong.append(f"{path}: needs either a container or a dag")
            elif template.container is not None:
                self._container(path, template)
            else:
                self._dag_template(path, template)

    def graph(self) -> Graph | None:
        """The entrypoint's, with its tasks checked; None after a mistake."""
        on_exit = self.spec.on_exit
        if on_exit is not None and (on_exit not in self.known or self.known[on_exit].container is None):
            self.unsupported.append(f"spec.onExit: {on_exit!r} is no container template of this workflow")
        entry = self.known.get(self.spec.entrypoint)
        if entry is None:
            self.wrong.append(f"spec.entrypoint: there is no template {self.spec.entrypoint!r}")
            return None
        if entry.dag is None:
            return _single(entry.name, entry, self.spec)
        path = f"spec.templates[{entry.name}].dag"
        self._unique(f"{path}.tasks", [*(task.name for task in entry.dag.tasks), EXIT_NODE])
        try:
            graph = Graph.of(entry.dag)
        except ConfigError as error:
            self.wrong.append(f"{path}.tasks: {error}")
            return None
        for task in graph.tasks.values():
            self._task(f"{path}.tasks[{task.name}]", task, graph, entry)
        return graph

    def _unique(self, path: str, names: list[str]) -> None:
        for name in sorted({name for name in names if names.count(name) > 1}):
            self.wrong.append(f"{path}: {name!r} is there twice")

    def _dag_template(self, path: str, template: Template) -> None:
        for field in CONTAINERS_ONLY:
            if getattr(template, field) is not None:
                self.unsupported.append(f"{path}.{field}: only on container templates")
        if template.outputs.parameters:
            self.unsupported.append(f"{path}.outputs: only on container templates")
        if template.synchronization.mutexes:
            self.unsupported.append(f"{path}.synchronization: only on the workflow and on container templates")

    def _container(self, path: str, template: Template) -> None:
        container = template.program
        scope = self.of_workflow | {f"inputs.parameters.{each.name}" for each in template.inputs.parameters}
        if template.name == self.spec.on_exit:
            scope |= EXIT_ONLY
        texts = [*container.command, *container.args, *(each.value for each in container.env)]
        self._references(f"{path}.container", scope, *texts)
        self._references(f"{path}.outputs", scope, *(each.value_from.path for each in template.outputs.parameters))
        self._references(f"{path}.synchronization", scope, *(mutex.name for mutex in template.synchronization.mutexes))
        if template.memoize:
            self._references(f"{path}.memoize.key", scope, template.memoize.key)
        if template.parallelism:
            self.unsupported.append(f"{path}.parallelism: only on the workflow and on dag templates")
        self._volumes(path, template)
        self._retries(path, template)
        try:
            request(container.resources.requests, container.resources.limits)
        except ConfigError as error:
            self.wrong.append(f"{path}.container.resources: {error}")

    def _volumes(self, path: str, template: Template) -> None:
        volumes = {volume.name: volume for volume in (*self.spec.volumes, *template.volumes)}
        for volume in volumes.values():
            if (volume.empty_dir is None) == (volume.persistent_volume_claim is None):
                self.wrong.append(f"{path}: volume {volume.name!r} needs either emptyDir or persistentVolumeClaim")
        mounts = template.program.volume_mounts
        for mount in mounts:
            if mount.name not in volumes:
                self.wrong.append(f"{path}.container.volumeMounts[{mount.name}]: there is no such volume")
        for output in template.outputs.parameters:
            if not any(output.value_from.path.startswith(mount.mount_path.rstrip("/") + "/") for mount in mounts):
                self.unsupported.append(
                    f"{path}.outputs.parameters[{output.name}].valueFrom.path: "
                    f"{output.value_from.path!r} lies on no volume that the container mounts"
                )

    def _retries(self, path: str, template: Template) -> None:
        if template.retry_strategy and template.retry_strategy.expression:
            where = f"{path}.retryStrategy.expression"
            try:
                expression = expressions.parse(template.retry_strategy.expression, expressions.RETRY)
            except ConfigError as error:
                self.wrong.append(f"{where}: {error}")
                return
            for name in expressions.names(expression):
                if name not in LAST_RETRY:
                    self.unsupported.append(f"{where}: {name!r}; known: {', '.join(sorted(LAST_RETRY))}")

    def _task(self, path: str, task: Task, graph: Graph, entry: Template) -> None:
        template = self.known.get(task.template)
        if template is None or template.container is None:
            reason = "is a nested dag" if template else "is no template of this workflow"
            self.unsupported.append(f"{path}.template: {task.template!r} {reason}")
            return
        scope = self.of_workflow | {f"inputs.parameters.{each.name}" for each in entry.inputs.parameters}
        for ancestor in graph.ancestors(task.name):
            scope |= self._results(graph.tasks[ancestor])
        for argument in task.arguments.parameters:
            self._references(f"{path}.arguments.parameters[{argument.name}]", scope, argument.value)
        self._references(f"{path}.when", scope, task.when)
        self._arguments(path, task, template)
        if task.when:
            try:
                expressions.parse(REFERENCE.sub(PLACEHOLDER, task.when), expressions.WHEN)
            except ConfigError as error:
                self.wrong.append(f"{path}.when: {error}")

    def _results(self, task: Task) -> set[str]:
        template = self.known.get(task.template)
        outputs = template.outputs.parameters if template else ()
        return {f"tasks.{task.name}.status"} | {
            f"tasks.{task.name}.outputs.parameters.{output.name}" for output in outputs
        }

    def _arguments(self, path: str, task: Task, template: Template) -> None:
        given = {argument.name for argument in task.arguments.parameters}
        inputs = {parameter.name: parameter for parameter in template.inputs.parameters}
        self.wrong += [
            f"{path}.arguments: template {template.name!r} has no input {name!r}"
            for name in sorted(given - inputs.keys())
        ]
        self.wrong += [
            f"{path}.arguments: input {name!r} of template {template.name!r} needs a value"
            for name, parameter in inputs.items()
            if name not in given and parameter.given is None
        ]

    def _references(self, path: str, scope: set[str], *texts: str) -> None:
        for reference in dict.fromkeys(each for text in texts for each in references(text)):
            if reference.startswith("="):
                self.unsupported.append(f"{path}: the expression template {{{{{reference}}}}}")
            elif reference not in scope:
                self.wrong.append(f"{path}: {{{{{reference}}}}} refers to nothing that is known there")
