"""Nodes that come to be while a run goes on: what a dag, a fanned-out task and an exit hook hold."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.local import fanout, names
from pipeline.local.dag import Graph
from pipeline.local.expressions import VALUE, decide, parse
from pipeline.local.frame import Frame
from pipeline.local.job import Job, inputs_of, skipped_by
from pipeline.local.manifest import Task, Template
from pipeline.local.state import Kind, Node, RunState
from pipeline.local.workflow import Workflow
from stages.parts.base.errors import ConfigError


def outermost(workflow: Workflow) -> list[Node]:
    """The nodes that are there from the beginning: the entrypoint's tasks and the exit handler."""
    graphs = filter(None, (workflow.graph, workflow.exit_graph))
    return [_node(task, workflow.templates[task.template]) for graph in graphs for task in graph.tasks.values()]


def frame(
    workflow: Workflow,
    state: RunState,
    graph: Graph,
    *,
    template: Template | None,
    base: Mapping[str, str],
    inputs: Mapping[str, str],
    parent: str = "",
) -> Frame:
    """A dag with its jobs; their nodes are added to the run, unless they are there."""
    made, there = Frame(template, graph, base, inputs), {node.name: node for node in state.nodes}
    for name, task in graph.tasks.items():
        of = workflow.templates[task.template]
        node = there.get(names.inside(parent, name)) or _added(state, _node(task, of, parent))
        made.jobs[name] = Job(task, of, node, made)
    return made


def inner(workflow: Workflow, state: RunState, job: Job) -> Frame:
    """Raises: Unresolved: an argument without a value."""
    graph = workflow.graphs[job.template.name]
    base, inputs = job.frame.base, inputs_of(job)
    return frame(workflow, state, graph, template=job.template, base=base, inputs=inputs, parent=job.node.name)


def members(state: RunState, job: Job) -> list[Job]:
    """One job for each item.

    Raises:
        Unresolved, ConfigError: the items can't be made out, and ``when`` doesn't already say no (expandTask).
    """
    try:
        found = fanout.items(job.task, job.scope)
    except ConfigError:
        if _skipped_anyway(job):
            return []
        raise
    made = []
    for index, item in enumerate(found):
        name = names.of_item(job.node.name, index, item)
        node = Node(
            name=name,
            display_name=names.of_item(job.task.name, index, item),
            template=job.template.name,
            kind=_kind(job.template),
            parent=job.node.name,
        )
        made.append(Job(job.task, job.template, _added(state, node), job.frame, values=fanout.values(item)))
    return made


def exit_hook(workflow: Workflow, state: RunState, job: Job) -> Job | None:
    """Raises: ConfigError: its expression with its values is no condition."""
    hook = job.task.hooks.exit
    if hook is None:
        return None
    if hook.expression and decide(parse(hook.expression, VALUE), job.scope.perhaps) is not True:
        return None
    template = workflow.templates[hook.template]
    task = Task(name=names.EXIT_NODE, template=hook.template, arguments=hook.arguments)
    node = _node(task, template, job.node.name)
    return Job(task, template, _added(state, node), job.frame)


def _skipped_anyway(job: Job) -> bool:
    try:
        return bool(skipped_by(job.task.when, job.scope))
    except ConfigError:  # it needs {{item}}
        return False


def _added(state: RunState, node: Node) -> Node:
    state.add(node)
    return node


def _node(task: Task, template: Template, parent: str = "") -> Node:
    kind: Kind = "TaskGroup" if task.expands else _kind(template)
    name = names.inside(parent, task.name)
    return Node(name=name, display_name=task.name, template=template.name, kind=kind, parent=parent)


def _kind(template: Template) -> Kind:
    if template.dag:
        return "DAG"
    if template.steps is not None:
        return "Steps"
    return "Suspend" if template.suspend else "Pod"
