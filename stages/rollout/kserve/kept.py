"""Which mode serves a model now. It is kept, whatever the cluster's KServe would choose today: otherwise an upgrade of
KServe would make a second set of objects beside those that serve.

What serves says it itself: the annotation with which KServe was told the deployment mode; in mode ``route``, the
endpoint's label on the InferenceServices behind the rollout's own HTTPRoute; in mode ``llm``, its kind.
"""

from __future__ import annotations

import contextlib
from typing import Final, cast

from stages.parts.base.errors import AccessDenied, Conflict
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import ModelStore
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import Kind
from stages.parts.cluster.refusals import Absent
from stages.rollout.kserve.llm_objects import LLM_SERVICES
from stages.rollout.kserve.objects import (
    DEPLOYMENT_MODE,
    DEPLOYMENT_MODES,
    ENDPOINT,
    MODEL,
    PART_OF,
    KServeEndpoint,
    Mode,
    Object,
)
from stages.rollout.kserve.settings import KServe

ISVCS: Final = Kind("serving.kserve.io/v1beta1", "InferenceService", "inferenceservices")
MOVE: Final = "to move it: slipway rollout move, see docs/rollout.md"


def mode_of(service: Object) -> Mode | None:
    """The mode that an InferenceService of ours, or LLMInferenceService, belongs to."""
    metadata = service["metadata"]
    if "template" in service.get("spec", {}):
        return "llm"
    if ENDPOINT in metadata.get("labels", {}):
        return "route"
    return cast("Mode | None", DEPLOYMENT_MODES.get(metadata.get("annotations", {}).get(DEPLOYMENT_MODE, "")))


def endpoint_at(cluster: Cluster, store: ModelStore, serving: AskedServing, settings: KServe) -> KServeEndpoint:
    """The model's endpoint on *cluster*, under the name that it has if it serves already."""
    called = ""
    for service in _ours(cluster, None):
        metadata = service["metadata"]
        if metadata.get("annotations", {}).get(MODEL) == store.model:
            called = metadata.get("labels", {}).get(ENDPOINT, metadata["name"])
    return KServeEndpoint(store, serving, settings, cluster.namespace, called)


def _ours(cluster: Cluster, namespace: str | None) -> list[Object]:
    """The InferenceServices and LLMInferenceServices; what others made is left out."""
    selector = ",".join(f"{name}={value}" for name, value in PART_OF.items())
    there = cluster.list(ISVCS, namespace, labels=selector)[0]
    with contextlib.suppress(Absent, AccessDenied):  # most clusters have none, and who may not see them makes none
        there += cluster.list(LLM_SERVICES, namespace, labels=selector)[0]
    return there


def served_modes(cluster: Cluster, namespace: str | None = None) -> dict[str, dict[Mode, list[str]]]:
    """The names of what serves, by model and by mode."""
    found: dict[str, dict[Mode, list[str]]] = {}
    for service in _ours(cluster, namespace):
        model, mode = service["metadata"].get("annotations", {}).get(MODEL), mode_of(service)
        if model and mode:
            found.setdefault(model, {}).setdefault(mode, []).append(service["metadata"]["name"])
    return found


def kept_mode(cluster: Cluster, model: str, asked: str, namespace: str | None = None) -> Mode | None:
    """The mode in which *model* is served; None: it is not.

    Args:
        asked: ``KServe.mode``.

    Raises:
        Conflict: it is served in two modes at once, or in another one than *asked*.
    """
    found = served_modes(cluster, namespace).get(model, {})
    if len(found) > 1:
        said = " and ".join(f"{mode} ({', '.join(names)})" for mode, names in found.items())
        raise Conflict(
            f"{model} is served in two modes at once: {said}",
            hint="slipway rollout move completes a move; or keep one: "
            f"kubectl -n {namespace or cluster.namespace} delete isvc,llmisvc, with the others' names",
        )
    mode = next(iter(found), None)
    if mode and asked not in ("auto", mode):
        raise Conflict(
            f"{model} is served in mode {mode}, and kserve.mode says {asked}",
            hint=f"set kserve.mode to auto or {mode}; {MOVE}",
        )
    return mode


def in_mode(settings: KServe, mode: Mode | None) -> KServe:
    return settings.model_copy(update={"mode": mode}) if mode else settings


def refuse_foreign(kind: Kind, found: Object, *owner: str) -> None:
    """Raises: Conflict: a controller, but not that of *owner* (kind, name), looks after the object."""
    for each in found["metadata"].get("ownerReferences", []):
        if (each["kind"], each["name"]) != owner:
            raise Conflict(
                f"the {kind.name} {found['metadata']['name']} belongs to the {each['kind']} {each['name']}",
                hint=f"remove or rename that {each['kind']}; nothing was changed",
            )
