"""Reads an HTTPRoute: the shares of its Services, and whether its gateway has programmed them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from stages.parts.base.errors import TransientError
from stages.parts.cluster.kinds import Kind, Object

HTTP_ROUTES: Final = Kind("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes")


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
    parents = route.get("status", {}).get("parents", [])
    if not parents:
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
