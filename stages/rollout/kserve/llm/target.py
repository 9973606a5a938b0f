"""Mode ``llm`` as the target of a rollout: the weights of the members of a routing group are the split.

KServe makes a HTTPRoute for each member of the group, every one with the host name of the endpoint and with all members
that can serve, by their weights. Of routes that match the same a gateway obeys the oldest: the stable release's. A
change counts once all of them say the same. The weights of two members stand in two objects: first the one is changed
whose share grows, so that their sum is never 0.

KServe deletes a member only when no other member's route leads to it any more.
"""

from __future__ import annotations

import math

from stages.parts.base.errors import Conflict, TransientError
from stages.parts.cluster.kinds import Object
from stages.parts.releases.split import Split
from stages.rollout.kserve.applied import still_lacking
from stages.rollout.kserve.http_route import lacking, share, shares, unprogrammed
from stages.rollout.kserve.llm.objects import (
    CACHES,
    LLM_SERVICES,
    SERVICE_SUFFIX,
    backend,
    cache,
    changed,
    is_promoted,
    llm_deployment,
    llm_name,
    llm_route,
    llm_service,
    weight,
)
from stages.rollout.kserve.objects import ENDPOINT, RELEASE, REVISION, condition
from stages.rollout.kserve.target import AGAIN, ServicePerReleaseTarget, check_reconciled


class LLMTarget(ServicePerReleaseTarget):
    def regarding(self) -> Object | None:
        services = self.services()
        return services.get(self.stable_of(services) or "") or next(iter(services.values()), None)

    def release_served(self, service: Object) -> str | None:
        return str(service["spec"]["labels"][RELEASE])

    def stable_of(self, services: dict[str, Object]) -> str | None:
        """Find the oldest that was promoted. Two are for a moment, while the other is removed."""
        return next((release for release, service in services.items() if is_promoted(service)), None)

    def service_name(self, release: str) -> str:
        return llm_name(self.endpoint, release)

    def deployment(self, release: str) -> str:
        return llm_deployment(self.service_name(release))

    def revisions(self, release: str) -> tuple[str | None, str]:
        service = self.services().get(release)
        return _revision(service) if service else None, _revision(self._by_settings(release, service))

    def split(self) -> Split:
        services = self.services()
        stable = self.stable_of(services)
        canary = next((release for release in reversed(services) if release != stable), None)
        if stable is None or canary is None:
            return Split(stable)
        return Split(stable, canary, share(self._route(services[stable]), backend(services[canary])))

    def deploy(self, release: str) -> None:
        former = self.clear_the_way(release).get(release)
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
        route = self._route(services[str(stable)])
        return route is not None and backend(service) in shares(route) and not unprogrammed(route)

    def url(self, release: str) -> str:
        return self.objects.service_url(f"{self.service(release)['metadata']['name']}{SERVICE_SUFFIX}")

    def shift(self, release: str, percent: int) -> None:
        self.service(release)
        stable = self.stable_of(self.services())
        if stable in (None, release):
            raise Conflict(f"{release} is not the canary of {self.endpoint.store.model}", hint=AGAIN)
        if not (self.has_propagated(release, percent) and self.split() == Split(stable, release, percent)):
            self._weigh({release: percent, str(stable): 100 - percent})
            self.wait_for_propagation(release, percent)

    def promote(self, release: str) -> None:
        self.service(release)
        stable = self.stable_of(self.services())
        if stable not in (None, release):
            self.shift(release, 100)
        service = self.service(release)
        if not is_promoted(service):
            self.objects.apply(LLM_SERVICES, changed(self.endpoint, service, 100, promoted=True), service)
        for other in self.services().keys() - {release}:
            self.remove_service(other)
        self._weigh({release: 100})
        if stable is None:
            self.wait_for_propagation(release, 100)
        self.apply_companions(release, self.deployment(release), service)

    def withdraw(self, release: str, *, first: bool = False) -> None:
        services = self.services()
        stable = self.stable_of(services)
        if stable == release and (not first or len(services) > 1):
            raise self.refusal(release)
        if stable not in (None, release) and release in services:
            self._weigh({str(stable): 100, release: 0}, back=True)
            self.wait_for_propagation(release, 0)
        self.remove_service(release)
        if not self.services():
            self.objects.remove_budget()

    def _by_settings(self, release: str, former: Object | None) -> Object:
        """Its service by the present settings; its place in the group, and whether it has a scheduler, stay."""
        scheduler = "scheduler" in former["spec"]["router"] if former else self.endpoint.settings.llm.scheduler
        service = llm_service(self.endpoint, release, self.installation.gateway, self.hostname, scheduler=scheduler)
        return changed(self.endpoint, service, weight(former), promoted=is_promoted(former)) if former else service

    def _weigh(self, percent: dict[str, int], *, back: bool = False) -> None:
        """Give each release its percentage, and wait until that is in force."""

        def shrinks(release: str) -> bool:
            return percent[release] < weight(self.service(release))

        for release in sorted(percent, key=shrinks):
            service = self.service(release)
            if weight(service) != percent[release]:
                body = changed(self.endpoint, service, percent[release])
                self.objects.apply(LLM_SERVICES, body, service, back=back)

        def unfinished() -> str:
            services = self.services()
            if {release: weight(service) for release, service in services.items()} != percent:
                raise Conflict("somebody else changed the weights", hint=AGAIN)
            backends = {backend(services[release]): float(part) for release, part in percent.items()}
            reasons = (lacking(self._route(service), backends) for service in services.values())
            return next(filter(None, reasons), "")

        self.wait_for_split(percent, unfinished)

    def _copy_to_nodes(self, release: str) -> None:
        """Wait until the nodes have its weights, at most as long as a server may take to load: KServe starts pods on
        nodes without them, too."""
        group = self.endpoint.settings.llm.cache_nodes
        if group is None:
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

        if copied := still_lacking(missing, self.startup_s(release), self.poll_s):
            raise TransientError(f"{release} is on {copied} nodes of {group}")

    def _route(self, service: Object) -> Object | None:
        name = service["metadata"]["name"]
        return self.objects.route_by_kserve(llm_route(name), LLM_SERVICES.name, name)


def _revision(service: Object) -> str:
    return str(service["spec"].get("annotations", {}).get(REVISION, ""))
