"""The compiled workflow of each platform agrees with itself, so that neither engine finds a mistake after hours."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pipeline.local.engine import render
from pipeline.local.manifest import REFERENCE, Task, Template
from pipeline.local.workflow import Workflow, parse
from pipeline.runs.graph import Graph
from pipeline.settings.config import load
from pipeline.settings.platform import STORE_MOUNT

STATUS = "workflow.status"


@pytest.fixture(scope="module", params=["local", "kind", "eks", "gke", "aks", "onprem"])
def workflow(request: pytest.FixtureRequest) -> Workflow:
    return parse(render(load(chosen={"platform": request.param})))


def outputs_of(workflow: Workflow, tasks: Iterable[Task]) -> set[str]:
    return {
        f"tasks.{task.name}.outputs.parameters.{output.name}"
        for task in tasks
        for output in workflow.templates[task.template].outputs.parameters
    }


def ancestors(graph: Graph, task: str) -> set[str]:
    return set(graph.parents(task)).union(*(ancestors(graph, parent) for parent in graph.parents(task)))


def known_in(workflow: Workflow, template: Template) -> set[str]:
    """The references that are valid everywhere in a template."""
    known = {"workflow.name"} | {f"workflow.parameters.{each.name}" for each in workflow.spec.arguments.parameters}
    known |= {f"inputs.parameters.{each.name}" for each in template.inputs.parameters}
    return known | {STATUS} if template.name in at_exit(workflow, workflow.spec.on_exit) else known


def at_exit(workflow: Workflow, name: str | None) -> set[str]:
    """The templates that the exit handler runs."""
    if name is None:
        return set()
    return {name}.union(*(at_exit(workflow, task.template) for task in workflow.templates[name].tasks))


def texts_of(template: Template) -> Iterable[str]:
    yield from (template.memoize.key,) if template.memoize else ()
    yield from (output.value_from.path for output in template.outputs.parameters)
    yield from (mutex.name for mutex in template.synchronization.mutexes)
    if template.container:
        yield from (*template.container.command, *template.container.args)
        yield from (variable.value for variable in template.container.env)
        yield template.pod_spec_patch


def references(text: str) -> set[str]:
    return {match[1].strip() for match in REFERENCE.finditer(text)}


def test_every_reference_is_to_something_that_comes_before(workflow: Workflow) -> None:
    for template in workflow.templates.values():
        known = known_in(workflow, template)
        assert {reference for text in texts_of(template) for reference in references(text)} <= known, template.name
        tasks = {task.name: task for task in template.tasks}
        for task in template.tasks:
            earlier = [tasks[name] for name in ancestors(workflow.graphs[template.name], task.name)]
            texts = (task.when, *(argument.value for argument in task.arguments.parameters))
            found = {reference for text in texts for reference in references(text)}
            assert found <= known | outputs_of(workflow, earlier), task.name
        results = {each.value_from.parameter for each in template.outputs.parameters if template.dag}
        found = {reference for text in results for reference in references(text)}
        assert found <= known | outputs_of(workflow, template.tasks), template.name


def test_every_task_gives_its_template_exactly_its_inputs(workflow: Workflow) -> None:
    for template in workflow.templates.values():
        for task in template.tasks:
            inputs = {parameter.name for parameter in workflow.templates[task.template].inputs.parameters}
            assert {argument.name for argument in task.arguments.parameters} == inputs, task.name


def test_every_output_lies_on_a_volume_that_the_container_mounts(workflow: Workflow) -> None:
    for name, template in workflow.used():
        volumes, mounts = workflow.volumes(template), template.program.volume_mounts
        for mount in mounts:
            assert (mount.mount_path == STORE_MOUNT) == bool(volumes[mount.name].persistent_volume_claim), name
        for output in template.outputs.parameters:
            assert any(output.value_from.path.startswith(f"{mount.mount_path}/") for mount in mounts), name
