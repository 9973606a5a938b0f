"""Which mode serves a model now. It is kept, whatever the cluster's KServe would choose today: otherwise an upgrade of
KServe would make a second set of objects beside those that serve. What serves shows it itself, see ``Mode.owns``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from stages.parts.base.errors import AccessDenied, Conflict
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import Kind, Object
from stages.parts.cluster.refusals import Absent
from stages.rollout.kserve.modes import AUTO, Mode, all_modes
from stages.rollout.kserve.objects import ISVCS, MODEL, PART_OF
from stages.rollout.kserve.settings import KServe

MOVE: Final = "to move it: slipway rollout move, see docs/rollout.md"


def serving_kinds() -> list[Kind]:
    """List the kinds of objects that serve in any mode."""
    return list(dict.fromkeys(mode.services for mode in all_modes()))


def served_modes(cluster: Cluster, namespace: str | None = None) -> dict[str, dict[str, list[str]]]:
    """List the names of the objects that serve, by model and by mode."""
    names: dict[str, dict[str, list[str]]] = {}
    for mode, service in _services(cluster, namespace):
        if model := service["metadata"].get("annotations", {}).get(MODEL):
            names.setdefault(model, {}).setdefault(mode.name, []).append(service["metadata"]["name"])
    return names


def kept_mode(cluster: Cluster, model: str, mode_set: str, namespace: str | None = None) -> str | None:
    """Find the mode in which *model* is served, if it is; raise Conflict if it is served in two modes at once, or in
    another one than *mode_set*, which is ``KServe.mode``."""
    modes = served_modes(cluster, namespace).get(model, {})
    if len(modes) > 1:
        listed = " and ".join(f"{mode} ({', '.join(names)})" for mode, names in modes.items())
        raise Conflict(
            f"{model} is served in two modes at once: {listed}",
            hint="slipway rollout move completes a move; or keep one: "
            f"kubectl -n {namespace or cluster.namespace} delete isvc,llmisvc, with the others' names",
        )
    mode = next(iter(modes), None)
    if mode and mode_set not in (AUTO, mode):
        raise Conflict(
            f"{model} is served in mode {mode}, and kserve.mode says {mode_set}",
            hint=f"set kserve.mode to auto or {mode}; {MOVE}",
        )
    return mode


def in_mode(settings: KServe, mode: str | None) -> KServe:
    return settings.model_copy(update={"mode": mode}) if mode else settings


def _services(cluster: Cluster, namespace: str | None) -> Iterator[tuple[Mode, Object]]:
    """Yield our objects that serve, each with its mode."""
    selector = ",".join(f"{name}={value}" for name, value in PART_OF.items())
    for kind in serving_kinds():
        # Most clusters have InferenceServices alone, and whoever may not see other kinds makes none.
        with contextlib.suppress(*(() if kind == ISVCS else (Absent, AccessDenied))):
            for service in cluster.list(kind, namespace, labels=selector)[0]:
                owners = (mode for mode in all_modes() if mode.services == kind and mode.owns(service))
                if mode := next(owners, None):
                    yield mode, service
