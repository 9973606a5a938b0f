"""Mode ``llm``, KServe 0.20 or newer: a LLMInferenceService for each release, all in one routing group. The weights of
its members are the split.

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

from stages.parts.base.errors import AccessDenied, ConfigError, Conflict, NotInstalled, TransientError
from stages.parts.cluster.kinds import DEPLOYMENTS, Kind, Object
from stages.parts.cluster.refusals import Absent
from stages.rollout.kserve import llm_objects as objects
from stages.rollout.kserve.applied import HTTP_ROUTES, shares, still_lacking, unprogrammed
from stages.rollout.kserve.detect import CONFIG, NAMESPACE, Setup, managers, version_of
from stages.rollout.kserve.llm_objects import LLM_SERVICES
from stages.rollout.kserve.modes import Mode
from stages.rollout.kserve.objects import ENDPOINT, REVISION, condition
from stages.rollout.kserve.target import ServicePerReleaseTarget, check_reconciled

CONTROLLER: Final = "llmisvc-controller-manager"
GROUPS_SINCE: Final = (0, 20)
"""The first version in which LLMInferenceServices share traffic by weights."""
INSTALL: Final = "install KServe's charts kserve-llmisvc-crd and kserve-llmisvc-resources, 0.20 or newer"
PRESET: Final = Kind("serving.kserve.io/v1alpha1", "LLMInferenceServiceConfig", "llminferenceserviceconfigs")
PRESETS: Final = ("config-llm-template", "config-llm-router-route")
SCHEDULER_PRESET: Final = "config-llm-scheduler"


def check(setup: Setup) -> None:
    settings = setup.settings.llm
    try:
        setup.require(LLM_SERVICES)
    except NotInstalled as error:
        raise NotInstalled(str(error), hint=INSTALL) from error
    setup.require(HTTP_ROUTES)
    if settings.scheduler:
        setup.cluster.kind(f"{objects.POOLS}/v1", "InferencePool")
    if settings.cache_nodes:
        setup.require(objects.CACHES)
        if setup.config and not setup.config.get("localModel", {}).get("enabled"):
            raise ConfigError(
                f"KServe keeps no models on nodes (localModel.enabled in {NAMESPACE}/{CONFIG} is not true)",
                hint="set it to true, or leave kserve.llm.cache_nodes empty",
            )
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
            raise NotInstalled(
                f"no {PRESET.name} {prefix}{name} in namespace {NAMESPACE}",
                hint="install KServe's chart kserve-runtime-configs, or apply its config/llmisvcconfig",
            ) from error
        except AccessDenied:
            return


class LLMTarget(ServicePerReleaseTarget):
    def regarding(self) -> Object | None:
        services = self.services()
        return services.get(self.stable_of(services) or "") or next(iter(services.values()), None)

    def stable_of(self, services: Mapping[str, Object]) -> str | None:
        """Find the oldest that was promoted. Two are for a moment, while the other is removed."""
        return next((release for release, service in services.items() if objects.is_promoted(service)), None)

    def service_name(self, release: str) -> str:
        return objects.llm_name(self.endpoint, release)

    def deployment(self, release: str) -> str:
        return objects.llm_deployment(self.service_name(release))

    def revisions(self, release: str) -> tuple[str | None, str]:
        service = self.services().get(release)
        return _revision(service) if service else None, _revision(self._by_settings(release, service))

    def route_of(self, service: Object) -> Object | None:
        name = service["metadata"]["name"]
        return self.objects.route_by_kserve(objects.llm_route(name), LLM_SERVICES.name, name)

    def backend_of(self, service: Object) -> str:
        return objects.backend(service)

    def deploy(self, release: str) -> None:
        former = self.clear_the_way(release).get(release)
        name = self.service_name(release)
        if former is None:
            self.objects.ours(LLM_SERVICES, name)  # somebody else's is refused
            self.objects.route_by_kserve(objects.llm_route(name), LLM_SERVICES.name, name)
            self.objects.wait_until(
                lambda: "KServe has not removed it" if self.cluster.find(LLM_SERVICES, name) else "",
                f"removing what served {release} before",
            )
            self._copy_to_nodes(release)
        applied = self.objects.apply(LLM_SERVICES, self._by_settings(release, former), former)
        if group := self.endpoint.settings.llm.cache_nodes:
            self.cluster.apply(objects.CACHES, objects.cache(self.endpoint, release, group, applied), force=True)
        self.apply_companions(release, self.deployment(release), applied)

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
        return self.objects.service_url(f"{self.service(release)['metadata']['name']}{objects.SERVICE_SUFFIX}")

    def make_stable(self, release: str) -> None:
        service = self.service(release)
        if not objects.is_promoted(service):
            body = objects.changed(self.endpoint, service, 100, promoted=True)
            self.objects.apply(LLM_SERVICES, body, service)
        self.remove_others(release)
        self.weigh({release: 100})

    def request_shares(self, percent: Mapping[str, int], *, back: bool) -> None:
        former = {release: objects.weight(service) for release, service in self.services().items()}
        shares = dict.fromkeys(former, 0) | dict(percent)
        for release in sorted(shares, key=lambda release: shares[release] < former.get(release, 0)):
            service = self.service(release)
            if objects.weight(service) != shares[release]:
                body = objects.changed(self.endpoint, service, shares[release])
                self.objects.apply(LLM_SERVICES, body, service, back=back)

    def requested_shares(self, services: Mapping[str, Object]) -> Mapping[str, float]:
        return {release: weight for release, service in services.items() if (weight := objects.weight(service))}

    def _by_settings(self, release: str, former: Object | None) -> Object:
        """Its service by the present settings; its place in the group, and whether it has a scheduler, stay."""
        scheduler = "scheduler" in former["spec"]["router"] if former else self.endpoint.settings.llm.scheduler
        gateway = self.installation.gateway
        service = objects.llm_service(self.endpoint, release, gateway, self.hostname, scheduler=scheduler)
        if former is None:
            return service
        return objects.changed(self.endpoint, service, objects.weight(former), promoted=objects.is_promoted(former))

    def _copy_to_nodes(self, release: str) -> None:
        """Wait until the nodes have its weights, at most as long as a server may take to load: KServe starts pods on
        nodes without them, too."""
        group = self.endpoint.settings.llm.cache_nodes
        if group is None:
            return
        name = self.service_name(release)
        former = self.cluster.find(objects.CACHES, name)
        if former and former["metadata"].get("labels", {}).get(ENDPOINT) != self.endpoint.name:
            raise Conflict(f"the {objects.CACHES.name} {name} is somebody else's", hint="remove it")
        self.cluster.apply(objects.CACHES, objects.cache(self.endpoint, release, group), force=True)

        def missing() -> str:
            copies = (self.cluster.find(objects.CACHES, name) or {}).get("status", {}).get("copies", {})
            available, total = copies.get("available", 0), copies.get("total", math.inf)
            return "" if available >= total > 0 else f"{available} of {total}"

        if copied := still_lacking(missing, self.serving_of(release).startup_timeout_s, self.poll_s):
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
    render=objects.render,
    needs_runtime=False,
)
