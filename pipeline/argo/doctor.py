"""Checks whether a cluster has what a run needs, and says how to get what is missing. Changes nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pipeline.argo.template import difference
from pipeline.checks import CheckResult
from pipeline.definition import NAME, workflow_template
from pipeline.quantity import quantity
from pipeline.stage_templates import RESOLVE_CACHE
from stages.parts.base.errors import AccessDenied, SlipwayError
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import CLAIMS, CONFIG_MAPS, DEFINITIONS, NODES, REVIEWS, TEMPLATES, Object
from stages.parts.cluster.refusals import Absent

if TYPE_CHECKING:
    from pipeline.config import RunConfig

ARGO: Final = ("workflows.argoproj.io", "workflowtemplates.argoproj.io", "cronworkflows.argoproj.io")
RIGHTS: Final = (
    ("argoproj.io", "workflows", ("create", "get", "list", "watch", "patch")),
    ("argoproj.io", "workflowtemplates", ("get",)),
    ("", "pods", ("get", "list")),
    ("", "pods/log", ("get",)),
)
"""The rights to submit, follow and stop runs and to read logs; to install takes more."""
GPU: Final = "nvidia.com/gpu"
CACHE_LABEL: Final = ("workflows.argoproj.io/configmap-type", "Cache")
KSERVE: Final = "inferenceservices.serving.kserve.io"
KSERVE_NAMESPACE: Final = "kserve"
KSERVE_CONFIG: Final = "inferenceservice-config"


def check_cluster(cluster: Cluster, config: RunConfig) -> list[CheckResult]:
    """Run every check, in the order in which one would fix them.

    Raises:
        AccessDenied, ClusterUnavailable: the cluster's API can't be used.
    """
    version = cluster.request("GET", "/version").get("gitVersion", "unknown")
    found = [CheckResult(what="Kubernetes", state="ok", found=f"{version} at {cluster.address}")]
    definitions = {name: _definition(cluster, name) for name in (*ARGO, KSERVE)}
    found.append(_argo(definitions))
    found += [_rights(cluster, *each) for each in RIGHTS]
    for what, check in (("volume", _claim), ("GPUs", _gpus), ("template", _template), ("memoization", _cache)):
        found.append(_seen(what, partial(check, cluster, config)))
    return [*found, _seen("KServe", partial(_kserve, cluster, definitions[KSERVE]))]


def _seen(what: str, check: Callable[[], CheckResult]) -> CheckResult:
    """Run a check; where the user lacks the right to read something, it becomes a warning."""
    try:
        return check()
    except AccessDenied as error:
        return CheckResult(
            what=what, state="warning", found=f"may not be seen: {error}", hint="ask for the right to read it"
        )


def _definition(cluster: Cluster, name: str) -> Object | SlipwayError | None:
    try:
        return cluster.get(DEFINITIONS, name)
    except Absent:
        return None
    except AccessDenied as error:
        return error


def _argo(definitions: dict[str, Object | SlipwayError | None]) -> CheckResult:
    if isinstance(definitions[ARGO[0]], SlipwayError):
        return CheckResult(what="Argo Workflows", state="warning", found="its definitions may not be read")
    absent = [name for name in ARGO if definitions[name] is None]
    if absent:
        hint = "install Argo Workflows 4 or newer with its full CRDs"
        return CheckResult(what="Argo Workflows", state="missing", found=f"no {', '.join(absent)}", hint=hint)
    cron = definitions[ARGO[2]]
    fields = _fields(cron) if isinstance(cron, dict) else set()
    if not fields:
        hint = "the full CRDs let the cluster refuse a wrong workflow when it is applied"
        return CheckResult(what="Argo Workflows", state="warning", found="minimal CRDs: version unknown", hint=hint)
    if "schedule" in fields or "schedules" not in fields:
        hint = "upgrade Argo Workflows to 4 or newer: the manifests have mutexes and schedules in lists"
        return CheckResult(what="Argo Workflows", state="missing", found="older than 4.0", hint=hint)
    return CheckResult(what="Argo Workflows", state="ok", found="4.0 or newer")


def _fields(definition: Object) -> set[str]:
    """The fields of ``spec`` in the stored version; empty if the definition has no schema."""
    for version in definition["spec"]["versions"]:
        if version.get("storage"):
            schema = version.get("schema", {}).get("openAPIV3Schema", {})
            return set(schema.get("properties", {}).get("spec", {}).get("properties", {}))
    return set()


def _rights(cluster: Cluster, group: str, resource: str, verbs: tuple[str, ...]) -> CheckResult:
    refused = [verb for verb in verbs if not _may(cluster, verb, group, resource)]
    if refused:
        hint = f"a Role in namespace {cluster.namespace} that lets you {', '.join(refused)} {resource}"
        return CheckResult(what=f"rights: {resource}", state="missing", found=f"no {', '.join(refused)}", hint=hint)
    return CheckResult(what=f"rights: {resource}", state="ok", found=", ".join(verbs))


def _may(cluster: Cluster, verb: str, group: str, resource: str) -> bool:
    name, _, part = resource.partition("/")
    asks = {"verb": verb, "group": group, "resource": name, "namespace": cluster.namespace}
    asks |= {"subresource": part} if part else {}
    body = {"apiVersion": REVIEWS.api_version, "kind": REVIEWS.name, "spec": {"resourceAttributes": asks}}
    return bool(cluster.request("POST", REVIEWS.path(None), body=body)["status"]["allowed"])


def _claim(cluster: Cluster, config: RunConfig) -> CheckResult:
    name, install = config.platform.claim, f"slipway install --platform {config.platform.name}"
    try:
        claim = cluster.get(CLAIMS, name)
    except Absent:
        return CheckResult(what="volume", state="missing", found=f"no claim {name}", hint=install)
    modes, phase = claim["spec"].get("accessModes", []), claim.get("status", {}).get("phase", "Pending")
    asked = config.platform.cluster.storage.access if config.platform.cluster else "ReadWriteMany"
    found = f"{name}: {phase}, {', '.join(modes)}"
    if asked not in modes:
        hint = f"stages on several nodes share it, so it must be {asked}; a claim can't be changed, only recreated"
        return CheckResult(what="volume", state="missing", found=found, hint=hint)
    if phase != "Bound":
        hint = f"kubectl describe pvc {name}; a class that waits for the first pod binds it only then"
        return CheckResult(what="volume", state="warning", found=found, hint=hint)
    return CheckResult(what="volume", state="ok", found=found)


def _gpus(cluster: Cluster, config: RunConfig) -> CheckResult:
    nodes, _ = cluster.list(NODES)
    counts = [int(quantity(str(each.get("status", {}).get("allocatable", {}).get(GPU, "0")))) for each in nodes]
    wanted = max(stage.gpus if stage and isinstance(stage.gpus, int) else 0 for _, stage in config.platform.stages)
    found = f"{sum(counts)} on {sum(count > 0 for count in counts)} of {len(nodes)} nodes"
    if wanted > max(counts, default=0):
        hint = "no node has enough now: fine if an autoscaler adds nodes, else install NVIDIA's GPU operator"
        return CheckResult(what="GPUs", state="warning", found=f"{found}; a stage asks for {wanted}", hint=hint)
    return CheckResult(what="GPUs", state="ok", found=found)


def _template(cluster: Cluster, config: RunConfig) -> CheckResult:
    install = f"slipway install --platform {config.platform.name}"
    try:
        installed = cluster.get(TEMPLATES, NAME)
    except Absent:
        return CheckResult(what="template", state="missing", found=f"no WorkflowTemplate {NAME}", hint=install)
    path = difference(workflow_template(config)["spec"], installed["spec"], "spec")
    if path:
        hint = f"{install}, with the same --config"
        return CheckResult(
            what="template", state="warning", found=f"not what would be installed now: {path}", hint=hint
        )
    return CheckResult(what="template", state="ok", found=f"{NAME} is what this version renders")


def _cache(cluster: Cluster, config: RunConfig) -> CheckResult:
    controllers = config.platform.cluster.controller_namespace if config.platform.cluster else cluster.namespace
    try:
        found = cluster.get(CONFIG_MAPS, RESOLVE_CACHE, controllers)
    except Absent:
        hint = f"slipway install --platform {config.platform.name}; without it each run asks the Hub for the commit"
        where = f"no ConfigMap {RESOLVE_CACHE} in {controllers}"
        return CheckResult(what="memoization", state="warning", found=where, hint=hint)
    key, value = CACHE_LABEL
    if found["metadata"].get("labels", {}).get(key) != value:
        hint = f"kubectl -n {controllers} label configmap {RESOLVE_CACHE} {key}={value}"
        return CheckResult(what="memoization", state="missing", found=f"{RESOLVE_CACHE} lacks its label", hint=hint)
    return CheckResult(what="memoization", state="ok", found=f"{RESOLVE_CACHE} in {controllers}")


def _kserve(cluster: Cluster, definition: Object | SlipwayError | None) -> CheckResult:
    if definition is None:
        hint = "install KServe 0.21 or newer, or run without it: slipway run --no-serve"
        return CheckResult(what="KServe", state="warning", found="not installed", hint=hint)
    try:
        settings = cluster.get(CONFIG_MAPS, KSERVE_CONFIG, KSERVE_NAMESPACE).get("data", {})
    except Absent:
        where = f"no ConfigMap {KSERVE_CONFIG} in {KSERVE_NAMESPACE}"
        return CheckResult(what="KServe", state="missing", found=where, hint="install KServe's controller too")
    mode = _part(settings, "deploy").get("defaultDeploymentMode", "Knative")
    canary = isinstance(definition, dict) and "canary" in _fields(definition)
    gateway = bool(_part(settings, "ingress").get("enableGatewayApi"))
    found = f"{mode} mode, {'0.20 or newer' if canary else 'older than 0.20'}"
    if mode in ("Standard", "RawDeployment") and not (canary and gateway):
        lacks = [] if canary else ["KServe 0.21 or newer"]
        lacks += [] if gateway else [f"ingress.enableGatewayApi: true in {KSERVE_CONFIG}"]
        hint = f"a canary gets traffic only with {' and '.join(lacks)}"
        return CheckResult(what="KServe", state="missing", found=found, hint=hint)
    return CheckResult(what="KServe", state="ok", found=found)


def _part(settings: dict[str, str], name: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        return dict(json.loads(settings.get(name, "{}")))
    return {}
