"""Mode ``llm``: a LLMInferenceService for each release, all in one routing group, whose weights are the split.

KServe makes a HTTPRoute for each member of the group, every one with the host name of the endpoint and with all members
that can serve, by their weights. Of routes that match the same a gateway obeys the oldest: the stable release's. A
change counts once all of them say the same. The weights of two members stand in two objects: first the one is changed
whose share grows, so that their sum is never 0.

KServe deletes a member only when no other member's route leads to it any more.
"""

from __future__ import annotations

import math
import time
from typing import Final

from stages.parts.base.errors import Conflict, TransientError
from stages.parts.releases.split import Split
from stages.rollout.kserve.http_route import programmed, shares
from stages.rollout.kserve.kept import refuse_foreign
from stages.rollout.kserve.llm_objects import (
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
from stages.rollout.kserve.objects import ENDPOINT, RELEASE, REVISION, Object
from stages.rollout.kserve.target import BUDGETS, KServeTarget, check_reconciled, condition

AGAIN: Final = "start the rollout again"
Parts = dict[str, int]
"""The weight of each release."""


class LLMTarget(KServeTarget):
    shown = "llmisvc,httproute"

    def regarding(self) -> Object | None:
        there = self._services()
        return there.get(self._stable(there) or "") or next(iter(there.values()), None)

    def changes(self, release: str) -> str:
        found = self._services().get(release)
        if found is None or _revision(found) == _revision(self._wanted(release, found)):
            return ""
        return "how its pods are started"

    def split(self) -> Split:
        there = self._services()
        stable = self._stable(there)
        canary = next((each for each in reversed(there) if each != stable), None)
        if stable is None or canary is None:
            return Split(stable)
        route = self._route(there[stable])
        if route is None or (why := programmed(route)):
            raise TransientError(f"the split in force is not certain: {why if route else 'KServe has made no route'}")
        return Split(stable, canary, round(shares(route).get(backend(there[canary]), 0.0)))

    def deploy(self, release: str) -> None:
        there = self._services()
        stable = self._stable(there)
        others = there.keys() - {release, stable}
        if others and stable:
            raise Conflict(f"{min(others)} is being tried already", hint="end that rollout first")
        for other in others:  # left by a first rollout that was given up
            self._remove(other)
        name = llm_name(self.endpoint, release)
        seen = there.get(release)
        if seen is None:
            self.service(name, LLM_SERVICES)  # somebody else's is refused
            self.made_by_kserve(llm_route(name), LLM_SERVICES.name, name)
            self.wait_until(lambda: self._removing(name), f"removing what served {release} before")
            self._copy_to_nodes(release)
        made = self.apply(LLM_SERVICES, self._wanted(release, seen), seen)
        if group := self.endpoint.settings.llm.cache_nodes:
            self.cluster.apply(CACHES, cache(self.endpoint, release, group, made), force=True)
        self.apply_companions(release, llm_deployment(name), made)

    def ready(self, release: str) -> bool:
        found = self._service(release)
        check_reconciled(found)
        if not (self.pods.ready(release, _revision(found)) and condition(found, "Ready")):
            return False
        there = self._services()
        stable = self._stable(there)
        if stable in (None, release):
            return True
        route = self._route(there[str(stable)])
        return route is not None and backend(found) in shares(route) and not programmed(route)

    def url(self, release: str) -> str:
        return self.service_url(f"{self._service(release)['metadata']['name']}{SERVICE_SUFFIX}")

    def shift(self, release: str, percent: int) -> None:
        self._service(release)
        stable = self._stable(self._services())
        if stable in (None, release):
            raise Conflict(f"{release} is not the canary of {self.endpoint.store.model}", hint=AGAIN)
        if not (self.has_propagated(release, percent) and self.split() == Split(stable, release, percent)):
            self._weigh({release: percent, str(stable): 100 - percent})
            self.wait_for_propagation(release, percent)

    def promote(self, release: str) -> None:
        self._service(release)
        stable = self._stable(self._services())
        if stable not in (None, release):
            self.shift(release, 100)
        found = self._service(release)
        if not is_promoted(found):
            self.apply(LLM_SERVICES, changed(self.endpoint, found, 100, promoted=True), found)
        for each in self._services().keys() - {release}:
            self._remove(each)
        self._weigh({release: 100})
        if stable is None:
            self.wait_for_propagation(release, 100)
        self.apply_companions(release, llm_deployment(found["metadata"]["name"]), found)

    def autoscaled(self, release: str) -> str:
        return llm_deployment(llm_name(self.endpoint, release)) if self.endpoint.settings.prometheus else ""

    def withdraw(self, release: str, *, first: bool = False) -> None:
        there = self._services()
        stable = self._stable(there)
        if stable == release and (not first or len(there) > 1):
            raise self.refusal(release)
        if stable not in (None, release) and release in there:
            self._weigh({str(stable): 100, release: 0}, back=True)
            self.wait_for_propagation(release, 0)
        self._remove(release)
        if not self._services():
            self.remove(BUDGETS, self.endpoint.name)

    def client_url(self) -> str:
        return self.own_address()

    def _wanted(self, release: str, seen: Object | None) -> Object:
        """Its service with the present settings; its place in the group, and whether it has a scheduler, stay."""
        scheduler = "scheduler" in seen["spec"]["router"] if seen else self.endpoint.settings.llm.scheduler
        hostname = self.installation.hostname(self.endpoint.name, self.endpoint.namespace)
        gateway = self.installation.gateway
        wanted = llm_service(self.endpoint, release, gateway, hostname, scheduler=scheduler)
        return changed(self.endpoint, wanted, weight(seen), promoted=is_promoted(seen)) if seen else wanted

    def _weigh(self, parts: Parts, *, back: bool = False) -> None:
        """Give each release its weight, and wait until that is in force."""
        for release, share in sorted(parts.items(), key=self._shrinks):
            found = self._service(release)
            if weight(found) != share:
                self.apply(LLM_SERVICES, changed(self.endpoint, found, share), found, back=back)
        said = " and ".join(f"{share} % for {release}" for release, share in parts.items())
        self.wait_until(lambda: self._lacking(parts), said)

    def _shrinks(self, part: tuple[str, int]) -> bool:
        release, share = part
        return share < weight(self._service(release))

    def _lacking(self, parts: Parts) -> str:
        """Why the routes of all members don't split so yet."""
        there = self._services()
        if {release: weight(each) for release, each in there.items()} != parts:
            raise Conflict("somebody else changed the weights", hint=AGAIN)
        wanted = {backend(there[release]): float(share) for release, share in parts.items() if share}
        for release, each in there.items():
            route = self._route(each)
            if route is None:
                return f"KServe has made no route for {release}"
            if {name: share for name, share in shares(route).items() if share} != wanted:
                return f"the route of {release} does not split so"
            if why := programmed(route):
                return why
        return ""

    def _copy_to_nodes(self, release: str) -> None:
        """Wait until the nodes have its weights: KServe starts pods on nodes without them, too.

        Raises:
            TransientError: they have not after the time that a server may take to load.
        """
        group = self.endpoint.settings.llm.cache_nodes
        if group is None:
            return
        seen = self.get(CACHES, llm_name(self.endpoint, release))
        if seen and seen["metadata"].get("labels", {}).get(ENDPOINT) != self.endpoint.name:
            raise Conflict(f"the {CACHES.name} {seen['metadata']['name']} is somebody else's", hint="remove it")
        self.cluster.apply(CACHES, cache(self.endpoint, release, group), force=True)
        deadline = time.monotonic() + self.startup_s(release)
        while True:
            copies = (self.get(CACHES, llm_name(self.endpoint, release)) or {}).get("status", {}).get("copies", {})
            there, wanted = copies.get("available", 0), copies.get("total", math.inf)
            if there >= wanted > 0:
                return
            if time.monotonic() > deadline:
                raise TransientError(f"{release} is on {there} of {wanted} nodes of {group}")
            time.sleep(self.poll_s)

    def _removing(self, name: str) -> str:
        found = self.get(LLM_SERVICES, name)
        return "KServe has not removed it" if found else ""

    def _remove(self, release: str) -> None:
        name = llm_name(self.endpoint, release)
        self.remove_autoscaler(llm_deployment(name))
        self.remove(LLM_SERVICES, name)

    def _services(self) -> dict[str, Object]:
        """The LLMInferenceService of each release that is not being removed, the oldest first.

        Raises:
            Conflict: another controller looks after one of them.
        """
        found, _ = self.cluster.list(LLM_SERVICES, labels=f"{ENDPOINT}={self.endpoint.name}")
        there = [each for each in found if "deletionTimestamp" not in each["metadata"]]
        for each in there:
            refuse_foreign(LLM_SERVICES, each)
        there.sort(key=lambda each: (each["metadata"]["creationTimestamp"], each["metadata"]["name"]))
        return {each["spec"]["labels"][RELEASE]: each for each in there}

    def _stable(self, there: dict[str, Object]) -> str | None:
        """The oldest that was promoted. Two are for a moment, while the other is removed."""
        return next((release for release, each in there.items() if is_promoted(each)), None)

    def _service(self, release: str) -> Object:
        found = self._services().get(release)
        if found is None:
            raise Conflict(f"{release} is no longer on the platform", hint=AGAIN)
        return found

    def _route(self, service: Object) -> Object | None:
        name = service["metadata"]["name"]
        return self.made_by_kserve(llm_route(name), LLM_SERVICES.name, name)


def _revision(service: Object) -> str:
    return str(service["spec"].get("annotations", {}).get(REVISION, ""))
