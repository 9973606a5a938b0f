"""The kinds that a cluster of ours has. More are registered with ``KubernetesServer.register``."""

from __future__ import annotations

from typing import Any, Final

from tests.kubernetes.objects import Resource

WORKFLOW_FIELDS: Final = frozenset(
    [
        "activeDeadlineSeconds",
        "affinity",
        "archiveLogs",
        "arguments",
        "artifactGC",
        "artifactRepositoryRef",
        "automountServiceAccountToken",
        "dnsConfig",
        "dnsPolicy",
        "entrypoint",
        "executor",
        "hooks",
        "hostAliases",
        "hostNetwork",
        "imagePullSecrets",
        "metrics",
        "nodeSelector",
        "onExit",
        "parallelism",
        "podDisruptionBudget",
        "podGC",
        "podMetadata",
        "podPriorityClassName",
        "podSpecPatch",
        "priority",
        "retryStrategy",
        "schedulerName",
        "securityContext",
        "serviceAccountName",
        "shutdown",
        "suspend",
        "synchronization",
        "templateDefaults",
        "templates",
        "tolerations",
        "ttlStrategy",
        "volumeClaimGC",
        "volumeClaimTemplates",
        "volumes",
        "workflowMetadata",
        "workflowTemplateRef",
    ]
)
"""The fields of WorkflowSpec in Argo Workflows 4.1."""
LABEL_CHARACTERS: Final = 63


def _workflow(each: dict[str, Any]) -> str:
    spec = each.get("spec")
    if not isinstance(spec, dict):
        return "spec: Required value"
    unknown = sorted(spec.keys() - WORKFLOW_FIELDS)
    if unknown:
        return f"strict decoding error: unknown field spec.{unknown[0]}"
    for parameter in spec.get("arguments", {}).get("parameters", []):
        if not isinstance(parameter.get("value", ""), str):
            return f"spec.arguments.parameters[{parameter.get('name')}].value: must be a string"
    if "workflowTemplateRef" not in spec and "entrypoint" not in spec:
        return "spec.entrypoint: Required value"
    return ""


def _event(each: dict[str, Any]) -> str:
    """What the API's validation of events.k8s.io/v1 asks for."""
    for name in ("eventTime", "reportingController", "reportingInstance", "action", "reason"):
        if not each.get(name):
            return f"{name}: Required value"
    if each.get("type") not in ("Normal", "Warning"):
        return 'type: Invalid value: has invalid value: ""'
    if len(each.get("note", "").encode()) > 1024:
        return "note: can have at most 1024 characters"
    if each.get("regarding", {}).get("namespace") != each["metadata"].get("namespace"):
        return "metadata.namespace: does not match event.namespace"
    return ""


def hpa_name(scaled: dict[str, Any]) -> str:
    """The HorizontalPodAutoscaler that KEDA makes for a ScaledObject."""
    config = scaled.get("spec", {}).get("advanced", {}).get("horizontalPodAutoscalerConfig", {})
    return str(config.get("name") or f"keda-hpa-{scaled['metadata']['name']}")


def _scaled_object(each: dict[str, Any]) -> str:
    """What KEDA 2.21's webhook refuses."""
    for name in (each["metadata"]["name"], hpa_name(each)):
        if len(name) > LABEL_CHARACTERS:
            return f"HPA name {name!r} derived from scaledobject is {len(name)} characters long"
    spec = each.get("spec", {})
    if spec.get("minReplicaCount", 0) > spec.get("maxReplicaCount", 100):
        return "MinReplicaCount must be less than MaxReplicaCount"
    return "" if spec.get("triggers") else "no triggers defined in the ScaledObject/ScaledJob"


CORE: Final = (
    Resource("v1", "Namespace", "namespaces", namespaced=False, status=True),
    Resource("v1", "Node", "nodes", namespaced=False, status=True),
    Resource(
        "v1", "Pod", "pods", status=True, fields=frozenset({"metadata.name", "metadata.namespace", "status.phase"})
    ),
    Resource("v1", "Event", "events", fields=frozenset({"metadata.name", "involvedObject.name"})),
    Resource("v1", "ConfigMap", "configmaps"),
    Resource("v1", "Secret", "secrets"),
    Resource("v1", "Service", "services", status=True),
    Resource("v1", "ServiceAccount", "serviceaccounts"),
    Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims", status=True),
    Resource("v1", "PersistentVolume", "persistentvolumes", namespaced=False, status=True),
    Resource("v1", "ResourceQuota", "resourcequotas", status=True),
    Resource("v1", "LimitRange", "limitranges"),
    Resource("apps/v1", "Deployment", "deployments", status=True),
    Resource("batch/v1", "Job", "jobs", status=True),
    Resource("batch/v1", "CronJob", "cronjobs", status=True),
    Resource("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers", status=True),
    Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets", status=True),
    Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Resource("storage.k8s.io/v1", "StorageClass", "storageclasses", namespaced=False),
    Resource("scheduling.k8s.io/v1", "PriorityClass", "priorityclasses", namespaced=False),
    Resource("rbac.authorization.k8s.io/v1", "Role", "roles"),
    Resource("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
    Resource("rbac.authorization.k8s.io/v1", "ClusterRole", "clusterroles", namespaced=False),
    Resource("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False),
    Resource("events.k8s.io/v1", "Event", "events", check=_event),
    Resource("authentication.k8s.io/v1", "SelfSubjectReview", "selfsubjectreviews", namespaced=False),
    Resource("authorization.k8s.io/v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", namespaced=False),
    Resource("authorization.k8s.io/v1", "SubjectAccessReview", "subjectaccessreviews", namespaced=False),
    Resource(
        "apiextensions.k8s.io/v1",
        "CustomResourceDefinition",
        "customresourcedefinitions",
        namespaced=False,
        status=True,
    ),
)
ARGO: Final = (
    Resource("argoproj.io/v1alpha1", "Workflow", "workflows", check=_workflow),
    Resource("argoproj.io/v1alpha1", "WorkflowTemplate", "workflowtemplates"),
    Resource("argoproj.io/v1alpha1", "CronWorkflow", "cronworkflows"),
    Resource("argoproj.io/v1alpha1", "EventSource", "eventsources", status=True),
    Resource("argoproj.io/v1alpha1", "EventBus", "eventbus", status=True),
    Resource("argoproj.io/v1alpha1", "Sensor", "sensors", status=True),
)
SERVING: Final = (
    Resource("serving.kserve.io/v1beta1", "InferenceService", "inferenceservices", status=True),
    Resource("serving.kserve.io/v1alpha1", "ServingRuntime", "servingruntimes"),
    Resource("serving.kserve.io/v1alpha1", "ClusterServingRuntime", "clusterservingruntimes", namespaced=False),
    Resource("serving.kserve.io/v1alpha1", "LLMInferenceService", "llminferenceservices", status=True),
    Resource("serving.kserve.io/v1alpha1", "LLMInferenceServiceConfig", "llminferenceserviceconfigs", status=True),
    Resource("serving.kserve.io/v1alpha1", "LocalModelNamespaceCache", "localmodelnamespacecaches", status=True),
    Resource("gateway.networking.k8s.io/v1", "Gateway", "gateways", status=True),
    Resource("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes", status=True),
    Resource("aigateway.envoyproxy.io/v1beta1", "AIGatewayRoute", "aigatewayroutes", status=True),
    Resource("aigateway.envoyproxy.io/v1beta1", "AIServiceBackend", "aiservicebackends", status=True),
    Resource("gateway.envoyproxy.io/v1alpha1", "Backend", "backends", status=True),
    Resource("gateway.envoyproxy.io/v1alpha1", "BackendTrafficPolicy", "backendtrafficpolicies", status=True),
    Resource("keda.sh/v1alpha1", "ScaledObject", "scaledobjects", status=True, check=_scaled_object),
    Resource("keda.sh/v1alpha1", "TriggerAuthentication", "triggerauthentications", status=True),
    Resource("monitoring.coreos.com/v1", "PodMonitor", "podmonitors"),
    Resource("monitoring.coreos.com/v1", "ServiceMonitor", "servicemonitors"),
    Resource("monitoring.coreos.com/v1", "PrometheusRule", "prometheusrules"),
)
RESOURCES: Final = (*CORE, *ARGO, *SERVING)
