"""Checks a manifest whose form is right: its names, references and expressions, and where its fields stand."""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Iterator
from typing import Final

from pipeline.local.manifest import Manifest, Synchronization, Task, Template
from pipeline.local.references import REFERENCE, references
from pipeline.local.resources import literal, request
from pipeline.runs import expressions
from pipeline.runs.graph import Graph
from pipeline.runs.state import EXIT_NODE
from stages.parts.base.errors import ConfigError

EXIT_ONLY: Final = frozenset({"workflow.status"})
LAST_RETRY: Final = frozenset({"lastRetry.exitCode", "lastRetry.status", "lastRetry.message"})
PLACEHOLDER: Final = "x"
KINDS: Final = ("container", "dag", "suspend")
ONLY_ON: Final[dict[str, tuple[str, ...]]] = {
    "memoize": ("container", "dag"),
    "outputs": ("container", "dag"),
    "retry_strategy": ("container",),
    "active_deadline_seconds": ("container",),
    "synchronization": ("container",),
    "volumes": ("container",),
    "pod_spec_patch": ("container",),
}
"""The kinds of templates on which a field is supported."""
SOURCES: Final = {"container": "path", "dag": "parameter"}
"""The source of the outputs of each kind of template."""


class ManifestCheck:
    """Collects every mistake of a manifest whose form is right."""

    def __init__(self, manifest: Manifest) -> None:
        self.spec = manifest.spec
        self.known = {template.name: template for template in self.spec.templates}
        self.graphs: dict[str, Graph] = {}
        self.unsupported: list[str] = []
        self.wrong: list[str] = []
        self.of_workflow = {"workflow.name"} | {
            f"workflow.parameters.{parameter.name}" for parameter in self.spec.arguments.parameters
        }
        self.at_exit = set(self._reached(self.spec.on_exit, set()))

    def whole(self) -> None:
        self._unique("spec.templates", [template.name for template in self.spec.templates])
        self._locks("spec.synchronization", self.of_workflow, self.spec.synchronization)
        self._outermost("entrypoint", self.spec.entrypoint, "dag")
        if self.spec.on_exit is not None:
            self._outermost("onExit", self.spec.on_exit, "dag", "container")
        self._recursion()
        for template in self.spec.templates:
            self._template(f"spec.templates[{template.name}]", template)

    def _outermost(self, field: str, name: str, *kinds: str) -> None:
        template = self.known.get(name)
        if template is None:
            self.wrong.append(f"spec.{field}: there is no template {name!r}")
        elif not any(getattr(template, each) for each in kinds) or template.inputs.parameters or template.memoize:
            kind = " or ".join(kinds)
            self.unsupported.append(f"spec.{field}: {name!r} must be a {kind} template without inputs and memoize")

    def _recursion(self) -> None:
        order = {name: [*called_by(template)] for name, template in self.known.items()}
        try:
            graphlib.TopologicalSorter(order).prepare()
        except graphlib.CycleError as error:
            circle = " → ".join(error.args[1])
            self.unsupported.append(f"spec.templates[{error.args[1][0]}]: it runs itself: {circle}")

    def _reached(self, name: str | None, seen: set[str]) -> Iterator[str]:
        """The names of a template and of all that it calls."""
        if name in self.known and name not in seen:
            seen.add(name)
            yield name
            for called in called_by(self.known[name]):
                yield from self._reached(called, seen)

    def _unique(self, path: str, names: list[str]) -> None:
        for name in sorted({name for name in names if names.count(name) > 1}):
            self.wrong.append(f"{path}: {name!r} is there twice")

    def _template(self, path: str, template: Template) -> None:
        kinds = [kind for kind in KINDS if getattr(template, kind) is not None]
        if len(kinds) != 1:
            self.wrong.append(f"{path}: needs exactly one of {', '.join(KINDS)}")
            return
        (kind,) = kinds
        for field, owners in ONLY_ON.items():
            if field in template.model_fields_set and kind not in owners:
                name = Template.model_fields[field].alias
                self.unsupported.append(f"{path}.{name}: only on {' and '.join(owners)} templates")
        for output in template.outputs.parameters:
            source = "path" if output.value_from.path else "parameter"
            if kind in SOURCES and source != SOURCES[kind]:
                where = f"{path}.outputs.parameters[{output.name}].valueFrom.{source}"
                self.unsupported.append(f"{where}: not on a {kind} template")
        if template.memoize:
            self._references(f"{path}.memoize.key", self._inputs(template), template.memoize.key)
        if template.container:
            self._container(path, template)
        elif template.dag:
            self._dag(path, template)

    def _container(self, path: str, template: Template) -> None:
        container = template.program
        scope = self._inputs(template)
        texts = [*container.command, *container.args, *(each.value for each in container.env)]
        self._references(f"{path}.container", scope, *texts)
        self._references(
            f"{path}.outputs", scope, *(parameter.value_from.path for parameter in template.outputs.parameters)
        )
        self._locks(f"{path}.synchronization", scope, template.synchronization)
        self._volumes(path, template)
        self._retries(path, template)
        try:
            request(literal(template.resources.requests), literal(template.resources.limits))
        except ConfigError as error:
            self.wrong.append(f"{path}.container.resources: {error}")
        for each in template.pod_spec_patch.containers:
            amounts = (*each.resources.requests.values(), *each.resources.limits.values())
            self._references(f"{path}.podSpecPatch", scope, *amounts)
        for volume in template.pod_spec_patch.volumes:
            if all(each.name != volume.name or not each.empty_dir for each in (*self.spec.volumes, *template.volumes)):
                self.wrong.append(f"{path}.podSpecPatch: there is no emptyDir volume {volume.name!r}")

    def _inputs(self, template: Template) -> set[str]:
        """The references that are valid everywhere in a template."""
        own = {f"inputs.parameters.{parameter.name}" for parameter in template.inputs.parameters}
        return self.of_workflow | own | (EXIT_ONLY if template.name in self.at_exit else frozenset())

    def _locks(self, path: str, scope: set[str], asked: Synchronization) -> None:
        keys = [semaphore.config_map_key_ref for semaphore in asked.semaphores]
        texts = [*(mutex.name for mutex in asked.mutexes), *(text for key in keys for text in (key.name, key.key))]
        self._references(path, scope, *texts)

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
                condition = expressions.parse(template.retry_strategy.expression, "expression")
            except ConfigError as error:
                self.wrong.append(f"{where}: {error}")
                return
            for name in expressions.names(condition):
                if name not in LAST_RETRY:
                    self.unsupported.append(f"{where}: {name!r}; known: {', '.join(sorted(LAST_RETRY))}")

    def _dag(self, path: str, template: Template) -> None:
        tasks = {task.name: task for task in template.tasks}
        self._unique(f"{path}.dag.tasks", [*(task.name for task in template.tasks), EXIT_NODE])
        try:
            graph = Graph.of({name: task.depends for name, task in tasks.items()})
        except ConfigError as error:
            self.wrong.append(f"{path}.dag.tasks: {error}")
            return
        self.graphs[template.name] = graph
        for task in tasks.values():
            before = [tasks[name] for name in graph.ancestors(task.name)]
            self._task(f"{path}.dag.tasks[{task.name}]", task, self._inputs(template) | self._results(before))
        scope = self._inputs(template) | self._results(tasks.values())
        for output in template.outputs.parameters:
            where = f"{path}.outputs.parameters[{output.name}].valueFrom.parameter"
            self._references(where, scope, output.value_from.parameter)

    def _task(self, path: str, task: Task, scope: set[str]) -> None:
        template = self.known.get(task.template)
        if template is None:
            self.unsupported.append(f"{path}.template: {task.template!r} is not a template of this workflow")
            return
        texts = {f"arguments.parameters[{parameter.name}]": parameter.value for parameter in task.arguments.parameters}
        texts["when"] = task.when
        for field, text in texts.items():
            self._references(f"{path}.{field}", scope, text)
        self._arguments(path, task, template)
        if task.when:
            try:
                expressions.parse(REFERENCE.sub(PLACEHOLDER, task.when), "when")
            except ConfigError as error:
                self.wrong.append(f"{path}.when: {error}")

    def _results(self, tasks: Iterable[Task]) -> set[str]:
        """The outputs that later tasks may refer to."""
        return {
            f"tasks.{task.name}.outputs.parameters.{output.name}"
            for task in tasks
            if task.template in self.known
            for output in self.known[task.template].outputs.parameters
        }

    def _arguments(self, path: str, task: Task, template: Template) -> None:
        given = {argument.name for argument in task.arguments.parameters}
        inputs = {parameter.name for parameter in template.inputs.parameters}
        name = template.name
        self.wrong += [f"{path}.arguments: template {name!r} has no input {each!r}" for each in sorted(given - inputs)]
        self.wrong += [
            f"{path}.arguments: input {each!r} of template {name!r} needs a value" for each in sorted(inputs - given)
        ]

    def _references(self, path: str, scope: Iterable[str], *texts: str) -> None:
        for reference in dict.fromkeys(each for text in texts for each in references(text)):
            if reference.startswith("="):
                self.unsupported.append(f"{path}: the expression template {{{{{reference}}}}}")
            elif reference not in scope:
                self.wrong.append(f"{path}: {{{{{reference}}}}} refers to nothing that is known there")


def called_by(template: Template) -> Iterator[str]:
    """The templates that a template's tasks run."""
    return (task.template for task in template.tasks)
