"""Applies the platform's manifests to a cluster: server-side, under a field manager of our own."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from pipeline.argo.template import with_cluster
from pipeline.cluster.changes import ObjectChange, in_order
from pipeline.cluster.controller import account, has_repository
from pipeline.settings.platform import DEFAULT_REPOSITORY, LOCKS
from stages.parts.base.errors import AccessDenied, ClusterRefused, Conflict
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import CONFIG_MAPS, DEFINITIONS, NAMESPACES, Kind, Object
from stages.rollout.kserve.detect import CRD

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig

VOLATILE: Final = ("resourceVersion", "managedFields", "generation")


def install(cluster: Cluster, config: RunConfig, *, dry_run: bool, force: bool) -> list[ObjectChange]:
    """Apply every document, after checking that the cluster has all their kinds, and, if KServe is installed, what
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

    documents = documents_of(_with_what_argo_has(cluster, config))
    if has_kserve(cluster):
        documents += for_kserve(config.platform.namespace)
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
