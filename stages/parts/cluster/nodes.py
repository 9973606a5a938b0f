"""What nodes have, and have left for another pod, as the scheduler counts it, in Kubernetes' quantities."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from stages.parts.base.errors import ConfigError
from stages.parts.cluster.kinds import PODS, Object

if TYPE_CHECKING:
    from stages.parts.cluster.api import Cluster

QUANTITY: Final = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([eE][+-]?[0-9]+)|([numkMGTPE]|[KMGTPE]i))?")
SUFFIXES: Final[dict[str, Decimal]] = (
    {"": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal(1000)}
    | {suffix: Decimal(1000) ** power for power, suffix in enumerate("MGTPE", start=2)}
    | {f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", start=1)}
)
Amounts: TypeAlias = dict[str, Decimal]
"""Quantities of resources by name, in their base units."""


def quantity(text: str) -> Decimal:
    """Read a Kubernetes quantity ('500m', '2', '1.5Gi', '1e3') in its base unit: cores, bytes, devices; raise
    ConfigError if *text* is none. Source: Kubernetes' resource.Quantity."""
    if not (match := QUANTITY.fullmatch(text)):
        raise ConfigError(f"{text!r} is not a Kubernetes quantity such as 500m, 2 or 4Gi")
    number, exponent, suffix = match.groups()
    return Decimal(number + (exponent or "")) * SUFFIXES[suffix or ""]


def free(cluster: Cluster, nodes: list[Object], resources: Collection[str]) -> list[Amounts]:
    """Compute what is left on each of these nodes; raise AccessDenied if pods of all namespaces may not be listed."""
    left = {node["metadata"]["name"]: allocatable(node, resources) for node in nodes}
    for pod in cluster.list(PODS, everywhere=True)[0]:
        ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
        if not ended and (amounts := left.get(pod["spec"].get("nodeName", ""))) is not None:
            for name in resources:
                amounts[name] -= requested(pod, name)
    return [{name: max(amount, Decimal(0)) for name, amount in amounts.items()} for amounts in left.values()]


def allocatable(node: Object, resources: Collection[str]) -> Amounts:
    """Read what a node has for pods."""
    amounts = node.get("status", {}).get("allocatable", {})
    return {name: quantity(str(amounts.get(name, "0"))) for name in resources}


def requested(pod: Object, resource: str) -> Decimal:
    """Compute what a pod takes: all containers together, or the largest of those that run before them."""

    def amounts(kind: str) -> list[Decimal]:
        requests = (container.get("resources", {}).get("requests", {}) for container in pod["spec"].get(kind, []))
        return [quantity(str(request.get(resource, "0"))) for request in requests]

    return max(sum(amounts("containers"), Decimal(0)), *amounts("initContainers"), Decimal(0))


def takes_pods(node: Object) -> bool:
    return not node.get("spec", {}).get("unschedulable")


def admits(node: Object, pod: Object) -> bool:
    """Whether a node takes new pods, those with this ``nodeSelector`` and these ``tolerations`` among them."""
    labels, tolerations = node["metadata"].get("labels") or {}, pod.get("tolerations") or []
    selected = (pod.get("nodeSelector") or {}).items() <= labels.items()
    taints = (taint for taint in node.get("spec", {}).get("taints") or [] if taint["effect"] != "PreferNoSchedule")
    tolerated = all(any(_tolerates(toleration, taint) for toleration in tolerations) for taint in taints)
    return takes_pods(node) and selected and tolerated


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    same_key = not toleration.get("key") or toleration["key"] == taint["key"]
    same_effect = not toleration.get("effect") or toleration["effect"] == taint["effect"]
    exists = toleration.get("operator") == "Exists"
    return same_key and same_effect and (exists or toleration.get("value", "") == taint.get("value", ""))
