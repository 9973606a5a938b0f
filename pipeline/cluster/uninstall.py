"""Removes from a cluster what ``install`` applied: the same objects, in the reverse order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from rich.table import Table

from pipeline.argo.runs import all_runs
from pipeline.argo.status import ended
from pipeline.cluster.install import in_order
from pipeline.cluster.objects import LABELS
from pipeline.workflow.parameters import NAME
from pipeline.workflow.stage_templates import API_KEY, HUB_TOKEN
from stages.parts.base.errors import AccessDenied, Conflict, NotInstalled
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import CLAIMS, NAMESPACES, TEMPLATES, Kind, Object
from stages.parts.cluster.refusals import Absent
from stages.rollout.kserve.kept import ISVCS
from stages.rollout.kserve.llm_objects import LLM_SERVICES

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig

OURS: Final = ",".join(f"{key}={value}" for key, value in LABELS.items())
ENDPOINTS: Final = (ISVCS, LLM_SERVICES)
OF_EVERY_NAMESPACE: Final = frozenset({("ServiceAccount", "default"), ("ConfigMap", "kube-root-ca.crt")})
OF_SLIPWAY: Final = frozenset({("Secret", str(each.secret_name)) for each in (HUB_TOKEN, API_KEY)})
"""What people make for Slipway by hand, without its label."""
DERIVED: Final = frozenset({"Event", "Endpoints", "EndpointSlice"})
"""Kinds that the cluster makes and forgets by itself."""
SHOWN: Final = 3


@dataclass(frozen=True)
class Removal:
    kind: str
    name: str
    namespace: str
    state: Literal["removed", "would be removed", "absent", "kept"]
    reason: str = ""
    """Why it is kept."""


def uninstall(cluster: Cluster, config: RunConfig, *, models: bool, dry_run: bool, force: bool) -> list[Removal]:
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
    done = []
    for body in documents:
        name, namespace = body["metadata"]["name"], body["metadata"].get("namespace", "")
        kind = _kind(cluster, body)
        there = _read(cluster, kind, name, namespace) if kind else None
        if kind is None or there is None:
            done.append(Removal(body["kind"], name, namespace, "absent"))
        elif reason := _kept(cluster, there, elsewhere, models=models):
            done.append(Removal(body["kind"], name, namespace, "kept", reason))
        else:
            done.append(_remove(cluster, kind, name, namespace, dry_run=dry_run))
    return done


def table(done: list[Removal]) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("Kind", "Name", "Namespace", "State"):
        shown.add_column(heading, overflow="fold")
    for each in done:
        state = f"{each.state}: {each.reason}" if each.reason else each.state
        shown.add_row(each.kind, each.name, each.namespace or "–", state)
    return shown


def _refuse_while_used(cluster: Cluster) -> None:
    try:
        active = [run.id for run in all_runs(cluster) if not ended(run.workflow)]
    except NotInstalled:
        active = []
    if active:
        hint = f"wait, or stop them: slipway stop {active[0]} --namespace {cluster.namespace}; --force goes on"
        raise Conflict(f"runs are active in namespace {cluster.namespace}: {', '.join(active)}", hint=hint)
    endpoints, kinds = [], []
    for kind in ENDPOINTS:
        with contextlib.suppress(Absent):  # no KServe
            if found := cluster.list(kind, labels=OURS)[0]:
                endpoints += [each["metadata"]["name"] for each in found]
                kinds.append(kind.plural)
    if endpoints:
        remove = f"kubectl -n {cluster.namespace} delete {','.join([*kinds, 'httproutes'])} -l {OURS}"
        hint = f"they need the runtime that goes; {remove}, or --force leaves them as they are"
        raise Conflict(f"endpoints serve in namespace {cluster.namespace}: {', '.join(endpoints)}", hint=hint)


def _other_installation(cluster: Cluster) -> str:
    """Another namespace with our template; empty if there is none. It shares what is outside of namespaces."""
    try:
        found, _ = cluster.list(TEMPLATES, labels=OURS, everywhere=True)
    except Absent:
        return ""
    places = [each["metadata"]["namespace"] for each in found if each["metadata"]["name"] == NAME]
    return next((place for place in places if place != cluster.namespace), "")


def _kept(cluster: Cluster, there: Object, elsewhere: str, *, models: bool) -> str:
    """Why an object stays; empty if it goes."""
    kind, metadata = there["kind"], there["metadata"]
    marks = (metadata.get("labels") or {}) | (metadata.get("annotations") or {})
    if not LABELS.items() <= marks.items():
        return f"not Slipway's: it lacks the label {OURS}"
    if kind == NAMESPACES.name:
        others = _others(cluster) if models else ""
        return others if models else "with the models; --models removes it if it holds nothing else"
    if kind == CLAIMS.name and not models:
        return "it holds the models; --models removes it"
    own = metadata.get("namespace") == cluster.namespace or metadata["name"].endswith(f"-{cluster.namespace}")
    if elsewhere and not own:
        return f"Slipway in namespace {elsewhere} needs it"
    return ""


def _others(cluster: Cluster) -> str:
    """What the namespace holds besides what is ours; empty if nothing."""
    try:
        found = list(_not_ours(cluster))
    except AccessDenied as error:
        return f"what else it holds may not be seen: {error}"
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"it also holds {', '.join(found[:SHOWN])}{more}" if found else ""


def _not_ours(cluster: Cluster) -> Iterator[str]:
    """Objects that somebody else made; those with an owner are judged by the owner."""
    known = OF_EVERY_NAMESPACE | OF_SLIPWAY
    for kind in cluster.listable():
        if kind.name in DERIVED or kind.group.endswith("metrics.k8s.io"):
            continue
        for each in cluster.list(kind)[0]:
            metadata = each["metadata"]
            labelled = LABELS.items() <= (metadata.get("labels") or {}).items()
            if not (labelled or metadata.get("ownerReferences") or (kind.name, metadata["name"]) in known):
                yield f"{kind.name} {metadata['name']}"


def _kind(cluster: Cluster, body: Object) -> Kind | None:
    try:
        return cluster.kind(body["apiVersion"], body["kind"])
    except NotInstalled:
        return None


def _read(cluster: Cluster, kind: Kind, name: str, namespace: str) -> Object | None:
    try:
        found = cluster.get(kind, name, namespace)
    except Absent:
        return None
    return {"kind": kind.name} | found


def _remove(cluster: Cluster, kind: Kind, name: str, namespace: str, *, dry_run: bool) -> Removal:
    if dry_run:
        return Removal(kind.name, name, namespace, "would be removed")
    try:
        cluster.delete(kind, name, namespace)
    except Absent:
        return Removal(kind.name, name, namespace, "absent")
    return Removal(kind.name, name, namespace, "removed")
