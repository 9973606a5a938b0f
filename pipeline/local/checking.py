"""What a manifest of the right form can still get wrong: names, references, expressions, fields in the wrong place."""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Iterator
from typing import Final

from pipeline.local import expressions, fanout
from pipeline.local.dag import Graph
from pipeline.local.manifest import Hook, Manifest, Step, Synchronization, Task, Template
from pipeline.local.names import EXIT_NODE
from pipeline.local.resources import request
from pipeline.local.templates import REFERENCE, bare, references
from stages.parts.base.errors import ConfigError

EXIT_ONLY: Final = frozenset({"workflow.status", "workflow.duration", "workflow.failures"})
LAST_RETRY: Final = frozenset({"lastRetry.exitCode", "lastRetry.status", "lastRetry.duration", "lastRetry.message"})
PLACEHOLDER: Final = "x"
KINDS: Final = ("container", "dag", "steps", "suspend")
ONLY_ON: Final[dict[str, tuple[str, ...]]] = {
    "memoize": ("container",),
    "retry_strategy": ("container",),
    "active_deadline_seconds": ("container",),
    "synchronization": ("container",),
    "parallelism": ("dag", "steps"),
    "fail_fast": ("dag", "steps"),
}
"""Kinds of templates that a field means something on here."""
SOURCES: Final[dict[str, tuple[str, ...]]] = {
    "container": ("path",),
    "dag": ("parameter", "expression"),
    "steps": ("parameter", "expression"),
    "suspend": ("supplied",),
}
"""Where the outputs of a kind of template come from."""


class Check:
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
        for field in ("entrypoint", "on_exit"):
            self._root({"on_exit": "onExit"}.get(field, field), getattr(self.spec, field))
        self._recursion()
        for template in self.spec.templates:
            self._template(f"spec.templates[{template.name}]", template)

    def _root(self, field: str, name: str | None) -> None:
        """The workflow's parameters are the arguments of these two."""
        if name is None:
            return
        if name not in self.known:
            self.wrong.append(f"spec.{field}: there is no template {name!r}")
            return
        given = {parameter.name for parameter in self.spec.arguments.parameters}
        self.wrong += [
            f"spec.{field}: input {parameter.name!r} of template {name!r} needs a value"
            for parameter in self.known[name].inputs.parameters
            if parameter.name not in given and parameter.given is None
        ]

    def _recursion(self) -> None:
        order = {name: [*self._called(template)] for name, template in self.known.items()}
        try:
            graphlib.TopologicalSorter(order).prepare()
        except graphlib.CycleError as error:
            circle = " → ".join(error.args[1])
            self.unsupported.append(f"spec.templates[{error.args[1][0]}]: it runs itself: {circle}")

    def _reached(self, name: str | None, seen: set[str]) -> Iterator[str]:
        """A template and all that it calls."""
        if name in self.known and name not in seen:
            seen.add(name)
            yield name
            for called in self._called(self.known[name]):
                yield from self._reached(called, seen)

    def _called(self, template: Template) -> Iterator[str]:
        for step in steps_of(template):
            yield step.template
            if step.hooks.exit:
                yield step.hooks.exit.template

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
            source = output.value_from.source
            if source not in SOURCES[kind]:
                where = f"{path}.outputs.parameters[{output.name}].valueFrom.{source}"
                self.unsupported.append(f"{where}: not on a {kind} template")
        values = [text for each in template.inputs.parameters for text in (each.value, each.default) if text]
        self._references(f"{path}.inputs", self.of_workflow, *values)
        if kind == "container":
            self._container(path, template)
        elif kind != "suspend":
            self._graph(f"{path}.{kind}", path, template)

    def _container(self, path: str, template: Template) -> None:
        container = template.program
        scope = self._inputs(template)
        texts = [*container.command, *container.args, *(each.value for each in container.env)]
        self._references(f"{path}.container", scope, *texts)
        self._references(f"{path}.outputs", scope, *(each.value_from.path for each in template.outputs.parameters))
        self._locks(f"{path}.synchronization", scope, template.synchronization)
        if template.memoize:
            self._references(f"{path}.memoize.key", scope, template.memoize.key)
        self._volumes(path, template)
        self._retries(path, template)
        try:
            request(container.resources.requests, container.resources.limits)
        except ConfigError as error:
            self.wrong.append(f"{path}.container.resources: {error}")

    def _inputs(self, template: Template) -> set[str]:
        """What every reference in a template may name."""
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
                expression = expressions.parse(template.retry_strategy.expression, expressions.RETRY)
            except ConfigError as error:
                self.wrong.append(f"{where}: {error}")
                return
            for name in expressions.names(expression):
                if name not in LAST_RETRY:
                    self.unsupported.append(f"{where}: {name!r}; known: {', '.join(sorted(LAST_RETRY))}")

    def _graph(self, path: str, of_template: str, template: Template) -> None:
        tasks = f"{path}.tasks" if template.dag else path
        self._unique(tasks, [*(step.name for step in steps_of(template)), EXIT_NODE])
        try:
            graph = Graph.of(template.dag) if template.dag else Graph.of_steps(template.steps or ())
        except ConfigError as error:
            self.wrong.append(f"{tasks}: {error}")
            return
        self.graphs[template.name] = graph
        scope = self._inputs(template)
        for task in graph.tasks.values():
            self._task(f"{tasks}[{task.name}]", task, graph, template)
            scope |= self._results(task, prefix_of(template))
        for output in template.outputs.parameters:
            where = f"{of_template}.outputs.parameters[{output.name}].valueFrom"
            if output.value_from.parameter:
                self._references(f"{where}.parameter", scope, f"{{{{{bare(output.value_from.parameter)}}}}}")
            elif output.value_from.expression:
                self._expression(f"{where}.expression", scope, output.value_from.expression)

    def _task(self, path: str, task: Task, graph: Graph, outer: Template) -> None:
        template = self.known.get(task.template)
        if template is None:
            self.unsupported.append(f"{path}.template: {task.template!r} is no template of this workflow")
            return
        scope = self._inputs(outer)
        for ancestor in graph.ancestors(task.name):
            scope |= self._results(graph.tasks[ancestor], prefix_of(outer))
        if task.expands:
            self._expansion(path, task, scope)
            scope = scope | {"item", *(each for each in self._all_references(task) if each.startswith("item."))}
        for argument in task.arguments.parameters:
            self._references(f"{path}.arguments.parameters[{argument.name}]", scope, argument.value)
        self._references(f"{path}.when", scope, task.when)
        self._arguments(path, task, template)
        if task.hooks.exit:
            self._hook(f"{path}.hooks.exit", task, task.hooks.exit, scope | self._results(task, prefix_of(outer)))
        if task.when:
            try:
                expressions.parse(REFERENCE.sub(PLACEHOLDER, task.when), expressions.WHEN)
            except ConfigError as error:
                self.wrong.append(f"{path}.when: {error}")

    def _expansion(self, path: str, task: Task, scope: set[str]) -> None:
        fields = ("with_items", "with_param", "with_sequence")
        given = [str(Task.model_fields[field].alias) for field in fields if getattr(task, field)]
        if len(given) > 1:
            self.wrong.append(f"{path}: has {' and '.join(given)}; Argo takes one of them")
        self._references(f"{path}.{given[0]}", scope, *fanout.texts(task))

    def _hook(self, path: str, task: Task, hook: Hook, scope: set[str]) -> None:
        template = self.known.get(hook.template)
        if task.expands:
            self.unsupported.append(f"{path}: not on a task with withItems, withParam or withSequence")
        if template is None:
            self.unsupported.append(f"{path}.template: {hook.template!r} is no template of this workflow")
            return
        for argument in hook.arguments.parameters:
            self._references(f"{path}.arguments.parameters[{argument.name}]", scope, argument.value)
        self._arguments(path, hook, template)
        if hook.expression:
            self._expression(f"{path}.expression", scope, hook.expression)

    def _all_references(self, task: Task) -> Iterator[str]:
        for text in (task.when, *(argument.value for argument in task.arguments.parameters)):
            yield from references(text)

    def _results(self, task: Task, prefix: str) -> set[str]:
        """What a task leaves for those after it."""
        template = self.known.get(task.template)
        outputs = template.outputs.parameters if template else ()
        of_task = f"{prefix}.{task.name}"
        found = {f"{of_task}.status"} | {f"{of_task}.outputs.parameters.{output.name}" for output in outputs}
        if task.expands:
            found.add(f"{of_task}.outputs.parameters")
        elif template and template.container:
            found.add(f"{of_task}.exitCode")
        return found

    def _arguments(self, path: str, task: Step | Hook, template: Template) -> None:
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

    def _expression(self, path: str, scope: set[str], text: str) -> None:
        try:
            expression = expressions.parse(text, expressions.VALUE)
        except ConfigError as error:
            self.wrong.append(f"{path}: {error}")
            return
        for name in expressions.names(expression):
            if name not in scope:
                self.wrong.append(f"{path}: {name!r} refers to nothing that is known there")

    def _references(self, path: str, scope: Iterable[str], *texts: str) -> None:
        for reference in dict.fromkeys(each for text in texts for each in references(text)):
            if reference.startswith("="):
                self.unsupported.append(f"{path}: the expression template {{{{{reference}}}}}")
            elif reference not in scope:
                self.wrong.append(f"{path}: {{{{{reference}}}}} refers to nothing that is known there")


def steps_of(template: Template) -> list[Step]:
    """The tasks or steps of a template, none if it has none."""
    if template.dag:
        return list(template.dag.tasks)
    return [step for group in template.steps or () for step in group]


def prefix_of(template: Template) -> str:
    """What a reference to a task begins with."""
    return "tasks" if template.dag else "steps"
