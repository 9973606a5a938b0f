"""Applies the platform's manifests to a cluster: server-side, under a field manager of our own."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from rich.table import Table

from pipeline.argo.template import with_cluster
from pipeline.cluster.controller import account, has_repository
from pipeline.settings.platform import DEFAULT_REPOSITORY
from stages.parts.base.errors import AccessDenied, ClusterRefused, Conflict
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import DEFINITIONS, NAMESPACES, Kind, Object
from stages.parts.cluster.refusals import Absent
from stages.rollout.kserve.detect import CRD

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig

ORDER: Final = ("Namespace", "PriorityClass", "ResourceQuota", "ServiceAccount", "Secret", "ConfigMap")
"""Kinds that are applied first, in this order; other kinds of Kubernetes itself come next, custom resources last."""
CRON_WORKFLOWS: Final = "CronWorkflow"
BUILT_IN: Final = ("k8s.io",)


@dataclass(frozen=True)
class Applied:
    kind: str
    name: str
    namespace: str
    state: Literal["created", "changed", "unchanged", "would be created", "would be changed"]


def install(cluster: Cluster, config: RunConfig, *, dry_run: bool, force: bool) -> list[Applied]:
    """Apply every document, after checking that the cluster has all their kinds. Where KServe is, this includes what
    rollouts need.

    Args:
        dry_run: the cluster checks everything and changes nothing.
        force: take over fields that another manager has changed.

    Raises:
        NotInstalled: the definition of a custom resource is missing; the hint says what brings it.
        Conflict: another manager has changed a field, which is named.
        AccessDenied, ClusterRefused, ClusterUnavailable: the first document that fails raises it.
    """
    from pipeline.cluster.manifests import documents_of, for_kserve

    found = documents_of(_as_found(cluster, config))
    if has_kserve(cluster):
        found += for_kserve(config.platform.namespace)
    found = in_order(found)
    kinds = [cluster.kind(each["apiVersion"], each["kind"]) for each in found]
    new = {name for name in _namespaces(found) if dry_run and not _exists(cluster, NAMESPACES, name, None)}
    return [_apply(cluster, kind, each, new, dry_run, force) for kind, each in zip(kinds, found, strict=True)]


def _as_found(cluster: Cluster, config: RunConfig) -> RunConfig:
    """*config* with the service account and the artifact repository of the cluster's own Argo, where they may be seen
    and *config* names no others."""
    asked = config.platform.cluster
    if asked is None:
        return config
    found: dict[str, str | None] = {}
    if asked.controller_account is None:
        with contextlib.suppress(AccessDenied):
            found["controller_account"] = account(cluster, asked.controller_namespace)
    if asked.artifact_repository is None and has_repository(cluster, asked.controller_namespace):
        found["artifact_repository"] = DEFAULT_REPOSITORY
    return with_cluster(config, found)


def has_kserve(cluster: Cluster) -> bool:
    return _exists(cluster, DEFINITIONS, CRD, None)


def table(applied: list[Applied]) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("Kind", "Name", "Namespace", "State"):
        shown.add_column(heading, overflow="fold")
    for each in applied:
        shown.add_row(each.kind, each.name, each.namespace or "–", each.state)
    return shown


def _apply(cluster: Cluster, kind: Kind, body: Object, new: set[str], dry_run: bool, force: bool) -> Applied:
    name = str(body["metadata"]["name"])
    namespace = str(body["metadata"].get("namespace", cluster.namespace)) if kind.namespaced else ""
    if namespace in new:  # a dry run can't read a namespace that it would only create
        return Applied(kind.name, name, namespace, "would be created")
    before = _read(cluster, kind, name, namespace or None)
    if before and kind.name == CRON_WORKFLOWS:
        body = _as_people_set_it(body, before)
    try:
        after = cluster.apply(kind, body, namespace or None, force=force, dry_run=dry_run)
    except Conflict as error:
        hint = "--force takes over these fields; or leave them to the other manager"
        raise Conflict(f"{kind.name} {name}: {error}", hint=hint) from error
    except ClusterRefused as error:
        raise ClusterRefused(f"{kind.name} {name}: {error}", hint=error.hint) from error
    if before is None:
        return Applied(kind.name, name, namespace, "would be created" if dry_run else "created")
    if _content(before) == _content(after):
        return Applied(kind.name, name, namespace, "unchanged")
    return Applied(kind.name, name, namespace, "would be changed" if dry_run else "changed")


def in_order(documents: list[Object]) -> list[Object]:
    """Sorted so that each can be applied after those before it."""
    return sorted(documents, key=_place)


def _as_people_set_it(body: Object, before: Object) -> Object:
    """A CronWorkflow with what people set in the cluster: whether it waits to be wanted, and for which models."""
    spec, there = body["spec"], before["spec"]
    own = {"suspend": there.get("suspend", spec["suspend"])}
    if given := there.get("workflowSpec", {}).get("arguments"):
        own["workflowSpec"] = spec["workflowSpec"] | {"arguments": given}
    return body | {"spec": spec | own}


def _place(body: Object) -> tuple[int, bool]:
    group = body["apiVersion"].rpartition("/")[0]
    first = ORDER.index(body["kind"]) if body["kind"] in ORDER else len(ORDER)
    return first, "." in group and not group.endswith(BUILT_IN)


def _namespaces(found: list[Object]) -> set[str]:
    return {each["metadata"]["name"] for each in found if each["kind"] == NAMESPACES.name}


def _exists(cluster: Cluster, kind: Kind, name: str, namespace: str | None) -> bool:
    return _read(cluster, kind, name, namespace) is not None


def _read(cluster: Cluster, kind: Kind, name: str, namespace: str | None) -> Object | None:
    try:
        return cluster.get(kind, name, namespace)
    except Absent:
        return None


def _content(body: Object) -> Object:
    volatile = ("resourceVersion", "managedFields", "generation")
    metadata = {key: value for key, value in body["metadata"].items() if key not in volatile}
    return {key: value for key, value in body.items() if key != "status"} | {"metadata": metadata}
