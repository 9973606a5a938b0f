"""Checks whether a cluster has what a run needs, and says how to get what is missing. Changes nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final

from pipeline.argo.status import UNITS, shown
from pipeline.argo.template import difference, rendered_as
from pipeline.cluster import door, gateway, monitoring, scaling_check
from pipeline.cluster.controller import CONTROLLER, REQUEUE, account, controllers, notices_s, ready, tag
from pipeline.cluster.manifests import of_folder
from pipeline.cluster.objects import CONTROLLER_ACCOUNT, find
from pipeline.runs.tables import Finding, missing, off, ok, warning
from pipeline.settings.config import RunConfig, kserve_settings
from pipeline.workflow.parameters import NAME, RESOLVE_CACHE
from pipeline.workflow.stage_templates import NOTIFY_SECRET
from stages.parts.base.errors import AccessDenied, ConfigError, NotInstalled
from stages.parts.cluster import kinds
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.nodes import Amounts, admits, allocatable, quantity
from stages.parts.records.rollout import KSERVE
from stages.rollout.kserve.detect import CRD, MOVE, detect, kept_mode, served_modes
from stages.rollout.kserve.modes import all_modes, mode_named
from stages.rollout.kserve.objects import ISVCS
from stages.rollout.kserve.settings import KServe, Nodes

CRON_WORKFLOWS: Final = "cronworkflows.argoproj.io"
ARGO: Final = ("workflows.argoproj.io", "workflowtemplates.argoproj.io", CRON_WORKFLOWS)
RIGHTS: Final = (
    ("argoproj.io", "workflows", ("create", "get", "list", "watch", "patch")),
    ("argoproj.io", "workflowtemplates", ("get",)),
    ("", "pods", ("get", "list")),
    ("", "pods/log", ("get",)),
)
"""The rights to submit, follow and stop runs and to read logs; to install takes more."""
SOON_S: Final = 2
OLDEST: Final = "3.6"
"""The first version that knows all that the manifests have."""


def check_cluster(cluster: Cluster, config: RunConfig) -> dict[str, Finding]:
    """Run every check, in the order in which one would fix them. Raises: AccessDenied, ClusterUnavailable."""
    version = cluster.request("GET", "/version").get("gitVersion", "unknown")
    checks: dict[str, Callable[[], Finding]] = {
        "Kubernetes": partial(ok, f"{version} at {cluster.address}"),
        "Argo Workflows": partial(_argo, cluster, config),
        **{f"rights: {right[1]}": partial(_rights, cluster, *right) for right in RIGHTS},
        "volume": partial(_claim, cluster, config),
        "GPUs": partial(_gpus, cluster, config),
        "nodes": partial(_nodes, cluster, config),
        "template": partial(_template, cluster, config),
        "memoization": partial(_cache, cluster, config),
        "steps": partial(_steps, cluster, config),
        "KServe": partial(_kserve, cluster, config),
    }
    if _has(cluster, CRD, unseen=True):
        checks["autoscaling"] = partial(scaling_check.check, cluster, config)
        checks["door"] = partial(door.check, cluster, config)
    if clients := config.cluster.clients:
        checks["clients"] = partial(gateway.check, cluster, config.platform, clients)
    checks["monitoring"] = partial(monitoring.check, cluster, config)
    checks["notifications"] = partial(_notifications, cluster)
    return {name: _as_far_as_visible(check) for name, check in checks.items()}


def check_serving(cluster: Cluster, config: RunConfig, model: str) -> None:
    """Find before a run what would fail at its end, as far as the user may see it.

    Raises:
        NotInstalled: a release can't be served on *cluster*.
        Conflict: *model* is served in another mode than the settings name, or in two.
    """
    with contextlib.suppress(AccessDenied):
        kept_mode(cluster, model, config.kserve.mode, config.platform.namespace)
    finding = _as_far_as_visible(partial(_kserve, cluster, config))
    if finding.state == "missing" or not _has(cluster, CRD, unseen=True):
        raise NotInstalled(f"KServe: {finding.found}", hint=finding.hint)


def _as_far_as_visible(check: Callable[[], Finding]) -> Finding:
    """Run a check. What it raises is missing; if the user lacks the right to read something, return a warning."""
    try:
        return check()
    except (AccessDenied, ConfigError, NotInstalled) as error:
        denied = error if isinstance(error, AccessDenied) else error.__cause__
        if isinstance(denied, AccessDenied):
            return warning(f"may not be seen: {denied}", "ask for the right to read it")
        return missing(str(error), error.hint)


def _has(cluster: Cluster, definition: str, *, unseen: bool = False) -> bool:
    """Return whether a custom resource is defined; *unseen* if its definition may not be read."""
    try:
        return cluster.find(kinds.DEFINITIONS, definition) is not None
    except AccessDenied:
        return unseen


def _argo(cluster: Cluster, config: RunConfig) -> Finding:
    definitions = {name: cluster.find(kinds.DEFINITIONS, name) for name in ARGO}
    if undefined := [name for name, definition in definitions.items() if definition is None]:
        return missing(f"no {', '.join(undefined)}", f"install Argo Workflows {OLDEST} or newer with its full CRDs")
    namespace = config.cluster.controller_namespace
    if not (deployments := controllers(cluster, namespace)):
        hint = "without it runs wait forever: install it, or say in cluster.controller_namespace where it is"
        return missing(f"its definitions, but no {CONTROLLER} in namespace {namespace}", hint)
    name = deployments[0]["metadata"]["name"]
    if not ready(deployments[0]):
        return missing(f"{name} is not ready", f"kubectl -n {namespace} describe deployment {name}")
    running = f"{name} {tag(deployments[0])} in {namespace}"
    # 3.6 brought ``schedules`` to the CronWorkflow, 4.0 removed ``schedule``.
    if not (fields := _fields(definitions[CRON_WORKFLOWS])):
        hint = "the full CRDs let the cluster refuse a wrong workflow when it is applied"
        return warning(f"minimal CRDs, which show no version; {running}", hint)
    if "schedules" not in fields:
        hint = f"upgrade Argo Workflows to {OLDEST} or newer: the manifests have mutexes and schedules in lists"
        return missing(f"older than {OLDEST}", hint)
    return ok(f"{'3.6 to 3.7' if 'schedule' in fields else '4.0 or newer'}, {running}")


def _fields(definition: kinds.Object | None) -> set[str]:
    """Return the fields of ``spec`` in the stored version; none if the definition has no schema."""
    for version in definition["spec"]["versions"] if definition else ():
        if version.get("storage"):
            schema = version.get("schema", {}).get("openAPIV3Schema", {})
            return set(schema.get("properties", {}).get("spec", {}).get("properties", {}))
    return set()


def _steps(cluster: Cluster, config: RunConfig) -> Finding:
    """Say how soon a step begins after the one before it: most stages of a repeated run take a few seconds."""
    namespace = config.cluster.controller_namespace
    if not (deployments := controllers(cluster, namespace)):
        return warning(f"no {CONTROLLER} in namespace {namespace}")
    within_s = notices_s(deployments[0])
    hint = f"kubectl -n {namespace} set env deployment/{deployments[0]['metadata']['name']} {REQUEUE}={SOON_S}s"
    return ok(f"the controller notices the end of one within {within_s:g} s", hint if within_s > SOON_S else "")


def _rights(cluster: Cluster, group: str, resource: str, verbs: tuple[str, ...]) -> Finding:
    name, _, part = resource.partition("/")
    attributes = {"group": group, "resource": name, "namespace": cluster.namespace}
    attributes |= {"subresource": part} if part else {}
    if refused := _refused(cluster, kinds.REVIEWS, verbs, attributes):
        return missing(f"no {refused}", f"a Role in namespace {cluster.namespace} that lets you {refused} {resource}")
    return ok(", ".join(verbs))


def _refused(cluster: Cluster, review: kinds.Kind, verbs: Iterable[str], attributes: kinds.Object, **user: Any) -> str:
    """Name the verbs that we, or *user*, may not use on the resource with these attributes."""
    refused = []
    for verb in verbs:
        spec = user | {"resourceAttributes": {"verb": verb} | attributes}
        body = {"apiVersion": review.api_version, "kind": review.name, "spec": spec}
        if not cluster.request("POST", review.path(None), body=body)["status"]["allowed"]:
            refused.append(verb)
    return ", ".join(refused)


def _claim(cluster: Cluster, config: RunConfig) -> Finding:
    name, access = config.platform.claim, config.cluster.storage.access
    if (claim := cluster.find(kinds.CLAIMS, name)) is None:
        return missing(f"no claim {name}", _install(config))
    modes, phase = claim["spec"].get("accessModes", []), claim.get("status", {}).get("phase", "Pending")
    text = f"{name}: {phase}, {', '.join(modes)}"
    if access not in modes:
        hint = f"stages on several nodes share it, so it must be {access}; a claim can't be changed, only recreated"
        return missing(text, hint)
    if phase != "Bound":
        return warning(text, f"kubectl describe pvc {name}; a class that waits for the first pod binds it only then")
    return ok(text)


def _install(config: RunConfig) -> str:
    return f"slipway install --platform {config.platform.name}"


def _gpus(cluster: Cluster, config: RunConfig) -> Finding:
    counts = [int(allocatable(node, UNITS)["nvidia.com/gpu"]) for node in cluster.list(kinds.NODES)[0]]
    most = max(stage.gpus if stage and isinstance(stage.gpus, int) else 0 for _, stage in config.platform.stages)
    text = f"{sum(counts)} on {sum(count > 0 for count in counts)} of {len(counts)} nodes"
    if most > max(counts, default=0):
        hint = "no node has enough now: fine if an autoscaler adds nodes, else install NVIDIA's GPU operator"
        return warning(f"{text}; a stage asks for {most}", hint)
    return ok(text)


def _nodes(cluster: Cluster, config: RunConfig) -> Finding:
    """Check that each stage and an endpoint would fit on a node that is empty, whatever runs there now."""
    nodes, _ = cluster.list(kinds.NODES)
    names: dict[str, list[str]] = {}
    for name, requests, place in _asking(config):
        if why := _lacking(nodes, requests, place):
            names.setdefault(why, []).append(name)
    if names:
        text = "; ".join(f"{', '.join(pods)}: {why}" for why, pods in names.items())
        hint = "fine if an autoscaler adds such nodes; else add some, or ask for less in the platform's file"
        return warning(text, hint)
    return ok(f"{len(nodes)}, with room for each stage on one of them")


def _asking(config: RunConfig) -> Iterator[tuple[str, Amounts, kinds.Object]]:
    """Yield each stage's name, what its pod requests as far as that is known without a model, and where it may run."""
    platform = config.platform
    for name, stage in platform.stages:
        if stage:
            nodes = platform.nodes_of(stage)
            yield name, _amounts(stage.cpu, stage.memory, stage.gpus), _place(nodes.selector, nodes)
    if platform.serves_on == KSERVE:
        serving, parallel = kserve_settings(config), config.serving.tensor_parallel_size
        gpus = (parallel if isinstance(parallel, int) else 1) if serving.gpu else 0
        yield "an endpoint", _amounts(serving.cpu, serving.memory, gpus), _place(serving.node_selector, serving)


def _amounts(cpu: str, memory: str, gpus: int | str) -> Amounts:
    amounts = {"cpu": cpu, "memory": memory, "nvidia.com/gpu": str(gpus)}
    return {name: quantity(text) for name, text in amounts.items() if text not in ("auto", "0")}


def _place(selector: dict[str, str], tolerating: Nodes | KServe) -> kinds.Object:
    tolerations = [toleration.model_dump() for toleration in tolerating.tolerations]
    return {"nodeSelector": selector, "tolerations": tolerations}


def _lacking(nodes: list[kinds.Object], requests: Amounts, place: kinds.Object) -> str:
    """Say why no node has room for *requests*, however empty it is; return an empty text if one has."""
    sizes = [allocatable(node, UNITS) for node in nodes if admits(node, place)]
    if not sizes:
        selector = ", ".join(f"{key}={value}" for key, value in place["nodeSelector"].items()) or "its tolerations"
        return f"asks for {shown(requests)}; none of {len(nodes)} nodes matches {selector}"
    best = max(sizes, key=lambda size: min((size[name] / requests[name] for name in requests), default=1))
    if all(best[name] >= amount for name, amount in requests.items()):
        return ""
    largest = shown({name: best[name] for name in requests})
    return f"asks for {shown(requests)}; the largest node that matches has {largest}"


def _template(cluster: Cluster, config: RunConfig) -> Finding:
    if (installed := cluster.find(kinds.TEMPLATES, NAME)) is None:
        return missing(f"no WorkflowTemplate {NAME}", _install(config))
    if path := difference(rendered_as(installed, config)["spec"], installed["spec"], "spec"):
        return warning(f"not what would be installed now: {path}", f"{_install(config)}, with the same --config")
    return ok(f"{NAME} is what this version renders")


def _cache(cluster: Cluster, config: RunConfig) -> Finding:
    """Check that there is a memo, and that Argo's controller may write it: if it may not, each run ends in resolve."""
    namespace = config.cluster.controller_namespace
    if (memo := cluster.find(kinds.CONFIG_MAPS, RESOLVE_CACHE, namespace)) is None:
        hint = f"{_install(config)}; without it each run asks the Hub for the commit"
        return warning(f"no ConfigMap {RESOLVE_CACHE} in {namespace}", hint)
    key, value = "workflows.argoproj.io/configmap-type", "Cache"
    if memo["metadata"].get("labels", {}).get(key) != value:
        command = f"kubectl -n {namespace} label configmap {RESOLVE_CACHE} {key}={value}"
        return missing(f"{RESOLVE_CACHE} lacks its label", command)
    name = config.cluster.controller_account or account(cluster, namespace) or CONTROLLER_ACCOUNT
    resource = {"group": "", "resource": kinds.CONFIG_MAPS.plural, "namespace": namespace, "name": RESOLVE_CACHE}
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]
    user = f"system:serviceaccount:{namespace}:{name}"
    if refused := _refused(cluster, kinds.ACCOUNT_REVIEWS, ("get", "update"), resource, user=user, groups=groups):
        text = f"the service account {name} of Argo's controller may not {refused} {RESOLVE_CACHE}"
        return missing(text, f"{_install(config)}; cluster.controller_account names another account")
    return ok(f"{RESOLVE_CACHE} in {namespace}, kept by {name}")


def _kserve(cluster: Cluster, config: RunConfig) -> Finding:
    """Find what the rollout's first step will find, by the same code."""
    if not _has(cluster, CRD, unseen=True):
        return warning("not installed", "install KServe 0.20 or newer, or run without it: slipway run --no-serve")
    installation = detect(cluster, kserve_settings(config))
    ours = (find(cluster, body) for body in of_folder("kserve", config.platform.namespace))
    if lost := [title for title, current in ours if current is None]:
        return missing(f"no {', '.join(lost)}", _install(config))
    text = f"mode {installation.mode}, gateway {installation.gateway}"
    for mode in all_modes():
        kind = mode.services
        if kind not in (ISVCS, mode_named(installation.mode).services) and _has(cluster, f"{kind.plural}.{kind.group}"):
            text += f"; {kind.name} is there, too (kserve.mode {mode.name})"
    with contextlib.suppress(AccessDenied):
        served = served_modes(cluster, config.platform.namespace).items()
        if others := [f"{model} ({kept})" for model, modes in served for kept in modes if kept != installation.mode]:
            return warning(f"{text}; {', '.join(others)} stay as they are", MOVE)
    return ok(text)


def _notifications(cluster: Cluster) -> Finding:
    """Say whether rollouts and watches post what they see."""
    if cluster.find(kinds.SECRETS, NOTIFY_SECRET):
        return ok(f"by the web hook in the Secret {NOTIFY_SECRET}")
    hint = f"kubectl -n {cluster.namespace} create secret generic {NOTIFY_SECRET} --from-file=url=/dev/stdin"
    return off("no web hook gets rollbacks, approvals that wait and a watch's verdicts", hint)
