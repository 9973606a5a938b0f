"""Removes from a cluster what ``install`` applied: the same objects, in the reverse order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from pipeline.argo.runs import all_runs
from pipeline.argo.status import ended
from pipeline.cluster.changes import ObjectChange, in_order
from pipeline.workflow.parameters import NAME
from pipeline.workflow.stage_templates import API_KEY, HUB_TOKEN
from stages.parts.base.errors import AccessDenied, Conflict, NotInstalled
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import CLAIMS, NAMESPACES, TEMPLATES, Kind, Object
from stages.parts.cluster.refusals import Absent
from stages.rollout.kserve.detect import serving_kinds
from stages.rollout.kserve.objects import PART_OF

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig

SELECTOR: Final = ",".join(f"{key}={value}" for key, value in PART_OF.items())
UNLABELLED: Final = (
    *(("Secret", secret.secret_name) for secret in (HUB_TOKEN, API_KEY)),
    *(("ServiceAccount", "default"), ("ConfigMap", "kube-root-ca.crt")),
)
"""What people make for Slipway by hand, and what every namespace has."""
DERIVED: Final = frozenset({"Event", "Endpoints", "EndpointSlice"})
"""Kinds that the cluster makes and forgets by itself."""
SHOWN: Final = 3


def uninstall(cluster: Cluster, config: RunConfig, *, models: bool, dry_run: bool, force: bool) -> list[ObjectChange]:
    """Remove what ``install`` applied; what is not there is no fault.

    Args:
        models: remove the claim for the volume with the models too, and the namespace if nothing else is in it.
        dry_run: change nothing.
        force: go on while runs are active or endpoints serve.

    Raises:
        Conflict: runs are active in the namespace, or endpoints serve there.
        AccessDenied, ClusterUnavailable: the first object that fails raises it; what went before is removed.
    """
    from pipeline.cluster.manifests import documents_of, for_kserve

    documents = in_order([*documents_of(config), *for_kserve(config.platform.namespace)])[::-1]
    if not force:
        _refuse_while_used(cluster)
    elsewhere = _other_installation(cluster)
    return [_remove(cluster, body, elsewhere, models=models, dry_run=dry_run) for body in documents]


def _remove(cluster: Cluster, body: Object, elsewhere: str, *, models: bool, dry_run: bool) -> ObjectChange:
    name, namespace = body["metadata"]["name"], body["metadata"].get("namespace", "")
    change = partial(ObjectChange, body["kind"], name, namespace)
    try:
        kind = cluster.kind(body["apiVersion"], body["kind"])
        current = cluster.get(kind, name, namespace)
        if reason := _reason_to_keep(cluster, kind, current["metadata"], elsewhere, models=models):
            return change("kept", reason)
        if dry_run:
            return change("would be removed")
        cluster.delete(kind, name, namespace)
    except (NotInstalled, Absent):
        return change("absent")
    return change("removed")


def _refuse_while_used(cluster: Cluster) -> None:
    active = []
    with contextlib.suppress(NotInstalled):
        active = [run.id for run in all_runs(cluster) if not ended(run.workflow)]
    if active:
        hint = f"wait, or stop them: slipway stop {active[0]} --namespace {cluster.namespace}; --force goes on"
        raise Conflict(f"runs are active in namespace {cluster.namespace}: {', '.join(active)}", hint=hint)
    endpoints, kinds = [], []
    for kind in serving_kinds():
        with contextlib.suppress(Absent):  # no KServe
            if services := cluster.list(kind, labels=SELECTOR)[0]:
                endpoints += [service["metadata"]["name"] for service in services]
                kinds.append(kind.plural)
    if endpoints:
        remove = f"kubectl -n {cluster.namespace} delete {','.join([*kinds, 'httproutes'])} -l {SELECTOR}"
        hint = f"they need the runtime that goes; {remove}, or --force leaves them as they are"
        raise Conflict(f"endpoints serve in namespace {cluster.namespace}: {', '.join(endpoints)}", hint=hint)


def _other_installation(cluster: Cluster) -> str:
    """Return another namespace with our template, or an empty text. It shares what is outside of namespaces."""
    try:
        templates, _ = cluster.list(TEMPLATES, labels=SELECTOR, everywhere=True)
    except Absent:
        return ""
    namespaces = (body["metadata"]["namespace"] for body in templates if body["metadata"]["name"] == NAME)
    return next((namespace for namespace in namespaces if namespace != cluster.namespace), "")


def _reason_to_keep(cluster: Cluster, kind: Kind, metadata: Object, elsewhere: str, *, models: bool) -> str:
    """Say why an object stays; return an empty text if it goes."""
    marks = (metadata.get("labels") or {}) | (metadata.get("annotations") or {})
    if not PART_OF.items() <= marks.items():
        return f"not Slipway's: it lacks the label {SELECTOR}"
    if kind == NAMESPACES:
        return _also_holds(cluster) if models else "with the models; --models removes it if it holds nothing else"
    if kind == CLAIMS and not models:
        return "it holds the models; --models removes it"
    private = metadata.get("namespace") == cluster.namespace or metadata["name"].endswith(f"-{cluster.namespace}")
    if elsewhere and not private:
        return f"Slipway in namespace {elsewhere} needs it"
    return ""


def _also_holds(cluster: Cluster) -> str:
    """Say what the namespace holds besides what is ours; return an empty text if nothing."""
    try:
        foreign = list(_foreign(cluster))
    except AccessDenied as error:
        return f"what else it holds may not be seen: {error}"
    more = f" and {len(foreign) - SHOWN} more" if len(foreign) > SHOWN else ""
    return f"it also holds {', '.join(foreign[:SHOWN])}{more}" if foreign else ""


def _foreign(cluster: Cluster) -> Iterator[str]:
    """Name the objects that somebody else made; those with an owner are judged by the owner."""
    for kind in cluster.listable():
        if kind.name in DERIVED or kind.group.endswith("metrics.k8s.io"):
            continue
        for metadata in (body["metadata"] for body in cluster.list(kind)[0]):
            ours = PART_OF.items() <= (metadata.get("labels") or {}).items() or metadata.get("ownerReferences")
            if not ours and (kind.name, metadata["name"]) not in UNLABELLED:
                yield f"{kind.name} {metadata['name']}"
