"""KServe as the target of a rollout: what its modes have in common.

What is in force is read from statuses: a route counts only once its gateway has programmed it.
"""

from __future__ import annotations

import contextlib
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from stages.parts.base.errors import ConfigError, Conflict, ServerFailed, SlipwayError, TransientError
from stages.parts.base.log import say
from stages.parts.base.serving_settings import Serving
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import EVENTS, Object
from stages.parts.records.rollout import KSERVE, Counters
from stages.parts.releases.release import Split
from stages.rollout.kserve.applied import AppliedObjects, cluster_user, event, lacking, refuse_foreign, share
from stages.rollout.kserve.autoscaling import Autoscalers, check_scaling
from stages.rollout.kserve.detect import Installation
from stages.rollout.kserve.modes import mode_named
from stages.rollout.kserve.objects import BUDGETS, ENDPOINT, ISVCS, KServeEndpoint, predictor, release_of, revision_of
from stages.rollout.kserve.release_pods import Pods
from stages.rollout.kserve.shared_address import KINDS, shared_name, shared_objects
from stages.rollout.slices import CopiedRequest
from stages.rollout.target import Replicas, Target, needed, tried_already

UNRECONCILED_S: Final = 60.0
"""KServe tries again meanwhile: another controller may have changed the object at the same time."""
REFUSED: Final = re.compile(r".*Reconcile.*Error|ReconcileFailed|ConfigNotFound|CombineBaseError")
"""The reasons of a condition by which KServe failed, or lacks a preset."""
AGAIN: Final = "start the rollout again"


class KServeTarget(Target):
    """See ``Target``; each mode adds how it splits traffic."""

    name = KSERVE

    def __init__(self, cluster: Cluster, endpoint: KServeEndpoint, installation: Installation) -> None:
        self.cluster, self.endpoint, self.installation = cluster, endpoint, installation
        self.objects = AppliedObjects(cluster, endpoint)
        self.pods = Pods(cluster, endpoint)
        self.autoscalers = Autoscalers(self.objects, self.pods)
        self._propagated: tuple[str, int] | None = None

    @property
    def hostname(self) -> str:
        """The endpoint's own host name at the gateway."""
        return self.installation.hostname(self.endpoint.name, self.endpoint.namespace)

    def who(self) -> str:
        return cluster_user(self.cluster)

    def announce(self, reason: str, note: str) -> None:
        try:
            if regarding := self.regarding():
                self.cluster.create(EVENTS, event(regarding, reason, note))
        except SlipwayError as error:  # a rollout does not fail because there can be no event
            say(f"rollout: no event {reason}: {error}")

    def regarding(self) -> Object | None:
        """Find the object on which people look for events, if there is one yet."""
        return self.cluster.find(ISVCS, self.endpoint.name)

    def changes(self, release: str) -> str:
        present, by_settings = self.revisions(release)
        return "how its pods are started" if present not in (None, by_settings) else ""

    def revisions(self, release: str) -> tuple[str | None, str]:
        """Read the revision of the pods that serve *release* as the stable release, if any, and that of the present
        settings."""
        service = self.objects.ours(name=self.service_name(release))
        present = revision_of(service["spec"]["predictor"]) if service else None
        return present, revision_of(self.predictor(release))

    def service_name(self, release: str) -> str:  # noqa: ARG002
        """Name the object that serves *release*."""
        return self.endpoint.name

    def predictor(self, release: str) -> Object:
        """Build the predictor of *release* by the present settings."""
        return predictor(self.endpoint, release)

    def serving_of(self, release: str) -> Serving:
        return self.endpoint.serving_of(release)

    def check_room(self, release: str) -> None:
        for kind in KINDS if self.endpoint.settings.shared_host else ():
            self.cluster.require(kind)
        check_scaling(self.endpoint.scaler, self.endpoint.settings.scaling, self.installation.mode)
        self.pods.check_room(release)

    def waits_for(self, release: str) -> str:
        with contextlib.suppress(SlipwayError):
            return self.pods.waits_for(release)
        return ""

    def servers(self, release: str) -> tuple[int, int]:
        return self.pods.running(release)

    @abstractmethod
    def deployment(self, release: str) -> str:
        """Name a release's Deployment."""

    def prepare(self, release: str, percent: int) -> str:
        if not self.endpoint.scaler.name:
            return ""
        return self.autoscalers.prepare(release, self.deployment(release), self.split().stable, percent)

    def replicas(self, release: str) -> Replicas:
        return self.autoscalers.replicas(release, self.deployment(release))

    def counters(self, release: str) -> Counters:
        return self.pods.counters(release)

    def kill(self, release: str) -> Callable[[], bool]:
        return self.pods.kill(release)

    def last_start(self, release: str) -> tuple[float | None, str]:
        return self.pods.last_start(release)

    def cannot_copy(self) -> str:
        mode = mode_named(self.installation.mode)
        return "" if mode.copies else f"KServe's own routes in mode {mode.name} can't copy requests; mode route can"

    def copy(self, release: str, percent: int) -> None:  # noqa: ARG002
        # A rollout that began in a mode that can is resumed in this one.
        raise ConfigError(self.cannot_copy(), hint="slipway rollout abort MODEL, or resume it in mode route")

    def copies(self, release: str) -> Sequence[CopiedRequest]:  # noqa: ARG002
        return ()  # a gateway does not report single requests: the servers' counters and the pairs have to tell

    def apply_companions(self, release: str, deployment: str, service: Object, *, canary: bool = False) -> None:
        """Apply what belongs to a release's Deployment beside *service*: the budget, and perhaps its autoscaler."""
        self.objects.apply_budget()
        self.autoscalers.apply(release, deployment, service, canary=canary)
        if not canary:
            self.apply_shared_address(release)

    def apply_shared_address(self, release: str) -> None:
        """Let the address of all models lead to this one, with the adapters of *release*."""
        for body in shared_objects(self.endpoint, release, self.installation.gateway, self.hostname):
            self.cluster.apply(self.cluster.kind(body["apiVersion"], body["kind"]), body, force=True)

    def wait_for_propagation(self, release: str, percent: int) -> None:
        """Wait until the gateway's proxies have followed its controller."""
        time.sleep(self.endpoint.settings.propagation_s)
        self._propagated = (release, percent)

    def has_propagated(self, release: str, percent: int) -> bool:
        """Whether this process has waited for that. When a process that was killed made the change is not known."""
        return self._propagated == (release, percent)

    def leave_host(self) -> None:
        """Give up the endpoint's host name, where the mode has a route of its own for it."""

    def remove_services(self) -> None:
        """Remove what serves in this mode; what all modes share stays."""
        self.objects.remove(ISVCS, self.endpoint.name)

    def remove_all(self) -> None:
        """Stop serving the model."""
        if self.endpoint.settings.shared_host:
            for kind in reversed(KINDS):
                self.objects.remove(kind, shared_name(self.endpoint))
        self.remove_services()
        self.objects.remove(BUDGETS, self.endpoint.name)


class OneServiceTarget(KServeTarget):
    """A mode with one InferenceService, called like the endpoint, for the stable release and its canary."""

    def service(self) -> Object:
        """Read the InferenceService; raise Conflict if there is none."""
        if (service := self.objects.ours()) is None:
            raise Conflict(f"{self.endpoint.store.model} is not being served", hint=AGAIN)
        return service

    def client_url(self) -> str:
        url = (self.objects.ours() or {}).get("status", {}).get("url")
        if not url:
            raise TransientError(f"{self.endpoint.store.model} has no address yet")
        return str(url).rstrip("/")


class ServicePerReleaseTarget(KServeTarget):
    """A mode in which each release has an object of its own that serves it, called by ``service_name``, and the routes
    of clients divide their requests among these objects."""

    @abstractmethod
    def stable_of(self, services: Mapping[str, Object]) -> str | None:
        """Find the stable release among these."""

    @abstractmethod
    def route_of(self, service: Object) -> Object | None:
        """Read the route that leads to *service*; raise Conflict if it is somebody else's."""

    @abstractmethod
    def backend_of(self, service: Object) -> str:
        """Name what the routes to *service* lead to."""

    @abstractmethod
    def request_shares(self, percent: Mapping[str, int], *, back: bool) -> None:
        """Ask for each release's percentage of new requests, and for none for the others."""

    @abstractmethod
    def requested_shares(self, services: Mapping[str, Object]) -> Mapping[str, float] | None:
        """Read the percentages above 0 that were asked for, by release; None if nothing shows them."""

    @abstractmethod
    def make_stable(self, release: str) -> None:
        """Mark *release* as the stable one, with all requests; it has them already, or no release is stable."""

    def services(self) -> dict[str, Object]:
        """List the object that serves each release, the oldest first; those that are being removed are left out."""
        kind = mode_named(self.installation.mode).services
        listed = self.cluster.list(kind, labels=f"{ENDPOINT}={self.endpoint.name}")[0]
        services = [service for service in listed if "deletionTimestamp" not in service["metadata"]]
        for service in services:
            refuse_foreign(kind, service)
        services.sort(key=lambda service: (service["metadata"]["creationTimestamp"], service["metadata"]["name"]))
        # The label of its pods stands in the predictor of an InferenceService, and in the very spec of another kind.
        by_release = {release_of(service["spec"].get("predictor", service["spec"])): service for service in services}
        return {release: service for release, service in by_release.items() if release}

    def service(self, release: str) -> Object:
        """Find the object that serves *release*; raise Conflict if there is none."""
        if (service := self.services().get(release)) is None:
            raise Conflict(f"{release} is no longer on the platform", hint=AGAIN)
        return service

    def split(self) -> Split:
        services = self.services()
        stable = self.stable_of(services)
        canary = next((release for release in reversed(services) if release != stable), None)
        if stable is None or canary is None:
            return Split(stable)
        return Split(stable, canary, share(self.route_of(services[stable]), self.backend_of(services[canary])))

    def clear_the_way(self, release: str) -> dict[str, Object]:
        """Remove what a first rollout left that was given up, and return the services; raise Conflict if another
        release is being tried beside the stable one."""
        services = self.services()
        stable = self.stable_of(services)
        for other in services.keys() - {release, stable}:
            if stable:
                raise tried_already(other)
            self.remove_service(other)
        return services

    def stable_beside(self, release: str) -> str:
        """Find the stable release; raise Conflict unless *release* is its canary."""
        self.service(release)
        stable = self.stable_of(self.services())
        if stable is None or stable == release:
            raise Conflict(f"{release} is not the canary of {self.endpoint.store.model}", hint=AGAIN)
        return stable

    def shift(self, release: str, percent: int) -> None:
        stable = self.stable_beside(release)
        if not (self.has_propagated(release, percent) and self.split() == Split(stable, release, percent)):
            self.weigh({stable: 100 - percent, release: percent})
            self.wait_for_propagation(release, percent)

    def promote(self, release: str) -> None:
        self.service(release)
        stable = self.stable_of(self.services())
        if stable not in (None, release):
            self.shift(release, 100)
        self.make_stable(release)
        if stable is None:
            self.wait_for_propagation(release, 100)
        self.remove_others(release)
        self.apply_companions(release, self.deployment(release), self.service(release))

    def withdraw(self, release: str, *, first: bool = False) -> None:
        services = self.services()
        stable = self.stable_of(services)
        if stable == release:
            if not first or len(services) > 1:
                raise needed(self.endpoint.store, release)
            self.leave_host()
        elif stable:
            self.weigh({stable: 100}, back=True)
            self.wait_for_propagation(release, 0)
        self.remove_service(release)
        if not self.services():
            self.remove_all()

    def weigh(self, percent: Mapping[str, int], *, back: bool = False) -> None:
        """Give each release its percentage of new requests, the others none, and wait until that is in force."""
        self.request_shares(percent, back=back)

        def unfinished() -> str:
            services = self.services()
            if self.requested_shares(services) not in (None, {name: part for name, part in percent.items() if part}):
                raise Conflict(f"somebody else changed the shares of {self.endpoint.store.model}", hint=AGAIN)
            backends = {self.backend_of(service): float(percent.get(name, 0)) for name, service in services.items()}
            reasons = (lacking(self.route_of(service), backends) for service in services.values())
            return next(filter(None, reasons), "")

        shares = " and ".join(f"{part} % for {release}" for release, part in percent.items())
        self.objects.wait_until(unfinished, shares)

    def remove_service(self, release: str) -> None:
        self.autoscalers.remove(self.deployment(release))
        self.objects.remove(mode_named(self.installation.mode).services, self.service_name(release))

    def remove_others(self, release: str) -> None:
        for other in self.services().keys() - {release}:
            self.remove_service(other)

    def remove_services(self) -> None:
        self.remove_others("")

    def client_url(self) -> str:
        return f"http://{self.hostname}"


def check_reconciled(service: Object) -> None:
    """Raise ServerFailed if KServe has said for a while that it can't make what the service asks for."""
    conditions = service.get("status", {}).get("conditions", [])
    refused = (each for each in conditions if each["status"] == "False" and REFUSED.fullmatch(each.get("reason", "")))
    if (refusal := next(refused, None)) is None:
        return
    since = datetime.fromisoformat(refusal["lastTransitionTime"])
    if (datetime.now(UTC) - since).total_seconds() > UNRECONCILED_S:
        name = service["metadata"]["name"]
        hint = f"kubectl describe {service['kind'].lower()} {name}"
        raise ServerFailed(f"KServe can't serve {name}: {refusal.get('message', '')}", hint=hint)
