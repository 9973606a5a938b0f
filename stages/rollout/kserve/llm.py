"""Mode ``llm``, KServe 0.20 or newer: a LLMInferenceService for each release, all in one routing group. The weights of
its members are the split.

KServe merges each with its own presets: lists by the keys that Kubernetes merges them by (containers, volumes and
variables by name, mounts by path), other lists as a whole. What the ServingRuntime says in the other modes is copied
from it, so that nothing of a release's container is the preset's choice. KServe makes a LLMInferenceService's
``labels`` part of its Deployment's selector, which can't change: the revision is an annotation.

KServe makes a HTTPRoute for each member of the group, every one with the host name of the endpoint and with all members
that can serve, by their weights. Of routes that match the same a gateway obeys the oldest: the stable release's. A
change counts once all of them say the same. The weights of two members stand in two objects: first the one is changed
whose share grows, so that their sum is never 0.

KServe deletes a member only when no other member's route leads to it any more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from scoring.units import GIB
from stages.parts.base.errors import AccessDenied, ConfigError, Conflict, NotInstalled, TransientError
from stages.parts.base.files import digest_of
from stages.parts.base.store import directory_name
from stages.parts.cluster.api import Absent
from stages.parts.cluster.kinds import DEPLOYMENTS, Kind, Object
from stages.parts.releases.pinned import weights_bytes
from stages.rollout.kserve import objects
from stages.rollout.kserve.applied import HTTP_ROUTES, shares, still_lacking, unprogrammed
from stages.rollout.kserve.autoscaling import autoscalers
from stages.rollout.kserve.detect import CONFIG, NAMESPACE, Setup, as_configured, managers, version_of
from stages.rollout.kserve.modes import Mode
from stages.rollout.kserve.objects import ENDPOINT, RELEASE, REVISION, KServeEndpoint, condition
from stages.rollout.kserve.target import ServicePerReleaseTarget, check_reconciled

CONTROLLER: Final = "llmisvc-controller-manager"
GROUPS_SINCE: Final = (0, 20)
"""The first version in which LLMInferenceServices share traffic by weights."""
INSTALL: Final = "install KServe's charts kserve-llmisvc-crd and kserve-llmisvc-resources, 0.20 or newer"
PRESET: Final = Kind("serving.kserve.io/v1alpha1", "LLMInferenceServiceConfig", "llminferenceserviceconfigs")
PRESETS: Final = ("config-llm-template", "config-llm-router-route")
SCHEDULER_PRESET: Final = "config-llm-scheduler"
LLM_SERVICES: Final = Kind("serving.kserve.io/v1alpha1", "LLMInferenceService", "llminferenceservices")
CACHES: Final = Kind("serving.kserve.io/v1alpha1", "LocalModelNamespaceCache", "localmodelnamespacecaches")
PROMOTED: Final = "slipway/promoted"
"""The annotation of the stable release's service."""
PORT: Final = 8000
"""KServe fixes it for a LLMInferenceService."""
POOLS: Final = "inference.networking.k8s.io"
SERVICE_SUFFIX: Final = "-kserve-workload-svc"
"""The longest of the names that we read which KServe makes; it abbreviates longer ones."""


def llm_name(endpoint: KServeEndpoint, release: str) -> str:
    """Name a release's LLMInferenceService. KServe calls its objects ``<this>-kserve…``, as no other mode's are
    called."""
    suffix = f"-{objects.predictor_name(release)}-llm"
    return objects.shortened(endpoint.name, objects.LABEL_CHARACTERS - len(suffix) - len(SERVICE_SUFFIX)) + suffix


def llm_deployment(name: str) -> str:
    return f"{name}-kserve"


def llm_route(name: str) -> str:
    """Name the HTTPRoute that KServe makes for a service."""
    return f"{name}-kserve-route"


def backend(service: Object) -> str:
    """Name what a service's routes lead to: its pods' Service or, with a scheduler, its InferencePool."""
    name = str(service["metadata"]["name"])
    return f"{name}-inference-pool" if "scheduler" in service["spec"]["router"] else name + SERVICE_SUFFIX


def weight(service: Object) -> int:
    return int(service["spec"]["router"]["route"].get("weight", 0))


def llm_service(endpoint: KServeEndpoint, release: str, gateway: str, hostname: str, *, scheduler: bool) -> Object:
    """Build a release's LLMInferenceService, without traffic."""
    name = llm_name(endpoint, release)
    made: Object = {"model": {"uri": source_uri(endpoint, release), "name": endpoint.store.model}}
    made["template"] = _template(endpoint, release)
    revision = {REVISION: digest_of(made)[:12]}
    made["annotations"] = made["template"].pop("annotations", {}) | revision  # of pods, too
    made["labels"] = {ENDPOINT: endpoint.name, RELEASE: release}
    if not endpoint.scaler.name:  # else its autoscaler's
        made["replicas"] = max(1, endpoint.settings.scaling.minimum)
    made["router"] = {"scheduler": {"labels": {ENDPOINT: endpoint.name}}} if scheduler else {}  # may be reached as pods
    group, kind = (POOLS, "InferencePool") if scheduler else ("", "Service")
    service = backend({"metadata": {"name": name}, "spec": made})
    # KServe puts all members of the group in the place of this backend, with their weights.
    backends = [{"group": group, "kind": kind, "name": service, "port": PORT, "weight": 1}]
    spec = objects.route_spec(endpoint, gateway, hostname, backends)
    made["router"]["route"] = {"group": endpoint.name, "weight": 0, "http": {"spec": spec}}
    return _service(endpoint, name, made)


def changed(endpoint: KServeEndpoint, former: Object, share: int, *, promoted: bool = False) -> Object:
    """Build the service as it was read, with *share* percent as its weight; if *promoted*, as the stable release's.
    KServe divides by the sum of all weights, so that others may be set meanwhile."""
    router = former["spec"]["router"]
    spec = former["spec"] | {"router": router | {"route": router["route"] | {"weight": share}}}
    return _service(endpoint, former["metadata"]["name"], spec, promoted=promoted or is_promoted(former))


def is_promoted(service: Object) -> bool:
    return PROMOTED in service["metadata"].get("annotations", {})


def source_uri(endpoint: KServeEndpoint, release: str) -> str:
    """Where KServe gets a release: in object storage, or on the store's volume."""
    if endpoint.settings.llm.source is None:
        return endpoint.storage_uri(release)
    return f"{endpoint.settings.llm.source}/{directory_name(endpoint.store.model)}/releases/{release}"


def cache(endpoint: KServeEndpoint, release: str, group: str, owner: Object | None = None) -> Object:
    """Build the copies of a release on the nodes of *group*. KServe uses them for every service with the same URI. They
    go with their *owner*, the release's service."""
    size = f"{math.ceil(weights_bytes(endpoint.store, release) / GIB) + 1}Gi"  # and its other files
    spec = {"sourceModelUri": source_uri(endpoint, release), "modelSize": size, "nodeGroups": [group]}
    labels = {ENDPOINT: endpoint.name, RELEASE: release}
    copies = objects.manifest(CACHES, endpoint, spec, name=llm_name(endpoint, release), labels=labels)
    if owner:
        of = {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
        reference = {"apiVersion": LLM_SERVICES.api_version, "kind": LLM_SERVICES.name, **of}
        copies["metadata"]["ownerReferences"] = [reference]
    return copies


def _service(endpoint: KServeEndpoint, name: str, spec: Object, *, promoted: bool = False) -> Object:
    labels, marks = {ENDPOINT: endpoint.name}, {PROMOTED: "true"} if promoted else {}
    return objects.manifest(LLM_SERVICES, endpoint, spec, name=name, labels=labels, annotations=marks)


def _template(endpoint: KServeEndpoint, release: str) -> Object:
    server = objects.container(endpoint, release, port=PORT)
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        server[name]["httpGet"] = server[name]["httpGet"] | {"scheme": "HTTP"}  # whatever the preset's is
    runtime = objects.runtime()
    server["env"] += runtime["env"]
    server |= {"name": "main", "command": runtime["command"], "ports": [{"containerPort": PORT, "protocol": "TCP"}]}
    server["securityContext"] = runtime["securityContext"]
    server["volumeMounts"] += runtime["volumeMounts"]
    pods = objects.pod_fields(endpoint, release)
    pods["volumes"].append({"name": "tmp", "emptyDir": {}})
    return pods | {"containers": [server]}


def render(endpoint: KServeEndpoint, shares: Mapping[str, int]) -> list[Object]:
    installation, settings = as_configured("llm", endpoint.settings, {}), endpoint.settings
    hostname = installation.hostname(endpoint.name, endpoint.namespace)
    group, scheduler = settings.llm.cache_nodes, settings.llm.scheduler
    services = {
        release: llm_service(endpoint, release, installation.gateway, hostname, scheduler=scheduler)
        for release in shares
    }
    stable = next(iter(shares))
    return [
        *(cache(endpoint, release, group) for release in shares if group),
        *(changed(endpoint, services[name], share, promoted=name == stable) for name, share in shares.items()),
        objects.disruption_budget(endpoint),
        *autoscalers(endpoint, {release: llm_deployment(llm_name(endpoint, release)) for release in shares}),
    ]


def check(setup: Setup) -> None:
    settings = setup.settings.llm
    try:
        setup.cluster.require(LLM_SERVICES)
    except NotInstalled as error:
        raise NotInstalled(str(error), hint=INSTALL) from error
    setup.cluster.require(HTTP_ROUTES)
    if settings.scheduler:
        setup.cluster.kind(f"{POOLS}/v1", "InferencePool")
    if settings.cache_nodes:
        setup.cluster.require(CACHES)
        if setup.config and not setup.config.get("localModel", {}).get("enabled"):
            text = f"KServe keeps no models on nodes (localModel.enabled in {NAMESPACE}/{CONFIG} is not true)"
            raise ConfigError(text, hint="set it to true, or leave kserve.llm.cache_nodes empty")
    if setup.ingress.get("enableLLMInferenceServiceTLS"):
        raise ConfigError(
            f"KServe expects TLS of LLMInferenceServices (ingress.enableLLMInferenceServiceTLS in "
            f"{NAMESPACE}/{CONFIG} is true): releases are served without",
            hint="set it to false, or set kserve.mode to another one",
        )
    try:
        controller = setup.cluster.get(DEPLOYMENTS, CONTROLLER, NAMESPACE)
    except Absent as error:
        raise NotInstalled(f"no {CONTROLLER} in namespace {NAMESPACE}", hint=INSTALL) from error
    except AccessDenied:  # the rollout's first step will say what is wrong
        return
    version = version_of(controller)
    if version is not None and version < GROUPS_SINCE:
        raise ConfigError(
            f"KServe {version[0]}.{version[1]} does not split traffic among LLMInferenceServices: 0.20 is the first to",
            hint=INSTALL,
        )
    _check_presets(setup, controller)


def _check_presets(setup: Setup, controller: Object) -> None:
    """Raise NotInstalled if KServe would make nothing of a LLMInferenceService."""
    variables = {
        variable["name"]: variable.get("value", "")
        for manager in managers(controller)
        for variable in manager.get("env", [])
    }
    prefix = variables.get("LLM_INFERENCE_SERVICE_CONFIG_PREFIX", "kserve-")
    for name in (*PRESETS, *([SCHEDULER_PRESET] if setup.settings.llm.scheduler else [])):
        try:
            setup.cluster.get(PRESET, f"{prefix}{name}", NAMESPACE)
        except Absent as error:
            hint = "install KServe's chart kserve-runtime-configs, or apply its config/llmisvcconfig"
            raise NotInstalled(f"no {PRESET.name} {prefix}{name} in namespace {NAMESPACE}", hint=hint) from error
        except AccessDenied:
            return


class LLMTarget(ServicePerReleaseTarget):
    def regarding(self) -> Object | None:
        services = self.services()
        return services.get(self.stable_of(services) or "") or next(iter(services.values()), None)

    def stable_of(self, services: Mapping[str, Object]) -> str | None:
        """Find the oldest that was promoted. Two are for a moment, while the other is removed."""
        return next((release for release, service in services.items() if is_promoted(service)), None)

    def service_name(self, release: str) -> str:
        return llm_name(self.endpoint, release)

    def deployment(self, release: str) -> str:
        return llm_deployment(self.service_name(release))

    def revisions(self, release: str) -> tuple[str | None, str]:
        service = self.services().get(release)
        return _revision(service) if service else None, _revision(self._by_settings(release, service))

    def route_of(self, service: Object) -> Object | None:
        name = service["metadata"]["name"]
        return self.objects.route_by_kserve(llm_route(name), LLM_SERVICES.name, name)

    def backend_of(self, service: Object) -> str:
        return backend(service)

    def deploy(self, release: str) -> None:
        services = self.clear_the_way(release)
        former, canary = services.get(release), self.stable_of(services) not in (None, release)
        name = self.service_name(release)
        if former is None:
            self.objects.ours(LLM_SERVICES, name)  # somebody else's is refused
            self.objects.route_by_kserve(llm_route(name), LLM_SERVICES.name, name)
            self.objects.wait_until(
                lambda: "KServe has not removed it" if self.cluster.find(LLM_SERVICES, name) else "",
                f"removing what served {release} before",
            )
            self._copy_to_nodes(release)
        applied = self.objects.apply(LLM_SERVICES, self._by_settings(release, former), former)
        if group := self.endpoint.settings.llm.cache_nodes:
            self.cluster.apply(CACHES, cache(self.endpoint, release, group, applied), force=True)
        self.apply_companions(release, self.deployment(release), applied, canary=canary)

    def ready(self, release: str) -> bool:
        service = self.service(release)
        check_reconciled(service)
        if not (self.pods.ready(release, _revision(service)) and condition(service, "Ready")):
            return False
        services = self.services()
        stable = self.stable_of(services)
        if stable in (None, release):
            return True
        route = self.route_of(services[str(stable)])
        return route is not None and self.backend_of(service) in shares(route) and not unprogrammed(route)

    def url(self, release: str) -> str:
        return self.objects.service_url(f"{self.service(release)['metadata']['name']}{SERVICE_SUFFIX}")

    def make_stable(self, release: str) -> None:
        service = self.service(release)
        if not is_promoted(service):
            body = changed(self.endpoint, service, 100, promoted=True)
            self.objects.apply(LLM_SERVICES, body, service)
        self.remove_others(release)
        self.weigh({release: 100})

    def request_shares(self, percent: Mapping[str, int], *, back: bool) -> None:
        former = {release: weight(service) for release, service in self.services().items()}
        shares = dict.fromkeys(former, 0) | dict(percent)
        for release in sorted(shares, key=lambda release: shares[release] < former.get(release, 0)):
            service = self.service(release)
            if weight(service) != shares[release]:
                body = changed(self.endpoint, service, shares[release])
                self.objects.apply(LLM_SERVICES, body, service, back=back)

    def requested_shares(self, services: Mapping[str, Object]) -> Mapping[str, float]:
        return {release: part for release, service in services.items() if (part := weight(service))}

    def _by_settings(self, release: str, former: Object | None) -> Object:
        """Its service by the present settings; its place in the group, and whether it has a scheduler, stay."""
        scheduler = "scheduler" in former["spec"]["router"] if former else self.endpoint.settings.llm.scheduler
        gateway = self.installation.gateway
        service = llm_service(self.endpoint, release, gateway, self.hostname, scheduler=scheduler)
        if former is None:
            return service
        return changed(self.endpoint, service, weight(former), promoted=is_promoted(former))

    def _copy_to_nodes(self, release: str) -> None:
        """Wait until the nodes have its weights, at most as long as a server may take to load: KServe starts pods on
        nodes without them, too."""
        if (group := self.endpoint.settings.llm.cache_nodes) is None:
            return
        name = self.service_name(release)
        former = self.cluster.find(CACHES, name)
        if former and former["metadata"].get("labels", {}).get(ENDPOINT) != self.endpoint.name:
            raise Conflict(f"the {CACHES.name} {name} is somebody else's", hint="remove it")
        self.cluster.apply(CACHES, cache(self.endpoint, release, group), force=True)

        def missing() -> str:
            copies = (self.cluster.find(CACHES, name) or {}).get("status", {}).get("copies", {})
            available, total = copies.get("available", 0), copies.get("total", math.inf)
            return "" if available >= total > 0 else f"{available} of {total}"

        if copied := still_lacking(missing, self.serving_of(release).startup_timeout_s):
            raise TransientError(f"{release} is on {copied} nodes of {group}")


def _revision(service: Object) -> str:
    return str(service["spec"].get("annotations", {}).get(REVISION, ""))


MODE = Mode(
    name="llm",
    target=LLMTarget,
    services=LLM_SERVICES,
    owns=lambda _: True,
    suits=lambda _: False,
    check=check,
    render=render,
    needs_runtime=False,
)
