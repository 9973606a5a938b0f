"""Checks whether a cluster has what a run needs, and says how to get what is missing. Changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from pipeline.argo.template import difference, rendered_as
from pipeline.cluster import client_keys as clients
from pipeline.cluster import nodes
from pipeline.cluster.controller import CONTROLLER, REQUEUE, account, controllers, notices_s, ready, tag
from pipeline.runs.checks import CheckResult
from pipeline.settings.quantity import quantity
from pipeline.settings.serving import kserve_settings
from pipeline.workflow.parameters import NAME, RESOLVE_CACHE
from stages.parts.base.errors import AccessDenied, ClusterUnavailable, ConfigError, NotInstalled, SlipwayError
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import (
    ACCOUNT_REVIEWS,
    CLAIMS,
    CONFIG_MAPS,
    DEFINITIONS,
    NODES,
    REVIEWS,
    TEMPLATES,
    Object,
)
from stages.parts.cluster.refusals import Absent
from stages.rollout.kserve.autoscaling import SCALED_OBJECTS, lacking
from stages.rollout.kserve.detect import CRD, LLM_CRD, detect
from stages.rollout.kserve.kept import MOVE, kept_mode, served_modes
from stages.rollout.kserve.objects import PART_OF

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig

ARGO: Final = ("workflows.argoproj.io", "workflowtemplates.argoproj.io", "cronworkflows.argoproj.io")
RIGHTS: Final = (
    ("argoproj.io", "workflows", ("create", "get", "list", "watch", "patch")),
    ("argoproj.io", "workflowtemplates", ("get",)),
    ("", "pods", ("get", "list")),
    ("", "pods/log", ("get",)),
)
"""The rights to submit, follow and stop runs and to read logs; to install takes more."""
GPU: Final = "nvidia.com/gpu"
SCALED: Final = "scaledobjects.keda.sh"
METRICS_API: Final = "/apis/external.metrics.k8s.io/v1beta1"
"""KEDA tells autoscalers through it how high the load is."""
CACHE_LABEL: Final = ("workflows.argoproj.io/configmap-type", "Cache")
SOON_S: Final = 2
OLDEST: Final = "3.6"
"""The first version that knows all that the manifests have."""


def check_cluster(cluster: Cluster, config: RunConfig) -> list[CheckResult]:
    """Run every check, in the order in which one would fix them.

    Raises:
        AccessDenied, ClusterUnavailable: the cluster's API can't be used.
    """
    version = cluster.request("GET", "/version").get("gitVersion", "unknown")
    found = [CheckResult(what="Kubernetes", state="ok", found=f"{version} at {cluster.address}")]
    definitions = {name: _definition(cluster, name) for name in (*ARGO, CRD)}
    found.append(_seen("Argo Workflows", partial(_argo, cluster, config, definitions)))
    found += [_rights(cluster, *each) for each in RIGHTS]
    for what, check in (
        ("volume", _claim),
        ("GPUs", _gpus),
        (nodes.WHAT, nodes.check),
        ("template", _template),
        ("memoization", _cache),
        ("steps", _steps),
    ):
        found.append(_seen(what, partial(check, cluster, config)))
    found.append(_seen("KServe", partial(_kserve, cluster, config, definitions[CRD])))
    if definitions[CRD]:
        found.append(_seen("autoscaling", partial(_autoscaling, cluster, config)))
    platform = config.platform
    if platform.cluster and platform.cluster.clients:
        found.append(_seen(clients.WHAT, partial(clients.check, cluster, platform, platform.cluster.clients)))
    return found


def check_serving(cluster: Cluster, config: RunConfig, model: str) -> None:
    """Find before a run what would fail at its end, as far as the user may see it.

    Raises:
        NotInstalled: a release can't be served on *cluster*.
        Conflict: *model* is served in another mode than the settings name, or in two.
    """
    with contextlib.suppress(AccessDenied, Absent):
        kept_mode(cluster, model, config.kserve.mode, config.platform.namespace)
    definition = _definition(cluster, CRD)
    found = _seen("KServe", partial(_kserve, cluster, config, definition))
    if found.state == "missing" or definition is None:
        raise NotInstalled(f"KServe: {found.found}", hint=found.hint)


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


def _argo(cluster: Cluster, config: RunConfig, definitions: dict[str, Object | SlipwayError | None]) -> CheckResult:
    if isinstance(definitions[ARGO[0]], SlipwayError):
        return CheckResult(what="Argo Workflows", state="warning", found="its definitions may not be read")
    if absent := [name for name in ARGO if definitions[name] is None]:
        hint = f"install Argo Workflows {OLDEST} or newer with its full CRDs"
        return CheckResult(what="Argo Workflows", state="missing", found=f"no {', '.join(absent)}", hint=hint)
    namespace = config.platform.cluster.controller_namespace if config.platform.cluster else cluster.namespace
    found = controllers(cluster, namespace)
    if not found:
        hint = "without it runs wait forever: install it, or say in cluster.controller_namespace where it is"
        where = f"its definitions, but no {CONTROLLER} in namespace {namespace}"
        return CheckResult(what="Argo Workflows", state="missing", found=where, hint=hint)
    name = found[0]["metadata"]["name"]
    if not ready(found[0]):
        hint = f"kubectl -n {namespace} describe deployment {name}"
        return CheckResult(what="Argo Workflows", state="missing", found=f"{name} is not ready", hint=hint)
    return _version(definitions[ARGO[2]], f"{name} {tag(found[0])} in {namespace}")


def _steps(cluster: Cluster, config: RunConfig) -> CheckResult:
    """How soon a step begins after the one before it: most stages of a repeated run take a few seconds."""
    namespace = config.platform.cluster.controller_namespace if config.platform.cluster else cluster.namespace
    found = controllers(cluster, namespace)
    if not found:
        return CheckResult(what="steps", state="warning", found=f"no {CONTROLLER} in namespace {namespace}")
    within_s = notices_s(found[0])
    hint = f"kubectl -n {namespace} set env deployment/{found[0]['metadata']['name']} {REQUEUE}={SOON_S}s"
    said = f"the controller notices the end of one within {within_s:g} s"
    return CheckResult(what="steps", state="ok", found=said, hint=hint if within_s > SOON_S else "")


def _version(cron: Object | SlipwayError | None, running: str) -> CheckResult:
    """Tell the version by the fields of the CronWorkflow: 3.6 brought ``schedules``, 4.0 removed ``schedule``."""
    fields = _fields(cron) if isinstance(cron, dict) else set()
    if not fields:
        hint = "the full CRDs let the cluster refuse a wrong workflow when it is applied"
        found = f"minimal CRDs, which show no version; {running}"
        return CheckResult(what="Argo Workflows", state="warning", found=found, hint=hint)
    if "schedules" not in fields:
        hint = f"upgrade Argo Workflows to {OLDEST} or newer: the manifests have mutexes and schedules in lists"
        return CheckResult(what="Argo Workflows", state="missing", found=f"older than {OLDEST}", hint=hint)
    version = "3.6 to 3.7" if "schedule" in fields else "4.0 or newer"
    return CheckResult(what="Argo Workflows", state="ok", found=f"{version}, {running}")


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
    found_nodes, _ = cluster.list(NODES)
    counts = [
        int(quantity(str(found_node.get("status", {}).get("allocatable", {}).get(GPU, "0"))))
        for found_node in found_nodes
    ]
    wanted = max(stage.gpus if stage and isinstance(stage.gpus, int) else 0 for _, stage in config.platform.stages)
    found = f"{sum(counts)} on {sum(count > 0 for count in counts)} of {len(found_nodes)} nodes"
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
    path = difference(rendered_as(installed, config)["spec"], installed["spec"], "spec")
    if path:
        hint = f"{install}, with the same --config"
        return CheckResult(
            what="template", state="warning", found=f"not what would be installed now: {path}", hint=hint
        )
    return CheckResult(what="template", state="ok", found=f"{NAME} is what this version renders")


def _cache(cluster: Cluster, config: RunConfig) -> CheckResult:
    place = config.platform.cluster.controller_namespace if config.platform.cluster else cluster.namespace
    try:
        found = cluster.get(CONFIG_MAPS, RESOLVE_CACHE, place)
    except Absent:
        hint = f"slipway install --platform {config.platform.name}; without it each run asks the Hub for the commit"
        where = f"no ConfigMap {RESOLVE_CACHE} in {place}"
        return CheckResult(what="memoization", state="warning", found=where, hint=hint)
    key, value = CACHE_LABEL
    if found["metadata"].get("labels", {}).get(key) != value:
        hint = f"kubectl -n {place} label configmap {RESOLVE_CACHE} {key}={value}"
        return CheckResult(what="memoization", state="missing", found=f"{RESOLVE_CACHE} lacks its label", hint=hint)
    return _memo_rights(cluster, config, place)


def _memo_rights(cluster: Cluster, config: RunConfig, namespace: str) -> CheckResult:
    """Whether Argo's controller may write the memo: where it may not, each run ends in resolve."""
    from pipeline.cluster.objects import CONTROLLER_ACCOUNT

    asked = config.platform.cluster.controller_account if config.platform.cluster else None
    name = asked or account(cluster, namespace) or CONTROLLER_ACCOUNT
    refused = [verb for verb in ("get", "update") if not _account_may(cluster, name, namespace, verb)]
    if refused:
        found = f"the service account {name} of Argo's controller may not {', '.join(refused)} {RESOLVE_CACHE}"
        hint = f"slipway install --platform {config.platform.name}; cluster.controller_account names another account"
        return CheckResult(what="memoization", state="missing", found=found, hint=hint)
    return CheckResult(what="memoization", state="ok", found=f"{RESOLVE_CACHE} in {namespace}, kept by {name}")


def _account_may(cluster: Cluster, name: str, namespace: str, verb: str) -> bool:
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]
    asks = {"verb": verb, "group": "", "resource": CONFIG_MAPS.plural, "namespace": namespace, "name": RESOLVE_CACHE}
    spec = {"user": f"system:serviceaccount:{namespace}:{name}", "groups": groups, "resourceAttributes": asks}
    body = {"apiVersion": ACCOUNT_REVIEWS.api_version, "kind": ACCOUNT_REVIEWS.name, "spec": spec}
    return bool(cluster.request("POST", ACCOUNT_REVIEWS.path(None), body=body)["status"]["allowed"])


def _kserve(cluster: Cluster, config: RunConfig, definition: Object | SlipwayError | None) -> CheckResult:
    """What the rollout's first step will find, by the same code."""
    from pipeline.cluster.manifests import for_kserve

    if definition is None:
        hint = "install KServe 0.20 or newer, or run without it: slipway run --no-serve"
        return CheckResult(what="KServe", state="warning", found="not installed", hint=hint)
    try:
        found = detect(cluster, kserve_settings(config))
    except (ConfigError, NotInstalled) as error:
        if isinstance(error.__cause__, AccessDenied):
            raise error.__cause__ from error
        return CheckResult(what="KServe", state="missing", found=str(error), hint=error.hint)
    if absent := [said for each in for_kserve(config.platform.namespace) if (said := _lacking(cluster, each))]:
        hint = f"slipway install --platform {config.platform.name}"
        return CheckResult(what="KServe", state="missing", found=f"no {', '.join(absent)}", hint=hint)
    said = f"mode {found.mode}, gateway {found.gateway}"
    if found.mode != "llm" and isinstance(_definition(cluster, LLM_CRD), dict):
        said += "; LLMInferenceService is there, too (kserve.mode llm)"
    if kept := _kept_modes(cluster, config.platform.namespace, found.mode):
        said += f"; {', '.join(kept)} stay as they are"
        return CheckResult(what="KServe", state="warning", found=said, hint=MOVE)
    return CheckResult(what="KServe", state="ok", found=said)


def _autoscaling(cluster: Cluster, config: RunConfig) -> CheckResult:
    """Who adds replicas when more is asked of a release than they can take."""
    scaling, what = config.kserve.scaling, "autoscaling"
    span = f"{scaling.minimum} to {scaling.maximum} replicas of a release"
    try:
        knative = detect(cluster, kserve_settings(config)).mode == "knative"
    except (ConfigError, NotInstalled):  # said already
        knative = False
    if knative:
        return CheckResult(what=what, state="ok", found=f"Knative: {span}")
    if config.kserve.prometheus is None:
        hint = "to follow the load: KEDA, a Prometheus with manifests/monitoring, and kserve.prometheus"
        return CheckResult(what=what, state="ok", found="off: as many replicas under any load", hint=hint)
    if not isinstance(_definition(cluster, SCALED), dict):
        hint = "install KEDA 2, or leave kserve.prometheus empty"
        return CheckResult(what=what, state="missing", found=f"kserve.prometheus, but no {SCALED}", hint=hint)
    if not _answers(cluster, METRICS_API):
        hint = "is KEDA running? kubectl describe apiservice v1beta1.external.metrics.k8s.io"
        found = "KEDA's definitions, but nothing answers external.metrics.k8s.io"
        return CheckResult(what=what, state="missing", found=found, hint=hint)
    scaled, _ = cluster.list(SCALED_OBJECTS, labels=",".join(f"{key}={value}" for key, value in PART_OF.items()))
    said = [f"{each['metadata']['name']}: {why}" for each in scaled if (why := lacking(each))]
    if said:
        hint = f"does KEDA reach {config.kserve.prometheus}, and does that have the series of manifests/monitoring?"
        return CheckResult(what=what, state="warning", found=f"KEDA: {span}; {'; '.join(said)}", hint=hint)
    return CheckResult(what=what, state="ok", found=f"KEDA: {span}")


def _answers(cluster: Cluster, path: str) -> bool:
    """Whether an API that another program serves is there now."""
    try:
        Cluster(cluster.client, cluster.namespace, patience_s=0).request("GET", path)
    except (Absent, ClusterUnavailable):
        return False
    return True


def _kept_modes(cluster: Cluster, namespace: str | None, mode: str) -> list[str]:
    """The models that another mode than *mode* serves; rollouts keep it."""
    try:
        served = served_modes(cluster, namespace)
    except (AccessDenied, Absent):
        return []
    return [f"{model} ({each})" for model, modes in served.items() for each in modes if each != mode]


def _lacking(cluster: Cluster, body: Object) -> str:
    """The kind and name of an object that is not there, else empty."""
    name, namespace = body["metadata"]["name"], body["metadata"]["namespace"]
    try:
        cluster.get(cluster.kind(body["apiVersion"], body["kind"]), name, namespace)
    except Absent:
        return f"{body['kind']} {namespace}/{name}"
    return ""
