"""The objects of one endpoint on its cluster, what its routes say, and the events by which others there see what a
rollout did.

Objects are applied server-side by one field manager, at the version that was read. On the way forward this is never
forced: a change that somebody else made meanwhile is a Conflict. On the way back it is forced: a person who changed a
share by hand owns that field from then on, but must not keep clients at a bad canary.
"""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from stages.parts.base.errors import Conflict, SlipwayError, TransientError
from stages.parts.cluster.api import FIELD_MANAGER, Absent, Cluster
from stages.parts.cluster.kinds import EVENTS, SERVICES, USER_REVIEWS, Kind, Object
from stages.rollout.kserve.objects import BUDGETS, ISVCS, MODEL, KServeEndpoint, disruption_budget

BAD: Final = ("RolledBack", "GaveUp")
"""The reasons of events that are warnings."""
LONGEST_NOTE: Final = 1024
"""In bytes; the API refuses a longer one."""
POLL_S: Final = 0.5
HTTP_ROUTES: Final = Kind("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes")


@dataclass(frozen=True)
class AppliedObjects:
    """Reads, applies and removes the objects of one endpoint."""

    cluster: Cluster
    endpoint: KServeEndpoint

    def ours(self, kind: Kind = ISVCS, name: str = "") -> Object | None:
        """Read what serves under *name*, by default the endpoint's; raise Conflict if it is not ours."""
        if (service := self.cluster.find(kind, name or self.endpoint.name)) is None:
            return None
        refuse_foreign(kind, service)
        if service["metadata"].get("annotations", {}).get(MODEL) != self.endpoint.store.model:
            text = f"the {kind.name} {service['metadata']['name']} does not serve {self.endpoint.store.model}"
            raise Conflict(text, hint="rename or remove it")
        return service

    def route_by_kserve(self, name: str, kind: str, owner: str) -> Object | None:
        """Read the HTTPRoute that KServe makes for the *kind* called *owner*; raise Conflict if somebody else made
        it."""
        if route := self.cluster.find(HTTP_ROUTES, name):
            refuse_foreign(HTTP_ROUTES, route, kind, owner)
            if not route["metadata"].get("ownerReferences"):
                raise Conflict(f"the HTTPRoute {name} was not made by KServe", hint="remove it; nothing was changed")
        return route

    def apply(self, kind: Kind, body: Object, former: Object | None, *, back: bool = False) -> Object:
        """Apply *body* if the object is still as it was read, *former*; on the way *back*, no matter who owns its
        fields.

        Raises:
            Conflict: somebody else changed it, or owns one of its fields.
            TransientError: it changed at this very moment, on the way back.
        """
        while True:
            if former:
                version = {"resourceVersion": former["metadata"]["resourceVersion"]}
                body = body | {"metadata": body["metadata"] | version}
            try:
                return self.cluster.apply(kind, body, force=back)
            except Conflict as error:
                present = self.cluster.find(kind, body["metadata"]["name"])
                if former and present and _only_status_changed(former, present):
                    former = present
                    continue
                if present and _contains(present["spec"], body["spec"]):
                    return present  # an earlier try of this very call applied it, and its answer was lost
                message = f"somebody else changed {kind.name} {body['metadata']['name']}: {error}"
                if back:
                    raise TransientError(message, hint="try again") from error
                hint = "to see who: kubectl get -o yaml --show-managed-fields; then start the rollout again"
                raise Conflict(message, hint=hint) from error

    def apply_budget(self) -> None:
        self.cluster.apply(BUDGETS, disruption_budget(self.endpoint), force=True)

    def remove(self, kind: Kind, name: str) -> None:
        with contextlib.suppress(Absent):
            self.cluster.delete(kind, name)

    def wait_until(self, lacking: Callable[[], str], change: str) -> None:
        """Wait until nothing is *lacking* any more for a *change* to be in force, for at most ``in_force_s``."""
        limit_s = self.endpoint.settings.in_force_s
        if why := still_lacking(lacking, limit_s):
            hint = f"kubectl -n {self.endpoint.namespace} describe isvc,llmisvc,httproute"
            raise TransientError(f"{change} was not in force within {limit_s} s: {why}", hint=hint)

    def service_url(self, name: str) -> str:
        """Find the base URL of a Service. A Service without a cluster IP is reached at its pods' port."""
        if (service := self.cluster.find(SERVICES, name)) is None:
            raise TransientError(f"there is no Service {name} yet")
        port = service["spec"]["ports"][0]
        headless = service["spec"].get("clusterIP") == "None"
        number = port.get("targetPort", port["port"]) if headless else port["port"]
        return self.endpoint.settings.service_url.format(service=name, namespace=self.endpoint.namespace, port=number)


def cluster_user(cluster: Cluster) -> str:
    """Ask which user the cluster takes the caller for; "unknown" if it does not say."""
    body = {"apiVersion": USER_REVIEWS.api_version, "kind": USER_REVIEWS.name}
    try:
        return str(cluster.request("POST", USER_REVIEWS.path(None), body=body)["status"]["userInfo"]["username"])
    except (SlipwayError, KeyError):  # Kubernetes before 1.28, or the right was taken away
        return "unknown"


def event(regarding: Object, reason: str, note: str) -> Object:
    """Build an event on an InferenceService or HTTPRoute."""
    metadata = regarding["metadata"]
    identity = {key: metadata[key] for key in ("name", "namespace", "uid")}
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.name,
        "metadata": {"name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}", "namespace": metadata["namespace"]},
        "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": FIELD_MANAGER,
        "reportingInstance": socket.gethostname(),
        "action": "Rollout",
        "reason": reason,
        "type": "Warning" if reason in BAD else "Normal",
        "regarding": {"apiVersion": regarding["apiVersion"], "kind": regarding["kind"], **identity},
        "note": note.encode()[:LONGEST_NOTE].decode(errors="ignore"),
    }


def still_lacking(lacking: Callable[[], str], limit_s: float) -> str:
    """Wait until nothing is *lacking* any more. Returns what still is after *limit_s*, if anything."""
    deadline = time.monotonic() + limit_s
    while (why := lacking()) and time.monotonic() <= deadline:
        time.sleep(POLL_S)
    return why


def refuse_foreign(kind: Kind, body: Object, *owner: str) -> None:
    """Raise Conflict if a controller, but not that of *owner* (kind, name), looks after the object."""
    for reference in body["metadata"].get("ownerReferences", []):
        if (reference["kind"], reference["name"]) != owner:
            text = f"the {kind.name} {body['metadata']['name']} belongs to the {reference['kind']} {reference['name']}"
            raise Conflict(text, hint=f"remove or rename that {reference['kind']}; nothing was changed")


def _only_status_changed(former: Object, present: Object) -> bool:
    """Whether only a controller changed the object: writing a status makes a new version, too."""
    old, new = former["metadata"], present["metadata"]
    same = all(old.get(key) == new.get(key) for key in ("uid", "generation", "labels", "annotations"))
    return same and old["resourceVersion"] != new["resourceVersion"]


def _contains(present: Any, applied: Any) -> bool:
    """Whether *present* contains all of *applied*; KServe adds defaults."""
    if isinstance(applied, dict):
        return isinstance(present, dict) and all(
            key in present and _contains(present[key], value) for key, value in applied.items()
        )
    if isinstance(applied, list):
        return isinstance(present, list) and len(present) == len(applied) and all(map(_contains, present, applied))
    return bool(present == applied)


def shares(route: Object) -> dict[str, float]:
    """Percent of new requests by Service; empty if its rules differ from each other, or one of them has no weight."""
    by_rule: list[dict[str, float]] = []
    for rule in route["spec"].get("rules", []):
        weights = Counter[str]()
        for backend in rule.get("backendRefs", []):
            weights[backend["name"]] += int(backend.get("weight", 1))
        if not (total := weights.total()):
            return {}
        by_rule.append({name: 100 * weight / total for name, weight in weights.items()})
    return by_rule[0] if by_rule and all(percent == by_rule[0] for percent in by_rule) else {}


def share(route: Object | None, service: str) -> int:
    """Read the percentage of new requests that a Service gets, rounded; raise TransientError if it is not certain."""
    why = unprogrammed(route)
    if route is None or why:
        raise TransientError(f"the split in force is not certain: {why}")
    if not (percent := shares(route)):
        raise TransientError("the split in force is not certain: the route's rules split differently")
    return round(percent.get(service, 0.0))


def lacking(route: Object | None, percent: Mapping[str, float]) -> str:
    """Why a route does not (yet) give these percentages to its Services; empty if it does."""
    why = unprogrammed(route)
    if route is None or why:
        return why
    split = shares(route)
    if split and all(split.get(service, 0.0) == part for service, part in percent.items()):
        return ""
    return f"the route {route['metadata']['name']} does not split so"


def unprogrammed(route: Object | None) -> str:
    """Why the gateway has not (yet) programmed the route; empty if it has. A route's ``observedGeneration`` is set by
    its gateway itself, unlike that of an InferenceService."""
    if route is None:
        return "there is no route"
    if not (parents := route.get("status", {}).get("parents", [])):
        return "no gateway has accepted it"
    for parent in parents:
        conditions = {condition["type"]: condition for condition in parent.get("conditions", [])}
        for name in ("Accepted", "ResolvedRefs"):
            condition = conditions.get(name)
            if condition is None or condition["status"] != "True":
                why = f": {condition.get('message') or condition.get('reason', '')}" if condition else ""
                return f"its gateway does not report {name}{why}"
            if condition.get("observedGeneration", 0) < route["metadata"]["generation"]:
                return "its gateway has not seen the last change"
    return ""
