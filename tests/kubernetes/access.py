"""What an account may, by the Roles of a namespace: the part of RBAC that Slipway's manifests use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.kubernetes.objects import Object

if TYPE_CHECKING:
    from tests.kubernetes.api import KubernetesServer


def may(server: KubernetesServer, user: str, asks: Object) -> bool:
    """Whether *user*, such as ``system:serviceaccount:argo:argo``, may do what the resource attributes ask."""
    roles = {each["metadata"]["name"]: each for each in server.all("Role", asks["namespace"])}
    bound = [
        each["roleRef"]["name"]
        for each in server.all("RoleBinding", asks["namespace"])
        if user in (_user(subject) for subject in each["subjects"])
    ]
    return any(_allows(rule, asks) for name in bound if name in roles for rule in roles[name]["rules"])


def _user(subject: Object) -> str:
    return f"system:serviceaccount:{subject.get('namespace', '')}:{subject['name']}"


def _allows(rule: Object, asks: Object) -> bool:
    """A rule with names does not allow what has none, such as to create."""
    named = not rule.get("resourceNames") or asks.get("name") in rule["resourceNames"]
    return (
        named
        and asks["group"] in rule["apiGroups"]
        and asks["resource"] in rule["resources"]
        and asks["verb"] in rule["verbs"]
    )
