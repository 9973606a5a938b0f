"""Plays KServe 0.20's controller of LLMInferenceServices (pkg/controller/v1alpha2/llmisvc), for pods on one node.

In the same order as it: the Deployment (``labels`` of the service are part of its selector, so that another one is
refused), the Service, the HTTPRoute, the status. A route gets all members of the routing group by their weights: itself
always, others once their router is ready and a replica is. A HTTPRoute that it does not control is left as it is, and
said so. A service that is deleted stays until no other member's route leads to it; then its route, its pods and what
else it owns go. The presets are there, but not merged: no test reads a pod's template.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from tests.kubernetes.objects import Object, Refused

if TYPE_CHECKING:
    from tests.kubernetes.kserve import KServeController

KIND: Final = "LLMInferenceService"
GROUP_LABEL: Final = "serving.kserve.io/routing-group"
FINALIZER: Final = "serving.kserve.io/llmisvc-finalizer"
PORT: Final = 8000
PRESETS: Final = ("kserve-config-llm-template", "kserve-config-llm-router-route", "kserve-config-llm-scheduler")
API: Final = "serving.kserve.io/v1alpha1"


class LLMServices:
    def __init__(self, kserve: KServeController) -> None:
        self.kserve, self.server, self.namespace = kserve, kserve.server, kserve.namespace
        self.copying = False
        """Nodes don't get their copies."""
        for name in PRESETS:
            self.server.put({"apiVersion": API, "kind": "LLMInferenceServiceConfig", "metadata": _at_kserve(name)})
        manager = {"name": "manager", "image": "docker.io/kserve/llmisvc-controller:v0.20.0"}
        self.server.put(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": _at_kserve("llmisvc-controller-manager"),
                "spec": {"template": {"spec": {"containers": [manager]}}},
            }
        )

    def reconcile(self) -> None:
        try:
            there = self.server.all(KIND)
        except StopIteration:  # a test took the definition away
            return
        self._copy({each["metadata"]["uid"] for each in there})
        for service in there:
            with contextlib.suppress(Refused):  # it has changed meanwhile, and comes again
                if "deletionTimestamp" in service["metadata"]:
                    self._finalize(service, there)
                else:
                    self._reconcile(service, there)

    def _copy(self, owners: set[str]) -> None:
        """The part of the controllers of copies on nodes, and of the garbage collector."""
        for each in self.server.all("LocalModelNamespaceCache"):
            name, metadata = each["metadata"]["name"], each["metadata"]
            references = {owner["uid"] for owner in metadata.get("ownerReferences", [])}
            if references and not references & owners:
                self.server.remove("LocalModelNamespaceCache", name, metadata["namespace"])
            elif not self.copying:
                self.kserve.say("LocalModelNamespaceCache", each, {"copies": {"available": 1, "total": 1}})

    def _finalize(self, service: Object, there: list[Object]) -> None:
        own, name = _backend(service), service["metadata"]["name"]
        for other in there:
            with contextlib.suppress(Refused):
                if "deletionTimestamp" in other["metadata"]:
                    continue
                route = self.server.find("HTTPRoute", f"{other['metadata']['name']}-kserve-route", self.namespace)
                if any(each["name"] == own for rule in route["spec"]["rules"] for each in rule["backendRefs"]):
                    return
        self.server.put(service | {"metadata": service["metadata"] | {"finalizers": []}}, manager="llmisvc")
        with contextlib.suppress(Refused):
            self.server.remove("HTTPRoute", f"{name}-kserve-route", self.namespace)

    def _reconcile(self, service: Object, there: list[Object]) -> None:
        name, spec = service["metadata"]["name"], service["spec"]
        if not service["metadata"].get("finalizers"):
            self.server.put(
                service | {"metadata": service["metadata"] | {"finalizers": [FINALIZER]}}, manager="llmisvc"
            )
            return
        deployment = f"{name}-kserve"
        (server,) = [each for each in spec["template"]["containers"] if each["name"] == "main"]
        pods = {"labels": spec["labels"], "annotations": spec["annotations"], "minReplicas": spec.get("replicas", 1)}
        pods["model"] = {"storageUri": spec["model"]["uri"], "args": server["args"], "lifecycle": server["lifecycle"]}
        now = self.kserve.deployments.get(deployment)
        if now and not spec["labels"].items() <= now.labels.items():
            self._say(service, False, False, "ReconcileSingleNodeWorkloadError: spec.selector: field is immutable")
            return
        ready = self.kserve.deployed(service, deployment, pods, f"{name}-kserve-workload-svc")
        foreign = self._route(service, there)
        self._say(service, ready, not foreign and self._accepted(f"{name}-kserve-route"), foreign)

    def _route(self, service: Object, there: list[Object]) -> str:
        """Why it is not as it should be; empty if it is."""
        name, route = service["metadata"]["name"], service["spec"]["router"]["route"]
        group = [
            each
            for each in there
            if each["spec"]["router"]["route"]["group"] == route["group"]
            and "deletionTimestamp" not in each["metadata"]
            and (each is service or _routable(each))
        ]
        backends = [
            {
                "kind": "Service",
                "name": _backend(each),
                "port": PORT,
                "weight": each["spec"]["router"]["route"]["weight"],
            }
            for each in sorted(group, key=lambda each: str(each["metadata"]["name"]))
        ]
        spec = route["http"]["spec"]
        (rule,) = spec["rules"]
        called = f"{name}-kserve-route"
        for other in self.server.all("HTTPRoute", self.namespace):
            owners = {each["name"] for each in other["metadata"].get("ownerReferences", [])}
            if other["metadata"]["name"] == called and name not in owners:
                return f"HTTPRouteReconcileError: it is not controlled by {KIND} {name}"
        self.kserve.put(
            {
                "apiVersion": "gateway.networking.k8s.io/v1",
                "kind": "HTTPRoute",
                "metadata": {
                    "name": called,
                    "namespace": self.namespace,
                    "labels": {"app.kubernetes.io/part-of": "llminferenceservice", GROUP_LABEL: route["group"]},
                    "ownerReferences": [{"kind": KIND, "name": name}],
                },
                "spec": spec | {"rules": [rule | {"backendRefs": backends}]},
            }
        )
        return ""

    def _accepted(self, route: str) -> bool:
        found = self.server.find("HTTPRoute", route, self.namespace)
        return bool(found.get("status", {}).get("parents"))

    def _say(self, service: Object, workload: bool, router: bool, why: str) -> None:
        reason, _, message = why.partition(": ")
        conditions = [
            {"type": name, "status": "True" if said else "False", "reason": reason, "message": message}
            | {"lastTransitionTime": "2026-01-01T00:00:00Z"}
            for name, said in (
                ("WorkloadsReady", workload),
                ("RouterReady", router),
                ("Ready", workload and router),
            )
        ]
        status = {
            "conditions": conditions,
            "observedGeneration": service["metadata"]["generation"],
            "workloads": {"primary": {"readyReplicas": int(workload)}},
        }
        self.kserve.say(KIND, service, status)


def _backend(service: Object) -> str:
    return f"{service['metadata']['name']}-kserve-workload-svc"


def _routable(service: Object) -> bool:
    status = service.get("status", {})
    said = {each["type"]: each["status"] for each in status.get("conditions", [])}
    return (
        said.get("RouterReady") == "True" and status.get("workloads", {}).get("primary", {}).get("readyReplicas", 0) > 0
    )


def _at_kserve(name: str) -> Object:
    return {"name": name, "namespace": "kserve"}
