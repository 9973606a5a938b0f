"""KServe as the target of a rollout: what its three modes have in common, and which one a cluster gets.

What is in force is read from statuses: a route counts only as its gateway says that it is programmed. Objects are
applied server-side as one field manager and at the version that was read. On the way forward never by force: what
somebody else changed meanwhile is a Conflict. On the way back by force: whoever changed a share by hand owns it from
then on, and must not keep clients at a bad canary.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

from stages.parts.base.errors import Conflict, NotInstalled, TransientError
from stages.parts.base.settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.cluster import api
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import Kind
from stages.parts.cluster.refusals import Absent
from stages.parts.records.counters import Counters
from stages.parts.records.rollout import KSERVE
from stages.parts.releases.split import Split
from stages.rollout.kserve.autoscaling import scaled_object
from stages.rollout.kserve.detect import Found, detect
from stages.rollout.kserve.objects import (
    ENDPOINT,
    MODEL,
    RELEASE,
    REVISION,
    RUNTIME,
    Endpoint,
    Object,
    disruption_budget,
)
from stages.rollout.kserve.pods import Pods
from stages.rollout.kserve.settings import KServe
from stages.rollout.target import Target

ISVCS: Final = Kind("serving.kserve.io/v1beta1", "InferenceService", "inferenceservices")
RUNTIMES: Final = Kind("serving.kserve.io/v1alpha1", "ServingRuntime", "servingruntimes")
SERVICES: Final = Kind("v1", "Service", "services")
BUDGETS: Final = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
SCALED_OBJECTS: Final = Kind("keda.sh/v1alpha1", "ScaledObject", "scaledobjects")
POLL_S: Final = 0.5


def connect(store: ModelStore, serving: Serving, settings: KServe) -> Target:
    """The cluster of the kubeconfig or of this pod, for the releases of one model.

    Raises:
        ConfigError: no cluster is configured, or its KServe can't split traffic as it is set up.
        NotInstalled: it has no KServe, or not the runtime in ``manifests/kserve``.
    """
    return on(api.connect(namespace=settings.namespace), store, serving, settings)


def on(cluster: Cluster, store: ModelStore, serving: Serving, settings: KServe, *, poll_s: float = POLL_S) -> Target:
    """The target on *cluster*, in the mode that its KServe has.

    Raises:
        NotInstalled: it has no KServe, or not the runtime in ``manifests/kserve``.
        ConfigError: its KServe can't split traffic as it is set up.
    """
    from stages.rollout.kserve.knative import Knative
    from stages.rollout.kserve.route import OwnRoute
    from stages.rollout.kserve.standard import Standard

    found = detect(cluster, settings)
    endpoint = Endpoint(store, serving, settings, cluster.namespace)
    try:
        cluster.get(RUNTIMES, RUNTIME)
    except Absent as error:
        raise NotInstalled(
            f"the namespace {cluster.namespace} has no ServingRuntime {RUNTIME}",
            hint=f"kubectl -n {cluster.namespace} apply -k manifests/kserve",
        ) from error
    modes: dict[str, type[Platform]] = {"standard": Standard, "knative": Knative, "route": OwnRoute}
    return modes[found.mode](cluster, endpoint, found, poll_s)


class Platform(ABC):
    """See ``Target``; a mode adds how traffic is split."""

    def __init__(self, cluster: Cluster, endpoint: Endpoint, found: Found, poll_s: float) -> None:
        self.cluster, self.at, self.found, self.poll_s = cluster, endpoint, found, poll_s
        self.pods = Pods(cluster, endpoint)
        self._spread: tuple[str, int] | None = None

    @property
    def name(self) -> str:
        return KSERVE

    @abstractmethod
    def split(self) -> Split: ...

    @abstractmethod
    def deploy(self, release: str) -> None: ...

    @abstractmethod
    def ready(self, release: str) -> bool: ...

    @abstractmethod
    def url(self, release: str) -> str: ...

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

    def service(self, name: str = "") -> Object | None:
        """The InferenceService.

        Raises:
            Conflict: it is another model's.
        """
        found = self.get(ISVCS, name or self.at.name)
        if found and found["metadata"].get("annotations", {}).get(MODEL) != self.at.store.model:
            raise Conflict(
                f"the InferenceService {found['metadata']['name']} serves something else than {self.at.store.model}",
                hint="rename or remove it",
            )
        return found

    def apply(self, kind: Kind, body: Object, seen: Object | None, *, back: bool = False) -> Object:
        """*body*, if the object is still as it was *seen*; on the way *back*, whoever owns its fields.

        Raises:
            Conflict: somebody else changed it, or owns one of its fields.
            TransientError: on the way back: it changed at this very moment.
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
                    return now  # by an earlier try of this very call, whose answer was lost
                said = f"{kind.name} {body['metadata']['name']} was changed by somebody else: {error}"
                if back:
                    raise TransientError(said, hint="try again") from error
                raise Conflict(
                    said,
                    hint="see who: kubectl get -o yaml --show-managed-fields; then start the rollout again",
                ) from error

    def remove(self, kind: Kind, name: str) -> None:
        try:
            self.cluster.delete(kind, name)
        except Absent:
            return

    def until(self, done: Callable[[], str], what: str) -> None:
        """Wait until *done* gives no reason to wait any more.

        Raises:
            TransientError: it still gives one after ``in_force_s``; it is named.
        """
        deadline = time.monotonic() + self.at.settings.in_force_s
        while why := done():
            if time.monotonic() > deadline:
                raise TransientError(
                    f"{what} was not in force within {self.at.settings.in_force_s} s: {why}",
                    hint=f"kubectl -n {self.at.namespace} describe inferenceservice,httproute {self.at.name}",
                )
            time.sleep(self.poll_s)

    def spread(self, release: str, percent: int) -> None:
        """Wait until the gateway's proxies do what its controller has said."""
        time.sleep(self.at.settings.propagation_s)
        self._spread = (release, percent)

    def has_spread(self, release: str, percent: int) -> bool:
        """Whether this process has waited for that; nobody knows when one that was killed had it changed."""
        return self._spread == (release, percent)

    def protect(self) -> None:
        self.cluster.apply(BUDGETS, disruption_budget(self.at), force=True)

    def accompany(self, release: str, deployment: str, *, scaled: bool = True) -> None:
        """What stands beside a release's Deployment: the budget and, where there is Prometheus, its autoscaler."""
        self.protect()
        if self.at.settings.prometheus and scaled:
            self.cluster.kind(SCALED_OBJECTS.api_version, SCALED_OBJECTS.name)  # else: what to install
            self.cluster.apply(SCALED_OBJECTS, scaled_object(self.at, release, deployment), force=True)

    def leave(self, deployment: str) -> None:
        if self.at.settings.prometheus:
            self.remove(SCALED_OBJECTS, deployment)

    def leave_all_but(self, *deployments: str) -> None:
        """Of no other Deployment an autoscaler stays, nor of one that went before an earlier call was cut off."""
        with contextlib.suppress(Absent):  # there is no KEDA
            found, _ = self.cluster.list(SCALED_OBJECTS, labels=f"{ENDPOINT}={self.at.name}")
            for name in {each["metadata"]["name"] for each in found}.difference(deployments):
                self.leave(name)

    def end(self) -> None:
        """Nothing of the model is served any more."""
        self.remove(ISVCS, self.at.name)
        self.remove(BUDGETS, self.at.name)

    def refusal(self, release: str) -> Conflict:
        """To withdraw the stable one."""
        return Conflict(
            f"{release} is the stable release of {self.at.store.model}: clients would be left with nothing",
            hint=f"slipway rollback {self.at.store.model}",
        )

    def service_url(self, name: str) -> str:
        """Base URL of a Service. One without an address of its own is reached at its pods' port.

        Raises:
            TransientError: it is not there (yet).
        """
        found = self.get(SERVICES, name)
        if found is None:
            raise TransientError(f"there is no Service {name} yet")
        port = found["spec"]["ports"][0]
        number = port.get("targetPort", port["port"]) if found["spec"].get("clusterIP") == "None" else port["port"]
        return self.at.settings.service_url.format(service=name, namespace=self.at.namespace, port=number)


def _only_status_changed(seen: Object, now: Object) -> bool:
    """A controller's word about an object makes it a new version too."""
    then, here = seen["metadata"], now["metadata"]
    same = all(then.get(key) == here.get(key) for key in ("uid", "generation", "labels", "annotations"))
    return same and then["resourceVersion"] != here["resourceVersion"]


def _contains(now: Any, wanted: Any) -> bool:
    """Whether all of *wanted* is there; KServe adds defaults."""
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
    """Of an InferenceService; its ``observedGeneration`` is a child object's, and means nothing here."""
    said: list[dict[str, Any]] = service.get("status", {}).get("conditions", [])
    return any(each["type"] == name and each["status"] == "True" for each in said)


def url_of(service: Object | None, model: str) -> str:
    """Raises: TransientError: the InferenceService tells none yet."""
    found = (service or {}).get("status", {}).get("url")
    if not found:
        raise TransientError(f"{model} has no address yet")
    return str(found).rstrip("/")
