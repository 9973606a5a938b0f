"""Creates nodes and jobs during a run: those of a DAG's tasks, and of the items of a fanned-out task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipeline.local import names
from pipeline.local.job import ActiveDag, Job
from pipeline.local.manifest import Task, Template
from pipeline.local.references import substitute
from pipeline.local.workflow import Workflow
from pipeline.runs.graph import Graph
from pipeline.runs.state import EXIT_NODE, Kind, Node, RunState
from stages.parts.base.errors import ConfigError


def outermost(workflow: Workflow) -> list[Node]:
    """The nodes of a new run: the entrypoint's tasks and the exit handler."""
    tasks = {task.name: task for task in workflow.templates[workflow.spec.entrypoint].tasks}
    nodes = [_node(tasks[name], workflow, "") for name in workflow.graphs[workflow.spec.entrypoint].depends]
    if workflow.spec.on_exit:
        nodes.append(_node(Task(name=EXIT_NODE, template=workflow.spec.on_exit), workflow, ""))
    return nodes


def entrypoint(workflow: Workflow, state: RunState, base: Mapping[str, str]) -> ActiveDag:
    return _active(workflow, state, workflow.templates[workflow.spec.entrypoint], base)


def exit_handler(workflow: Workflow, state: RunState, on_exit: str, base: Mapping[str, str]) -> ActiveDag:
    """A DAG with the exit handler as its only task."""
    task = Task(name=EXIT_NODE, template=on_exit)
    dag = ActiveDag(workflow.templates[on_exit], Graph.of({task.name: ""}), base, {})
    dag.jobs[task.name] = Job(task, dag.template, state.node(task.name), dag)
    return dag


def inner(workflow: Workflow, state: RunState, job: Job) -> ActiveDag:
    """Raises: Unresolved: an argument without a value."""
    return _active(workflow, state, job.template, job.dag.base, job.inputs(), parent=job.node.name)


def members(state: RunState, job: Job) -> list[Job]:
    """One job for each item of a fanned-out task.

    Raises:
        Unresolved, ConfigError: the items can't be read.
    """
    made = []
    for index, item in enumerate(_items(job)):
        node = Node(
            name=names.of_item(job.node.name, index, item),
            display_name=names.of_item(job.task.name, index, item),
            template=job.template.name,
            kind=_kind(job.template),
            parent=job.node.name,
        )
        state.add(node)
        made.append(Job(job.task, job.template, node, job.dag, item=_item_values(item)))
    return made


def _active(
    workflow: Workflow,
    state: RunState,
    template: Template,
    base: Mapping[str, str],
    inputs: Mapping[str, str] | None = None,
    *,
    parent: str = "",
) -> ActiveDag:
    """A dag with its jobs; nodes that the run lacks are added to it."""
    dag = ActiveDag(template, workflow.graphs[template.name], base, inputs or {})
    tasks, there = {task.name: task for task in template.tasks}, {node.name: node for node in state.nodes}
    for name in dag.graph.depends:
        node = there.get(names.inside(parent, name))
        if node is None:
            node = _node(tasks[name], workflow, parent)
            state.add(node)
        dag.jobs[name] = Job(tasks[name], workflow.templates[tasks[name].template], node, dag)
    return dag


def _items(job: Job) -> list[Any]:
    text = substitute(job.task.with_param, job.scope)
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise ConfigError(f"withParam is not a JSON list: {text.strip()[:200]}")
    return found


def _item_values(item: Any) -> dict[str, str]:
    """What ``{{item}}`` and, for a map, ``{{item.KEY}}`` stand for."""
    keys = {f"item.{key}": names.plain(value) for key, value in item.items()} if isinstance(item, dict) else {}
    return {"item": names.plain(item)} | keys


def _node(task: Task, workflow: Workflow, parent: str) -> Node:
    template = workflow.templates[task.template]
    return Node(
        name=names.inside(parent, task.name),
        display_name=task.name,
        template=template.name,
        kind="TaskGroup" if task.with_param else _kind(template),
        parent=parent,
    )


def _kind(template: Template) -> Kind:
    if template.dag:
        return "DAG"
    return "Suspend" if template.suspend else "Pod"
