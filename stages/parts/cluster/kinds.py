"""The kinds of Kubernetes objects that we read and write, and their paths in the API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Object: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    api_version: str
    name: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str | None, name: str = "") -> str:
        """Build the path of one object, or of all objects of this kind: in all namespaces if *namespace* is None."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        place = f"/namespaces/{namespace}" if self.namespaced and namespace is not None else ""
        return f"{root}{place}/{self.plural}" + (f"/{name}" if name else "")


PODS: Final = Kind("v1", "Pod", "pods")
SERVICES: Final = Kind("v1", "Service", "services")
CONFIG_MAPS: Final = Kind("v1", "ConfigMap", "configmaps")
SECRETS: Final = Kind("v1", "Secret", "secrets")
CLAIMS: Final = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
DEPLOYMENTS: Final = Kind("apps/v1", "Deployment", "deployments")
NODES: Final = Kind("v1", "Node", "nodes", namespaced=False)
QUOTAS: Final = Kind("v1", "ResourceQuota", "resourcequotas")
NAMESPACES: Final = Kind("v1", "Namespace", "namespaces", namespaced=False)
DEFINITIONS: Final = Kind("apiextensions.k8s.io/v1", "CustomResourceDefinition", "customresourcedefinitions", False)
REVIEWS: Final = Kind("authorization.k8s.io/v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", False)
ACCOUNT_REVIEWS: Final = Kind("authorization.k8s.io/v1", "SubjectAccessReview", "subjectaccessreviews", False)
"""Asks what another account may."""
USER_REVIEWS: Final = Kind("authentication.k8s.io/v1", "SelfSubjectReview", "selfsubjectreviews", namespaced=False)
EVENTS: Final = Kind("events.k8s.io/v1", "Event", "events")
WORKFLOWS: Final = Kind("argoproj.io/v1alpha1", "Workflow", "workflows")
TEMPLATES: Final = Kind("argoproj.io/v1alpha1", "WorkflowTemplate", "workflowtemplates")
PROVIDERS: Final = {
    "argoproj.io": "Argo Workflows 3.6 or newer, and Argo Events for its triggers",
    "serving.kserve.io": "KServe 0.21 or newer",
    "serving.knative.dev": "Knative Serving",
    "gateway.networking.k8s.io": "the Gateway API's CRDs",
    "aigateway.envoyproxy.io": "Envoy AI Gateway 1.0 or newer",
    "gateway.envoyproxy.io": "Envoy Gateway 1.9 or newer",
    "inference.networking.k8s.io": "the Gateway API Inference Extension's CRDs, and a gateway that knows them",
    "cert-manager.io": "cert-manager",
    "keda.sh": "KEDA",
    "monitoring.coreos.com": "prometheus-operator",
}
"""The software that installs each API group."""
