"""KServe as the target of a rollout: what its modes have in common.

What is in force is read from statuses: a route counts only once its gateway has programmed it. Objects are applied
server-side by one field manager, at the version that was read. On the way forward this is never forced: a change that
somebody else made meanwhile is a Conflict. On the way back it is forced: a person who changed a share by hand owns
that field from then on, but must not keep clients at a bad canary.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from stages.parts.base.errors import ConfigError, Conflict, ServerFailed, SlipwayError, TransientError
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import Kind
from stages.parts.cluster.refusals import Absent
from stages.parts.records.counters import Counters
from stages.parts.records.rollout import KSERVE
from stages.parts.releases.split import Split
from stages.rollout.kserve.audit import cluster_user, emit
from stages.rollout.kserve.autoscaling import SCALED_OBJECTS, bounds, lacking, scaled_object
from stages.rollout.kserve.detect import Installation
from stages.rollout.kserve.free_gpus import check_room
from stages.rollout.kserve.http_route import HTTP_ROUTES
from stages.rollout.kserve.kept import ISVCS, refuse_foreign
from stages.rollout.kserve.objects import (
    AUTOSCALER,
    ENDPOINT,
    MODEL,
    RELEASE,
    REVISION,
    KServeEndpoint,
    Object,
    disruption_budget,
    predictor,
    startup_s,
)
from stages.rollout.kserve.release_pods import Pods
from stages.rollout.target import Replicas

UNRECONCILED_S: Final = 60.0
"""KServe tries again meanwhile: another controller may have changed the object at the same time."""
SERVICES: Final = Kind("v1", "Service", "services")
BUDGETS: Final = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")


class KServeTarget(ABC):
    """See ``Target``; each mode adds how it splits traffic."""

    shown = "isvc,httproute"
    """What to describe where something is not in force."""

    def __init__(self, cluster: Cluster, endpoint: KServeEndpoint, installation: Installation, poll_s: float) -> None:
        self.cluster, self.endpoint, self.installation, self.poll_s = cluster, endpoint, installation, poll_s
        self.pods = Pods(cluster, endpoint)
        self._propagated: tuple[str, int] | None = None

    @property
    def name(self) -> str:
        return KSERVE

    @abstractmethod
    def split(self) -> Split: ...

    def who(self) -> str:
        return cluster_user(self.cluster)

    def announce(self, reason: str, note: str) -> None:
        with contextlib.suppress(SlipwayError):
            emit(self.cluster, self.regarding(), reason, note)

    def regarding(self) -> Object | None:
        """The object on which people look for events; None while there is none."""
        return self.get(ISVCS, self.endpoint.name)

    def changes(self, release: str) -> str:
        found = self.serving(release)
        wanted = predictor(self.endpoint, release, self.installation.mode)
        if found is None or revision_of(found["spec"]["predictor"]) == revision_of(wanted):
            return ""
        return "how its pods are started"

    def serving(self, release: str) -> Object | None:  # noqa: ARG002
        """The InferenceService whose stable predictor *release* is."""
        return self.service()

    def startup_s(self, release: str) -> int:
        return startup_s(self.endpoint, release)

    def check_room(self, release: str) -> None:
        there = len(self.pods.of(release))
        check_room(self.cluster, self.endpoint, release, there=there)

    @abstractmethod
    def deploy(self, release: str) -> None: ...

    @abstractmethod
    def ready(self, release: str) -> bool: ...

    def waits_for(self, release: str) -> str:
        with contextlib.suppress(SlipwayError):
            return self.pods.waits_for(release)
        return ""

    @abstractmethod
    def url(self, release: str) -> str: ...

    def prepare(self, release: str, percent: int) -> str:
        """Without an autoscaler every release has the same replicas. With one the canary has as few as its share
        needed so far, and more of them take minutes to load."""
        name = self.autoscaled(release)
        if not name or self.get(SCALED_OBJECTS, name) is None or (stable := self.split().stable) is None:
            return ""
        there = len(self.pods.ready_names(release))
        serving = len(self.pods.ready_names(stable)) + there  # the stable release may have followed its smaller share
        scaling = self.endpoint.settings.scaling
        needed = min(scaling.maximum, max(scaling.minimum, math.ceil(serving * percent / 100)))
        self.cluster.apply(SCALED_OBJECTS, scaled_object(self.endpoint, release, name, least=needed), force=True)
        return "" if there >= needed else f"{there} of {needed} are ready"

    def replicas(self, release: str) -> Replicas:
        """See ``Autoscaled``."""
        name = self.autoscaled(release)
        if not name:
            raise ConfigError(
                f"nothing scales {release}: kserve.prometheus is not set",
                hint="KEDA, a Prometheus with manifests/monitoring, and kserve.prometheus; then slipway rollout start",
            )
        scaled = self.get(SCALED_OBJECTS, name)
        if scaled is None:
            self.cluster.kind(SCALED_OBJECTS.api_version, SCALED_OBJECTS.name)  # raises with what to install
            raise ConfigError(
                f"nothing scales {release}: there is no ScaledObject {name}",
                hint=f"slipway rollout start {self.endpoint.store.model}, with kserve.prometheus as it is now",
            )
        return Replicas(*self.pods.running(release), *bounds(scaled), lacking(scaled))

    def autoscaled(self, release: str) -> str:  # noqa: ARG002
        """The Deployment that KEDA scales; empty: none."""
        return ""

    @abstractmethod
    def shift(self, release: str, percent: int) -> None: ...

    @abstractmethod
    def promote(self, release: str) -> None: ...

    @abstractmethod
    def withdraw(self, release: str, *, first: bool = False) -> None: ...

    @abstractmethod
    def client_url(self) -> str: ...

    def counters(self, release: str) -> Counters:
        return self.pods.counters(release)

    def kill(self, release: str) -> Callable[[], bool]:
        return self.pods.kill(release)

    def get(self, kind: Kind, name: str) -> Object | None:
        try:
            return self.cluster.get(kind, name)
        except Absent:
            return None

    def service(self, name: str = "", kind: Kind = ISVCS) -> Object | None:
        """The InferenceService, or what is in its place.

        Raises:
            Conflict: it is another model's, or another controller looks after it.
        """
        found = self.get(kind, name or self.endpoint.name)
        if found:
            refuse_foreign(kind, found)
        if found and found["metadata"].get("annotations", {}).get(MODEL) != self.endpoint.store.model:
            raise Conflict(
                f"the {kind.name} {found['metadata']['name']} does not serve {self.endpoint.store.model}",
                hint="rename or remove it",
            )
        return found

    def made_by_kserve(self, name: str, kind: str, owner: str) -> Object | None:
        """The HTTPRoute that KServe makes for the *kind* called *owner*.

        Raises:
            Conflict: there is one of somebody else under its name.
        """
        found = self.get(HTTP_ROUTES, name)
        if found:
            refuse_foreign(HTTP_ROUTES, found, kind, owner)
            if not found["metadata"].get("ownerReferences"):
                raise Conflict(f"the HTTPRoute {name} was not made by KServe", hint="remove it; nothing was changed")
        return found

    def own_address(self) -> str:
        """The address of the endpoint's own host name at the gateway."""
        return f"http://{self.installation.hostname(self.endpoint.name, self.endpoint.namespace)}"

    def apply(self, kind: Kind, body: Object, seen: Object | None, *, back: bool = False) -> Object:
        """Apply *body* if the object is still as it was *seen*; on the way *back*, no matter who owns its fields.

        Raises:
            Conflict: somebody else changed it, or owns one of its fields.
            TransientError: it changed at this very moment, on the way back.
        """
        while True:
            if seen:
                body = body | {"metadata": body["metadata"] | {"resourceVersion": seen["metadata"]["resourceVersion"]}}
            try:
                return self.cluster.apply(kind, body, force=back)
            except Conflict as error:
                now = self.get(kind, body["metadata"]["name"])
                if seen and now and _only_status_changed(seen, now):
                    seen = now
                    continue
                if now and _contains(now["spec"], body["spec"]):
                    return now  # an earlier try of this very call applied it, and its answer was lost
                said = f"somebody else changed {kind.name} {body['metadata']['name']}: {error}"
                if back:
                    raise TransientError(said, hint="try again") from error
                raise Conflict(
                    said,
                    hint="to see who: kubectl get -o yaml --show-managed-fields; then start the rollout again",
                ) from error

    def remove(self, kind: Kind, name: str) -> None:
        try:
            self.cluster.delete(kind, name)
        except Absent:
            return

    def wait_until(self, done: Callable[[], str], what: str) -> None:
        """Wait until *done* returns no reason to wait any longer.

        Raises:
            TransientError: after ``in_force_s`` it still returns one, which is named.
        """
        deadline = time.monotonic() + self.endpoint.settings.in_force_s
        while why := done():
            if time.monotonic() > deadline:
                raise TransientError(
                    f"{what} was not in force within {self.endpoint.settings.in_force_s} s: {why}",
                    hint=f"kubectl -n {self.endpoint.namespace} describe {self.shown}",
                )
            time.sleep(self.poll_s)

    def wait_for_propagation(self, release: str, percent: int) -> None:
        """Wait until the gateway's proxies have followed its controller."""
        time.sleep(self.endpoint.settings.propagation_s)
        self._propagated = (release, percent)

    def has_propagated(self, release: str, percent: int) -> bool:
        """Whether this process has waited for that. When a process that was killed made the change is not known."""
        return self._propagated == (release, percent)

    def apply_budget(self) -> None:
        self.cluster.apply(BUDGETS, disruption_budget(self.endpoint), force=True)

    def apply_companions(self, release: str, deployment: str, service: Object) -> None:
        """Apply what belongs to a release's Deployment: the budget and, if Prometheus is configured, its autoscaler."""
        self.apply_budget()
        if self.endpoint.settings.prometheus and _leaves_replicas(service):  # else KServe would set them back
            self.cluster.kind(SCALED_OBJECTS.api_version, SCALED_OBJECTS.name)  # raises with what to install
            self.cluster.apply(SCALED_OBJECTS, scaled_object(self.endpoint, release, deployment), force=True)

    def remove_autoscaler(self, deployment: str) -> None:
        if self.endpoint.settings.prometheus:
            self.remove(SCALED_OBJECTS, deployment)

    def keep_autoscalers(self, *deployments: str) -> None:
        """Remove the autoscalers of all other Deployments, including those of Deployments that are gone already."""
        with contextlib.suppress(Absent):  # KEDA is not installed
            found, _ = self.cluster.list(SCALED_OBJECTS, labels=f"{ENDPOINT}={self.endpoint.name}")
            for name in {each["metadata"]["name"] for each in found}.difference(deployments):
                self.remove_autoscaler(name)

    def leave_host(self) -> None:  # noqa: B027
        """Give up the endpoint's host name, where the mode has a route of its own for it."""

    def remove_services(self) -> None:
        """Remove what serves in this mode; what all modes share stays."""
        self.remove(ISVCS, self.endpoint.name)

    def remove_all(self) -> None:
        """Stop serving the model."""
        self.remove_services()
        self.remove(BUDGETS, self.endpoint.name)

    def refusal(self, release: str) -> Conflict:
        """The refusal to withdraw the stable release."""
        return Conflict(
            f"{release} is the stable release of {self.endpoint.store.model}: clients would be left with nothing",
            hint=f"slipway rollback {self.endpoint.store.model}",
        )

    def service_url(self, name: str) -> str:
        """Base URL of a Service. A Service without a cluster IP is reached at its pods' port.

        Raises:
            TransientError: it does not exist (yet).
        """
        found = self.get(SERVICES, name)
        if found is None:
            raise TransientError(f"there is no Service {name} yet")
        port = found["spec"]["ports"][0]
        number = port.get("targetPort", port["port"]) if found["spec"].get("clusterIP") == "None" else port["port"]
        return self.endpoint.settings.service_url.format(service=name, namespace=self.endpoint.namespace, port=number)


def _leaves_replicas(service: Object) -> bool:
    """Whether the replicas of an InferenceService, or LLMInferenceService, are left to an autoscaler of ours."""
    external = service["metadata"].get("annotations", {}).get(AUTOSCALER) == "external"
    return external or ("template" in service["spec"] and "replicas" not in service["spec"])


def _only_status_changed(seen: Object, now: Object) -> bool:
    """Whether only a controller changed the object: writing a status makes a new version, too."""
    then, here = seen["metadata"], now["metadata"]
    same = all(then.get(key) == here.get(key) for key in ("uid", "generation", "labels", "annotations"))
    return same and then["resourceVersion"] != here["resourceVersion"]


def _contains(now: Any, wanted: Any) -> bool:
    """Whether *now* contains all of *wanted*; KServe adds defaults."""
    if isinstance(wanted, dict):
        return isinstance(now, dict) and all(key in now and _contains(now[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return isinstance(now, list) and len(now) == len(wanted) and all(map(_contains, now, wanted))
    return bool(now == wanted)


def release_of(predictor: Object) -> str | None:
    found: str | None = predictor.get("labels", {}).get(RELEASE)
    return found


def revision_of(predictor: Object) -> str:
    return str(predictor.get("labels", {}).get(REVISION, ""))


def condition(service: Object, name: str) -> bool:
    """A condition of an InferenceService. Its ``observedGeneration`` is a child object's, and means nothing here."""
    said: list[dict[str, Any]] = service.get("status", {}).get("conditions", [])
    return any(each["type"] == name and each["status"] == "True" for each in said)


def check_reconciled(service: Object) -> None:
    """Raises: ServerFailed: KServe can't make what the service asks for, and has said so for a while."""
    said = service.get("status", {}).get("conditions", [])
    refused = next((each for each in said if each["status"] == "False" and _is_refusal(each.get("reason", ""))), None)
    if refused is None:
        return
    since = datetime.fromisoformat(refused["lastTransitionTime"])
    if (datetime.now(UTC) - since).total_seconds() > UNRECONCILED_S:
        name = service["metadata"]["name"]
        raise ServerFailed(
            f"KServe can't serve {name}: {refused.get('message', '')}",
            hint=f"kubectl describe {service['kind'].lower()} {name}",
        )


def _is_refusal(reason: str) -> bool:
    """Whether KServe failed, or lacks a preset."""
    failed = "Reconcile" in reason and reason.endswith("Error")
    return failed or reason in ("ReconcileFailed", "ConfigNotFound", "CombineBaseError")


def url_of(service: Object | None, model: str) -> str:
    """Raises: TransientError: the InferenceService has no address yet."""
    found = (service or {}).get("status", {}).get("url")
    if not found:
        raise TransientError(f"{model} has no address yet")
    return str(found).rstrip("/")
