"""The KServe objects that a rollout applies, as plain manifests.

A predictor's labels are copied to its pods: ``RELEASE`` selects the pods whose counters are read, and ``REVISION``
shows whether a pod runs the present predictor. An InferenceService's annotations are copied, too, and restart the pods
when they change; they therefore hold nothing that changes.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any, Final, Literal

from scoring.units import GIB, MIB
from stages.parts.base.errors import ConfigError
from stages.parts.base.serving_settings import AskedServing, Serving
from stages.parts.base.store import ModelStore, digest_of, directory_name
from stages.parts.endpoint.endpoint import API_KEY_VARIABLE
from stages.parts.endpoint.offered import OFFERED
from stages.parts.releases.pinned import MeasuredWith, pinned, weights_bytes
from stages.parts.releases.release import METRICS
from stages.parts.vllm.arguments import CPU_KV_CACHE_MIB, GPU_ARGUMENT, TELLS_TOKENS, engine_arguments
from stages.parts.vllm.host import SERVER_BYTES, START_S, gpu_memory_bytes, shared_bytes
from stages.rollout.kserve.settings import KServe

Object = dict[str, Any]
Mode = Literal["standard", "knative", "route", "llm"]

ISVC: Final = "serving.kserve.io/v1beta1"
RUNTIME: Final = "slipway-vllm"
"""The ServingRuntime in ``manifests/kserve``."""
SHARED: Final = "shm"
"""The volume at ``/dev/shm`` that ``RUNTIME`` mounts. KServe merges volumes by their names."""
CONTAINER: Final = "kserve-container"
ENDPOINT: Final = "slipway/endpoint"
RELEASE: Final = "slipway/release"
REVISION: Final = "slipway/revision"
"""The predictor's revision: changes when its pods have to be restarted."""
MODEL: Final = "slipway/model"
SAYS_MODE: Final = "slipway/mode"
"""On the HTTPRoute of mode ``route``."""
PART_OF: Final = {"app.kubernetes.io/part-of": "slipway"}
ISVC_LABEL: Final = "serving.kserve.io/inferenceservice"
DEPLOYMENT_MODE: Final = "serving.kserve.io/deploymentMode"
DEPLOYMENT_MODES: Final[dict[str, str]] = {
    "Standard": "standard",
    "RawDeployment": "standard",
    "Knative": "knative",
    "Serverless": "knative",
}
"""The mode for each name of KServe's deployment modes, new ones and old ones."""
AUTOSCALER: Final = "serving.kserve.io/autoscalerClass"
CLUSTER_LOCAL: Final = {"networking.kserve.io/visibility": "cluster-local"}
API_SECRET: Final = "slipway-api"  # noqa: S105
API_SECRET_KEY: Final = "key"  # noqa: S105
PORT: Final = 8080
USER: Final = 8737
"""The owner of the files in the store; see ``pipeline/workflow/pods.py``."""
LLM_PORT: Final = 8000
"""KServe fixes it for a LLMInferenceService."""
NAME_CHARACTERS: Final = 28
"""``isvc.<endpoint>-<predictor>-predictor`` is a label's value."""
HASH_CHARACTERS: Final = 6
LEAST_CHARACTERS: Final = HASH_CHARACTERS + 2
"""The shortest name of an endpoint: a letter, a hyphen and the digest."""
LONGEST_PREDICTOR: Final = f"r9999-{'':0>{HASH_CHARACTERS}}"
LABEL_CHARACTERS: Final = 63
"""The most in a label of DNS and in a label's value."""
KNATIVE_TIMEOUT_S: Final = 600
KEEP_ALIVE_S: Final = 3700
"""Longer than a gateway keeps an idle connection (Envoy: one hour): a request that is sent as the server closes its
connection fails."""
PRE_STOP_S: Final = 10
"""Until no proxy sends it new requests: a pod is told to stop while it is still being removed from the Services."""
STOP_MARGIN_S: Final = 15
PROBE_PERIOD_S: Final = 10
ROLLOUT_ONLY_ON_STABLE: Final = ("maxReplicas", "scaleMetric", "scaleTarget", "containerConcurrency", "timeout")
"""Fields that KServe refuses on a canary, or takes from the stable predictor."""


@dataclass(frozen=True)
class KServeEndpoint:
    """One model's endpoint on a cluster."""

    store: ModelStore
    serving: AskedServing
    settings: KServe
    namespace: str
    called: str = ""
    """What it is called where it serves already: a version that named it otherwise may have made it."""

    @property
    def name(self) -> str:
        return self.called or endpoint_name(self.store.model, self.namespace)

    def serving_of(self, release: str) -> Serving:
        """The settings, with what the release was measured with where they leave it open, also the dtype: the pod that
        renders this may run on another processor than the one that serves. What was measured on a processor says
        nothing of a GPU's dtype."""
        serving = pinned(self.store, self.serving, release)
        measured = MeasuredWith.read(self.store.releases / release / METRICS) if serving.dtype == "auto" else None
        engine = measured.engine if measured else None
        if engine is None or (self.settings.gpu and GPU_ARGUMENT not in engine.arguments):
            return serving
        return serving.model_copy(update={"dtype": engine.dtype})

    def storage_uri(self, release: str) -> str:
        """The release's own directory, which never changes, unlike the ``production`` link."""
        return f"pvc://{self.settings.claim}/{directory_name(self.store.model)}/releases/{release}"


def endpoint_name(model: str, namespace: str) -> str:
    """The InferenceService's name: the model's in DNS letters, with a digest, since two names may become alike.

    The longer the *namespace*'s name, the shorter: mode ``standard`` has a host for each release, too.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    slug = slug if slug[:1].isalpha() else f"m-{slug}"
    digest = hashlib.sha256(model.encode()).hexdigest()[:HASH_CHARACTERS]
    room = room_for_name(f"-{LONGEST_PREDICTOR}", namespace)
    return _shortened(slug, digest, max(LEAST_CHARACTERS, min(NAME_CHARACTERS, room)))


def predictor_name(release: str) -> str:
    """``0002-awq-<digest>`` → ``r2-<its first six digits>``: a part of its Deployment's and its Service's name."""
    return f"r{int(release.partition('-')[0])}-{release.rpartition('-')[2][:HASH_CHARACTERS]}"


def route_name(endpoint: KServeEndpoint) -> str:
    """The HTTPRoute of mode ``route``: never the name of one that KServe makes for an InferenceService."""
    return f"{endpoint.name}-route"


def route_service(endpoint: KServeEndpoint, release: str) -> str:
    """A release's InferenceService in mode ``route``. KServe calls its Deployment ``<this>-predictor``, which no other
    mode's is called, and its host ``<this>-predictor-<namespace>``, which is one label of DNS.

    Raises:
        ConfigError: the namespace's name leaves no room for the endpoint's.
    """
    rest = f"-{predictor_name(release)}-route"
    room = room_for_name(rest, endpoint.namespace)
    if room < LEAST_CHARACTERS:
        raise ConfigError(
            f"the namespace {endpoint.namespace} is too long for the host names that KServe makes of it",
            hint=f"one of at most {len(endpoint.namespace) + room - LEAST_CHARACTERS} characters has room",
        )
    return shortened(endpoint, room) + rest


def room_for_name(rest: str, namespace: str) -> int:
    """The characters left for ``<name>`` in ``<name><rest>-predictor-<namespace>``, the host of a release's Deployment
    by KServe's own template, which is one label of DNS."""
    return LABEL_CHARACTERS - len(f"{rest}-predictor-{namespace}")


def shortened(endpoint: KServeEndpoint, characters: int) -> str:
    """The endpoint's name in at most so many characters."""
    slug, _, digest = endpoint.name.rpartition("-")
    return _shortened(slug, digest, characters)


def _shortened(slug: str, digest: str, characters: int) -> str:
    return f"{slug[: characters - len(digest) - 1].strip('-')}-{digest}"


def predictor(endpoint: KServeEndpoint, release: str, mode: Mode) -> Object:
    """``spec.predictor`` of the stable release.

    Raises:
        ConfigError: an argument for vLLM can't be passed through KServe.
    """
    pods = _pods(endpoint, release, mode)
    labels = {ENDPOINT: endpoint.name, RELEASE: release, REVISION: digest_of(pods)[:12]}
    pods["labels"] = labels
    scaling, timeout_s = endpoint.settings.scaling, endpoint.settings.timeout_s
    whole = pods | {"minReplicas": scaling.minimum, "maxReplicas": scaling.maximum, "timeout": timeout_s}
    if mode == "knative":
        whole |= {"timeout": min(timeout_s, KNATIVE_TIMEOUT_S), "scaleMetric": "concurrency"}
        whole |= {"scaleTarget": scaling.concurrency, "annotations": _knative_annotations(endpoint, release)}
    if mode == "standard":
        whole["name"] = predictor_name(release)
    return whole


def replicas(predictor: Object) -> int:
    return int(predictor.get("minReplicas", 1))


def with_replicas(predictor: Object, more: int) -> Object:
    """The predictor with *more* replicas; taken away only where they were added: a rollout of an older version added
    none."""
    now = replicas(predictor)
    if now + more < 1:
        return predictor
    return predictor | {key: int(predictor[key]) + more for key in ("minReplicas", "maxReplicas") if key in predictor}


def canary(stable: Object, percent: int) -> Object:
    """An entry of ``spec.canary``, made from its release's ``predictor``."""
    kept = {key: value for key, value in stable.items() if key not in ROLLOUT_ONLY_ON_STABLE}
    return {"trafficPercent": percent, "predictor": kept}


def inference_service(
    endpoint: KServeEndpoint, stable: Object, mode: Mode, *, canaries: list[Object] | None = None, name: str = ""
) -> Object:
    """The whole InferenceService.

    Args:
        stable: its ``spec.predictor``.
        name: in mode ``route``, one of the two behind the rollout's own HTTPRoute.
    """
    annotations = {MODEL: endpoint.store.model}
    labels = dict(PART_OF)
    if mode == "knative":
        # The old names of the modes, here and below: every version understands them.
        annotations |= {DEPLOYMENT_MODE: "Serverless", "serving.kserve.io/enable-tag-routing": "true"}
    else:
        # Versions with spec.canary need the new name.
        annotations[DEPLOYMENT_MODE] = "Standard" if mode == "standard" else "RawDeployment"
        # With "keda" a canary would get a ScaledObject without triggers, which also blocks the stable release's.
        annotations[AUTOSCALER] = "external" if endpoint.settings.prometheus else "none"
    if mode == "route":
        labels |= CLUSTER_LOCAL | {ENDPOINT: endpoint.name}
    spec: Object = {"predictor": stable}
    if mode == "standard":
        spec["canary"] = canaries or []
    return {
        "apiVersion": ISVC,
        "kind": "InferenceService",
        "metadata": {
            "name": name or endpoint.name,
            "namespace": endpoint.namespace,
            "labels": labels,
            "annotations": annotations,
        },
        "spec": spec,
    }


def http_route(
    endpoint: KServeEndpoint, gateway: str, hostname: str, weights: list[tuple[str, int, int]], *, name: str = ""
) -> Object:
    """The route of clients in mode ``route``; the gateway answers 404 for what it does not match.

    Args:
        weights: (Service, port, percent), the stable release first.
        name: of a route that older versions named otherwise.
    """
    metadata: Object = {"name": name or route_name(endpoint), "namespace": endpoint.namespace, "labels": dict(PART_OF)}
    metadata["annotations"] = {MODEL: endpoint.store.model, SAYS_MODE: "route"}
    backends: list[Object] = [
        {"group": "", "kind": "Service", "name": service, "port": port, "weight": percent}
        for service, port, percent in weights
    ]
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": metadata,
        "spec": route_spec(endpoint, gateway, hostname, backends),
    }


def route_spec(endpoint: KServeEndpoint, gateway: str, hostname: str, backends: list[Object]) -> Object:
    """What clients reach at *gateway* (``namespace/name``), and where it leads."""
    namespace, _, called = gateway.rpartition("/")
    parent = {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": called}
    rule = {
        "matches": [{"path": {"type": "Exact", "value": path}, "method": method} for path, method in OFFERED.items()],
        "backendRefs": backends,
        "timeouts": {"request": f"{endpoint.settings.timeout_s}s"},
    }
    return {
        "parentRefs": [parent | ({"namespace": namespace} if namespace else {})],
        "hostnames": [hostname],
        "rules": [rule],
    }


def disruption_budget(endpoint: KServeEndpoint) -> Object:
    """Nodes are drained one replica at a time. With ``minAvailable`` and one replica, no node could be drained."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": endpoint.name, "namespace": endpoint.namespace, "labels": dict(PART_OF)},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {ENDPOINT: endpoint.name}}},
    }


def startup_s(endpoint: KServeEndpoint, release: str) -> int:
    """The time that a replica may take from its start to its first answer."""
    return endpoint.serving_of(release).startup_timeout_s


def _pods(endpoint: KServeEndpoint, release: str, mode: Mode) -> Object:
    """Everything that defines its pods except labels: a difference here restarts them."""
    model: Object = {
        "name": "",  # without it KServe refuses a canary
        "modelFormat": {"name": "vLLM"},
        "runtime": RUNTIME,
        "storageUri": endpoint.storage_uri(release),
    }
    if "@" not in (image := endpoint.settings.image) and (tag := re.search(r":([\w.-]+)$", image)):
        # Without it KServe uses the image's "-cpu" variant where no GPU is requested.
        model["runtimeVersion"] = tag[1]
    return pod_fields(endpoint, release, mode) | {"model": model | container(endpoint, release, mode)}


def pod_fields(endpoint: KServeEndpoint, release: str, mode: Mode) -> Object:
    """What defines a release's pods beside the container that serves."""
    settings = endpoint.settings
    gpus = endpoint.serving_of(release).tensor_parallel_size if settings.gpu else 0
    pods: Object = {"automountServiceAccountToken": False}
    # In place of KServe's or the runtime's own: GPUs of one server talk through it, the more of them the more.
    shared = {"medium": "Memory", "sizeLimit": f"{math.ceil(shared_bytes(gpus) / GIB)}Gi"}
    pods["volumes"] = [{"name": SHARED, "emptyDir": shared}]
    if settings.node_selector:
        pods["nodeSelector"] = dict(settings.node_selector)
    if settings.tolerations:
        pods["tolerations"] = [toleration.model_dump(exclude_none=True) for toleration in settings.tolerations]
    if mode != "knative":  # Knative refuses these fields, and drains in its own way
        pods["terminationGracePeriodSeconds"] = PRE_STOP_S + settings.drain_s + STOP_MARGIN_S
        pods["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {ENDPOINT: endpoint.name, RELEASE: release}},
            }
        ]
    return pods


def container(endpoint: KServeEndpoint, release: str, mode: Mode) -> Object:
    """What defines the container that serves, in any mode.

    Raises:
        ConfigError: an argument for vLLM can't be passed through KServe.
    """
    settings, port = endpoint.settings, LLM_PORT if mode == "llm" else PORT
    memory = f"{math.ceil(_memory_bytes(endpoint, release) / GIB)}Gi" if settings.memory == "auto" else settings.memory
    resources: Object = {"requests": {"cpu": settings.cpu, "memory": memory}, "limits": {"memory": memory}}
    if settings.gpu:
        count = str(endpoint.serving_of(release).tensor_parallel_size)
        resources["requests"][settings.gpu] = resources["limits"][settings.gpu] = count
    # Unlike KServe's own runtime, not /v1/models: with an API key it answers 401.
    health = {"httpGet": {"path": "/health", "port": port}, "periodSeconds": PROBE_PERIOD_S, "timeoutSeconds": 5}
    made: Object = {
        "image": settings.image,
        "args": _arguments(endpoint, release, port),
        "env": [_api_key(), {"name": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "value": str(KEEP_ALIVE_S)}],
        "resources": resources,
        "startupProbe": health | {"failureThreshold": math.ceil(startup_s(endpoint, release) / PROBE_PERIOD_S)},
        "readinessProbe": health | {"failureThreshold": 2},
        "livenessProbe": health | {"failureThreshold": 6},
    }
    if mode != "knative":
        made["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_S)]}}}
    return made


def _memory_bytes(endpoint: KServeEndpoint, release: str) -> int:
    """What its pod needs of the node's memory, ``/dev/shm`` included."""
    serving, weights = endpoint.serving_of(release), weights_bytes(endpoint.store, release)
    if endpoint.settings.gpu:
        return gpu_memory_bytes(weights, serving.tensor_parallel_size)
    wide = 2 if serving.dtype == "float32" else 1
    return weights * wide + (serving.kv_cache_mib or CPU_KV_CACHE_MIB) * MIB + SERVER_BYTES + shared_bytes(0)


def _arguments(endpoint: KServeEndpoint, release: str, port: int) -> list[str]:
    """The arguments that it was measured with, its address, and a fingerprint that tells clients the release: a gateway
    does not tell them."""
    on_gpu = endpoint.settings.gpu is not None
    measured = engine_arguments(endpoint.serving_of(release), endpoint.store.releases / release, on_gpu=on_gpu)
    template = [each for each in measured if "{{" in each]
    if template:
        raise ConfigError(
            f"serving.extra_arguments: KServe would treat {template[0]!r} as a template of its own",
            hint="put the text with '{{' into a file of the model, such as chat_template.jinja",
        )
    address = ["--host", "0.0.0.0", "--port", str(port)]  # noqa: S104
    draining = ["--shutdown-timeout", str(endpoint.settings.drain_s)]
    quiet = ["--disable-access-log-for-endpoints", "/health,/metrics"]
    named = ["--fingerprint-mode", "custom", "--fingerprint-value", release]
    told = [*draining, *quiet, *named, *TELLS_TOKENS]
    return ["--served-model-name", endpoint.store.model, *address, *told, *measured]


def _api_key() -> Object:
    """From the same Secret as the rollout's own ``SLIPWAY_API_KEY``; without the Secret the endpoint needs no key."""
    source = {"name": API_SECRET, "key": API_SECRET_KEY, "optional": True}
    return {"name": API_KEY_VARIABLE.replace("SLIPWAY", "VLLM"), "valueFrom": {"secretKeyRef": source}}


def _knative_annotations(endpoint: KServeEndpoint, release: str) -> dict[str, str]:
    scaling = endpoint.settings.scaling
    return {
        "autoscaling.knative.dev/window": f"{max(6, scaling.scale_up_window_s)}s",  # Knative's minimum is 6 s
        "autoscaling.knative.dev/scale-down-delay": f"{scaling.scale_down_delay_s}s",
        "autoscaling.knative.dev/target-utilization-percentage": "100",
        "autoscaling.knative.dev/initial-scale": str(scaling.minimum),
        "serving.knative.dev/progress-deadline": f"{startup_s(endpoint, release) + START_S}s",
    }
