"""Reads an HTTPRoute: the shares of its Services, and whether its gateway has programmed them."""

from __future__ import annotations

from typing import Final

from stages.parts.cluster.kinds import Kind
from stages.rollout.kserve.objects import Object

HTTP_ROUTES: Final = Kind("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes")
NEEDED: Final = ("Accepted", "ResolvedRefs")


def shares(route: Object) -> dict[str, float]:
    """Percent of new requests by Service.

    Empty if its rules differ from each other, or one of them has no weight.
    """
    found: list[dict[str, float]] = []
    for rule in route["spec"].get("rules", []):
        backends = rule.get("backendRefs", [])
        weights = [float(backend.get("weight", 1)) for backend in backends]
        total = sum(weights)
        if not total:
            return {}
        shares: dict[str, float] = {}
        for each, weight in zip(backends, weights, strict=True):
            shares[each["name"]] = shares.get(each["name"], 0.0) + 100 * weight / total
        found.append(shares)
    return found[0] if found and all(each == found[0] for each in found) else {}


def programmed(route: Object) -> str:
    """Why the gateway has not (yet) programmed the route; empty if it has.

    A route's ``observedGeneration`` is set by its gateway itself, unlike that of an InferenceService.
    """
    parents = route.get("status", {}).get("parents", [])
    if not parents:
        return "no gateway has accepted it"
    generation = route["metadata"]["generation"]
    for parent in parents:
        said = {each["type"]: each for each in parent.get("conditions", [])}
        for name in NEEDED:
            condition = said.get(name)
            if condition is None or condition["status"] != "True":
                why = f": {condition.get('message') or condition.get('reason', '')}" if condition else ""
                return f"its gateway does not report {name}{why}"
            if condition.get("observedGeneration", 0) < generation:
                return "its gateway has not seen the last change"
    return ""
