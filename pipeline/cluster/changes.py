"""What ``install`` and ``uninstall`` do to each object, and the order in which objects can be applied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from rich.table import Table

from pipeline.runs.tables import plain_table
from stages.parts.cluster.kinds import Object

ORDER: Final = ("Namespace", "PriorityClass", "ResourceQuota", "ServiceAccount", "Secret", "ConfigMap")
"""Kinds that are applied first, in this order; other kinds of Kubernetes itself come next, custom resources last."""
State = Literal[
    "created",
    "changed",
    "unchanged",
    "would be created",
    "would be changed",
    "removed",
    "would be removed",
    "absent",
    "kept",
]


@dataclass(frozen=True)
class ObjectChange:
    kind: str
    name: str
    namespace: str
    state: State
    reason: str = ""
    """Why the object, or a value in it, is kept."""


def in_order(documents: list[Object]) -> list[Object]:
    """Sort *documents* so that each can be applied after those before it."""

    def place(body: Object) -> tuple[int, bool]:
        group = body["apiVersion"].rpartition("/")[0]
        first = ORDER.index(body["kind"]) if body["kind"] in ORDER else len(ORDER)
        return first, "." in group and not group.endswith("k8s.io")

    return sorted(documents, key=place)


def table(changes: list[ObjectChange]) -> Table:
    """Lay *changes* out for a terminal, one row for each object."""
    rows = plain_table("Kind", "Name", "Namespace", "State")
    for change in changes:
        state = f"{change.state}: {change.reason}" if change.reason else change.state
        rows.add_row(change.kind, change.name, change.namespace or "–", state)
    return rows
