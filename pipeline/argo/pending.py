"""Says what a pod that finds no node asks for and, where nodes may be read, how much of it they have left."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

from pipeline.runs.state import RunState
from stages.parts.base.errors import SlipwayError
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import NODES, Object
from stages.parts.cluster.nodes import Amounts, admits, free, quantity, takes_pods

UNSCHEDULABLE: Final = re.compile(r"Unschedulable: 0/\d+ nodes are available: (?P<why>.*)", re.DOTALL)
"""The scheduler's sentence, as Argo repeats it."""
REST: Final = re.compile(r"\.? (no new claims|preemption: ).*", re.DOTALL)
"""The part of it that says nothing new."""
NONE_FREE: Final = "no node has it free"
UNITS: Final = {"cpu": (Decimal(1), "CPU"), "memory": (Decimal(1024**3), "GiB"), "nvidia.com/gpu": (Decimal(1), "GPU")}
"""What each resource that stages ask for is shown in. All else that a node may lack is left to the scheduler."""
AGAIN_S: Final = 30.0
"""How often nodes are looked at while a run is followed."""
PARAMETER: Final = re.compile(r"\{\{inputs\.parameters\.([\w-]+)\}\}")


def explained(message: str, template: Object, node: Object) -> str:
    """*message* of a node of a workflow; a scheduler's one becomes a short sentence."""
    match = UNSCHEDULABLE.search(message)
    if match is None:
        return message
    why = REST.sub("", match["why"]).rstrip(". ")
    amounts = requested(template, node)
    short = f"room: asks for {shown(amounts)}; {NONE_FREE}" if "Insufficient" in why and amounts else f"a node: {why}"
    return f"{message[: match.start()]}waits for {short}"


def requested(template: Object, node: Object) -> Amounts:
    """Return what a stage's container requests, whose patch refers to the inputs of *node*; empty if it can't be
    read."""
    inputs = inputs_of(node)
    try:
        patch = json.loads(PARAMETER.sub(lambda match: inputs.get(match[1], ""), template.get("podSpecPatch") or "{}"))
    except ValueError:  # a template that is not ours may have YAML there
        return {}
    containers = [template.get("container") or {}, *patch.get("containers", [])]
    amounts: dict[str, str] = {}
    for kind in ("limits", "requests"):
        for container in containers:
            amounts |= container.get("resources", {}).get(kind) or {}
    return {name: quantity(str(amounts[name])) for name in UNITS if amounts.get(name)}


def inputs_of(node: Object) -> dict[str, str]:
    """Return the values of a node's inputs, by name."""
    return {one["name"]: one.get("value", "") for one in (node.get("inputs") or {}).get("parameters", [])}


class Rooms:
    """The room on the nodes of a cluster, looked at no more often than needed."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._looked: float | None = None
        self._free: list[tuple[Object, Amounts]] | None = None

    def fill(self, state: RunState, templates: Mapping[str, Object], nodes: Mapping[str, Object]) -> None:
        """Complete the messages of *nodes* of a workflow that wait for room, if this cluster's nodes may be read."""
        for node in state.nodes:
            if node.message.endswith(NONE_FREE) and (argo_node := nodes.get(f"{state.name}.{node.name}")):
                template = templates.get(node.template, {})
                room = self._describe_free(template, requested(template, argo_node))
                node.message = node.message.replace(NONE_FREE, room)

    def _describe_free(self, template: Object, asks: Amounts) -> str:
        if self._looked is None or time.monotonic() - self._looked > AGAIN_S:
            self._looked, self._free = time.monotonic(), self._look()
        if self._free is None:
            return NONE_FREE
        fitting = [left for node, left in self._free if admits(node, template)]
        if not fitting:
            return f"none of {len(self._free)} nodes has the labels and taints for it"
        best = max(fitting, key=lambda left: min(left.get(name, Decimal(0)) / asks[name] for name in asks))
        count = "the node that matches" if len(fitting) == 1 else f"the best of {len(fitting)} nodes that match"
        return f"{count} has {shown({name: best.get(name, Decimal(0)) for name in asks})} left"

    def _look(self) -> list[tuple[Object, Amounts]] | None:
        """Each node with what is left of it; None where nodes or other people's pods can't be read."""
        try:
            nodes = [node for node in self._cluster.list(NODES)[0] if takes_pods(node)]
            return list(zip(nodes, free(self._cluster, nodes, UNITS), strict=True))
        except SlipwayError:
            return None


def shown(amounts: Amounts) -> str:
    return ", ".join(
        f"{float(round(amount / UNITS[name][0], 2)):g} {UNITS[name][1]}" for name, amount in amounts.items()
    )
