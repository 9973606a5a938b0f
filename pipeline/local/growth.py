"""Creates the nodes and jobs of a DAG's tasks during a run."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.local import node_names as names
from pipeline.local.job import ActiveDag, Job
from pipeline.local.manifest import Task, Template
from pipeline.local.workflow import Workflow
from pipeline.runs.graph import Graph
from pipeline.runs.state import EXIT_NODE, Node, RunState


def outermost(workflow: Workflow) -> list[Node]:
    """Return the nodes of a new run: the entrypoint's tasks and the exit handler."""
    tasks = {task.name: task for task in workflow.entrypoint.tasks}
    nodes = [_node(tasks[name], workflow, "") for name in workflow.graphs[workflow.spec.entrypoint].depends]
    if workflow.spec.on_exit:
        nodes.append(_node(Task(name=EXIT_NODE, template=workflow.spec.on_exit), workflow, ""))
    return nodes


def exit_handler(workflow: Workflow, state: RunState, on_exit: str, base: Mapping[str, str]) -> ActiveDag:
    """Return a DAG with the exit handler as its only task."""
    task = Task(name=EXIT_NODE, template=on_exit)
    dag = ActiveDag(workflow.templates[on_exit], Graph.of({task.name: ""}), base, {})
    dag.jobs[task.name] = Job(task, dag.template, state.node(task.name), dag)
    return dag


def active(
    workflow: Workflow,
    state: RunState,
    template: Template,
    base: Mapping[str, str],
    inputs: Mapping[str, str] | None = None,
    *,
    parent: str = "",
) -> ActiveDag:
    """Return a dag with its jobs; nodes that the run lacks are added to it."""
    dag = ActiveDag(template, workflow.graphs[template.name], base, inputs or {})
    tasks, nodes = {task.name: task for task in template.tasks}, {node.name: node for node in state.nodes}
    for name in dag.graph.depends:
        node = nodes.get(names.inside(parent, name))
        if node is None:
            node = _node(tasks[name], workflow, parent)
            state.add(node)
        dag.jobs[name] = Job(tasks[name], workflow.templates[tasks[name].template], node, dag)
    return dag


def _node(task: Task, workflow: Workflow, parent: str) -> Node:
    template = workflow.templates[task.template]
    return Node(
        name=names.inside(parent, task.name),
        display_name=task.name,
        template=template.name,
        kind="DAG" if template.dag else "Suspend" if template.suspend else "Pod",
        parent=parent,
    )
