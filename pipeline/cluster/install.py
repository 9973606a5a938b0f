"""Applies the platform's manifests to a cluster, server-side and under a field manager of our own, and removes the same
objects again, in the reverse order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from rich.table import Table

from pipeline.argo.runs import all_runs
from pipeline.argo.status import ended
from pipeline.argo.template import with_cluster
from pipeline.cluster.controller import account, has_repository
from pipeline.cluster.door import GATEWAYS
from pipeline.cluster.manifests import documents_of, of_folder
from pipeline.cluster.monitoring import Monitoring
from pipeline.cluster.scaling_check import with_prometheus
from pipeline.runs.engine import plain_table
from pipeline.settings.config import RunConfig
from pipeline.settings.platform import DEFAULT_REPOSITORY, LOCKS
from pipeline.workflow.parameters import NAME
from pipeline.workflow.stage_templates import API_KEY, HUB_TOKEN, NOTIFY, REGISTRY, SIGNING_KEY
from stages.parts.base.errors import AccessDenied, ClusterRefused, Conflict, NotInstalled
from stages.parts.cluster.api import Absent, Cluster
from stages.parts.cluster.kinds import CLAIMS, CONFIG_MAPS, DEFINITIONS, NAMESPACES, TEMPLATES, Kind, Object
from stages.rollout.kserve.detect import CRD, serving_kinds
from stages.rollout.kserve.objects import PART_OF, SELECTOR
from stages.rollout.kserve.shared_address import KINDS as SHARED_KINDS
from stages.rollout.kserve.shared_address import SHARED

ORDER: Final = ("Namespace", "PriorityClass", "ResourceQuota", "ServiceAccount", "Secret", "ConfigMap")
"""Kinds that are applied first, in this order; other kinds of Kubernetes itself come next, custom resources last."""
POLICIES: Final = "securitypolicies.gateway.envoyproxy.io"
VOLATILE: Final = ("resourceVersion", "managedFields", "generation")
UNLABELLED: Final = (
    *(("Secret", secret.secret_name) for secret in (HUB_TOKEN, API_KEY, SIGNING_KEY, NOTIFY, *REGISTRY)),
    *(("ServiceAccount", "default"), ("ConfigMap", "kube-root-ca.crt")),
)
"""What people make for Slipway by hand, and what every namespace has."""
DERIVED: Final = frozenset({"Event", "Endpoints", "EndpointSlice"})
"""Kinds that the cluster makes and forgets by itself."""
SHOWN: Final = 3


@dataclass(frozen=True)
class ObjectChange:
    kind: str
    name: str
    namespace: str
    state: str
    """created, changed or removed, after "would be" in a dry run; unchanged, absent or kept."""
    reason: str = ""
    """Why the object, or a value in it, is kept."""


def install(cluster: Cluster, config: RunConfig, *, dry_run: bool, force: bool) -> list[ObjectChange]:
    """Apply every document, after checking that the cluster has all their kinds, and what KServe, Envoy Gateway and
    Prometheus need, where they are. *force* takes over fields that another manager has changed.

    Raises:
        NotInstalled: the definition of a custom resource is missing; the hint says what brings it.
        Conflict: another manager has changed a field, which is named.
        AccessDenied, ClusterRefused, ClusterUnavailable: the first document that fails raises it.
    """
    documents = [*documents_of(_with_what_argo_has(cluster, config)), *_for_others(cluster, config)]
    if has_kserve(cluster):
        documents += with_prometheus(of_folder("kserve", config.platform.namespace), cluster)
    documents = in_order(documents)
    kinds = [cluster.kind(document["apiVersion"], document["kind"]) for document in documents]
    namespaces = {document["metadata"]["name"] for document in documents if document["kind"] == NAMESPACES.name}
    # A dry run can't look into a namespace that it would only create.
    new = {name for name in namespaces if dry_run and cluster.find(NAMESPACES, name) is None}
    return [
        _apply(cluster, kind, document, new, dry_run=dry_run, force=force)
        for kind, document in zip(kinds, documents, strict=True)
    ]


def has_kserve(cluster: Cluster) -> bool:
    return cluster.find(DEFINITIONS, CRD) is not None


def _for_others(cluster: Cluster, config: RunConfig) -> list[Object]:
    """Return what Prometheus, Grafana and Envoy Gateway take, where they are and may be seen. Where clients have
    policies, Envoy Gateway takes no other."""
    documents = Monitoring(cluster, config).documents
    with contextlib.suppress(AccessDenied):
        if not config.cluster.clients and cluster.find(DEFINITIONS, POLICIES):
            documents += of_folder("envoy-gateway", config.platform.namespace)
    return documents


def _with_what_argo_has(cluster: Cluster, config: RunConfig) -> RunConfig:
    """Complete *config* with the service account and the artifact repository of the cluster's own Argo, as far as they
    may be seen and *config* names no others."""
    settings = config.cluster
    changes: dict[str, str | None] = {}
    if settings.controller_account is None:
        with contextlib.suppress(AccessDenied):
            changes["controller_account"] = account(cluster, settings.controller_namespace)
    if settings.artifact_repository is None and has_repository(cluster, settings.controller_namespace):
        changes["artifact_repository"] = DEFAULT_REPOSITORY
    return with_cluster(config, changes)


def _apply(cluster: Cluster, kind: Kind, body: Object, new: set[str], *, dry_run: bool, force: bool) -> ObjectChange:
    name = str(body["metadata"]["name"])
    namespace = str(body["metadata"].get("namespace", cluster.namespace)) if kind.namespaced else ""
    if namespace in new:
        return ObjectChange(kind.name, name, namespace, "would be created")
    current = cluster.find(kind, name, namespace or None)
    if current and kind.name == "CronWorkflow":
        body = _as_people_set_it(body, current)
    reason = ""
    try:
        try:
            applied = cluster.apply(kind, body, namespace or None, force=force, dry_run=dry_run)
        except Conflict:
            if current is None or (kind, name) != (CONFIG_MAPS, LOCKS):
                raise
            # People set these limits in the cluster, to change them at once.
            applied = cluster.apply(kind, body | {"data": current["data"]}, namespace or None, dry_run=dry_run)
            reason = "; ".join(
                f"{limit} stays {current['data'][limit]}, as somebody set it; --force sets {value}"
                for limit, value in body["data"].items()
            )
    except Conflict as error:
        hint = "--force takes over these fields; or leave them to the other manager"
        raise Conflict(f"{kind.name} {name}: {error}", hint=hint) from error
    except ClusterRefused as error:
        raise ClusterRefused(f"{kind.name} {name}: {error}", hint=error.hint) from error
    if current is None:
        return ObjectChange(kind.name, name, namespace, "would be created" if dry_run else "created")
    if _content(current) == _content(applied):
        return ObjectChange(kind.name, name, namespace, "unchanged", reason)
    return ObjectChange(kind.name, name, namespace, "would be changed" if dry_run else "changed", reason)


def _as_people_set_it(body: Object, current: Object) -> Object:
    """Keep what people set of a CronWorkflow in the cluster: whether it is suspended, and for which models it runs."""
    spec, set_by_people = body["spec"], current["spec"]
    changes = {"suspend": set_by_people.get("suspend", spec["suspend"])}
    if arguments := set_by_people.get("workflowSpec", {}).get("arguments"):
        changes["workflowSpec"] = spec["workflowSpec"] | {"arguments": arguments}
    return body | {"spec": spec | changes}


def _content(body: Object) -> Object:
    metadata = {key: value for key, value in body["metadata"].items() if key not in VOLATILE}
    return {key: value for key, value in body.items() if key != "status"} | {"metadata": metadata}


def uninstall(cluster: Cluster, config: RunConfig, *, models: bool, dry_run: bool, force: bool) -> list[ObjectChange]:
    """Remove what ``install`` applied; what is not there is no fault. With *models*, remove the claim for the volume
    with the models too, and the namespace if nothing else is in it.

    Raises:
        Conflict: runs are active in the namespace, or endpoints serve there, and not *force*.
        AccessDenied, ClusterUnavailable: the first object that fails raises it; what went before is removed.
    """
    documents = [*documents_of(config), *of_folder("kserve", config.platform.namespace), *_for_others(cluster, config)]
    documents = in_order(documents)[::-1]
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
    serving = {kind.plural: _names(cluster, kind, SELECTOR) for kind in serving_kinds()}
    if endpoints := [name for names in serving.values() for name in names]:
        delete = f"kubectl -n {cluster.namespace} delete"
        remove = f"{delete} {','.join([*filter(serving.get, serving), 'httproutes'])} -l {SELECTOR}"
        label = "=".join(*SHARED.items())
        if shared := [kind.plural for kind in reversed(SHARED_KINDS) if _names(cluster, kind, label)]:
            remove += f" && {delete} {','.join(shared)} -l {label}"
        hint = f"they need the runtime that goes; {remove}, or --force leaves them as they are"
        raise Conflict(f"endpoints serve in namespace {cluster.namespace}: {', '.join(endpoints)}", hint=hint)


def _names(cluster: Cluster, kind: Kind, labels: str) -> list[str]:
    """Name the objects of a kind; none if the cluster does not know the kind."""
    try:
        return [body["metadata"]["name"] for body in cluster.list(kind, labels=labels)[0]]
    except Absent:
        return []


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
    if kind.name == "EnvoyProxy":
        for gateway in cluster.list(GATEWAYS, metadata["namespace"])[0]:
            reference = gateway["spec"].get("infrastructure", {}).get("parametersRef", {})
            if (reference.get("kind"), reference.get("name")) == ("EnvoyProxy", metadata["name"]):
                names_it = f"the Gateway {gateway['metadata']['name']} names it"
                return f"{names_it}, and routes nothing without it; remove its spec.infrastructure first"
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


def in_order(documents: list[Object]) -> list[Object]:
    """Sort *documents* so that each can be applied after those before it."""

    def place(body: Object) -> tuple[int, bool]:
        group = body["apiVersion"].rpartition("/")[0]
        first = ORDER.index(body["kind"]) if body["kind"] in ORDER else len(ORDER)
        return first, "." in group and not group.endswith("k8s.io")

    return sorted(documents, key=place)


def table(changes: list[ObjectChange]) -> Table:
    """Lay *changes* out for a terminal, one row for each object."""
    states = [f"{change.state}: {change.reason}" if change.reason else change.state for change in changes]
    rows = ((each.kind, each.name, each.namespace or "–", state) for each, state in zip(changes, states, strict=True))
    return plain_table("Kind", "Name", "Namespace", "State", rows=rows)
