"""What the KServe objects of all modes have in common, as plain manifests.

A predictor's labels are copied to its pods: ``RELEASE`` selects the pods whose counters are read, and ``REVISION``
shows whether a pod runs the present predictor. An InferenceService's annotations are copied, too, and restart the pods
when they change; they therefore hold nothing that changes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scoring.units import GIB, MIB
from stages.parts.base.errors import ConfigError
from stages.parts.base.files import digest_of
from stages.parts.base.serving_settings import AskedServing, Serving
from stages.parts.base.settings import read_yaml
from stages.parts.base.store import ModelStore, directory_name
from stages.parts.base.templates import rendered
from stages.parts.cluster.kinds import Kind, Object
from stages.parts.cluster.nodes import quantity
from stages.parts.endpoint.routing import OFFERED
from stages.parts.model.adapter import FOLDER, adapters_in
from stages.parts.releases.pinned import MeasuredWith, pinned, weights_bytes
from stages.parts.releases.release import METRICS
from stages.parts.vllm.arguments import (
    CPU_KV_CACHE_MIB,
    FOR_CLIENTS,
    GPU_ARGUMENT,
    ONE_THREAD,
    engine_arguments,
    lora_arguments,
    threads,
)
from stages.parts.vllm.sizing import SERVER_BYTES, gpu_memory_bytes, shared_bytes
from stages.rollout.kserve.modes import AUTO
from stages.rollout.kserve.scaler import NOTHING, RUNTIME, Scaler
from stages.rollout.kserve.settings import VERSION, KServe

ISVCS: Final = Kind("serving.kserve.io/v1beta1", "InferenceService", "inferenceservices")
BUDGETS: Final = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
RUNTIME_FILE: Final = Path(__file__).parents[3] / "manifests" / "kserve" / "serving-runtime.yaml"
"""Says what is the same in the container of each release."""
TEMPLATES: Final = Path(__file__).with_name("templates")
ENDPOINT: Final = "slipway/endpoint"
RELEASE: Final = "slipway/release"
REVISION: Final = "slipway/revision"
"""The predictor's revision: changes when its pods have to be restarted."""
MODEL: Final = "slipway/model"
LATENCY_TARGETS: Final = {"ttft": "slipway/ttft-within-s", "tpot": "slipway/tpot-within-s"}
"""Annotations of pods, which become labels of their series: the bucket of vLLM's histogram within which the release has
to answer, by the workload that it was measured with. Alerts count what is beyond."""
BUCKETS_S: Final = {
    "ttft": (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    "tpot": (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
}
"""vLLM's, which it has for both (``vllm/v1/metrics/buckets.py``)."""
PART_OF: Final = {"app.kubernetes.io/part-of": "slipway"}
SELECTOR: Final = "app.kubernetes.io/part-of=slipway"
ISVC_LABEL: Final = "serving.kserve.io/inferenceservice"
DEPLOYMENT_MODE: Final = "serving.kserve.io/deploymentMode"
AUTOSCALER: Final = "serving.kserve.io/autoscalerClass"
API_SECRET: Final = "slipway-api"  # noqa: S105
API_SECRET_KEY: Final = "key"  # noqa: S105
SIGNING: Final = "slipway-signing"
"""The ConfigMap that ``slipway install`` makes of ``serving.verification_key``."""
TRUSTED_KEY: Final = Path("/etc/slipway/signing/signing.pub")
"""Where the verifier has it; the file's name is the ConfigMap's key."""
VERIFIER: Final = "verify"
"""The init container that verifies a release, and its volume."""
MOUNT: Final = Path("/mnt/models")
"""Where KServe puts a release, as ``RUNTIME`` serves it."""
PORT: Final = 8080
USER: Final = 8737
"""The owner of the files in the store; see ``pipeline/workflow/pods.py``."""
NAME_CHARACTERS: Final = 28
"""``isvc.<endpoint>-<predictor>-predictor`` is a label's value."""
HASH_CHARACTERS: Final = 6
LEAST_CHARACTERS: Final = HASH_CHARACTERS + 2
"""The shortest name of an endpoint: a letter, a hyphen and the digest."""
LONGEST_PREDICTOR: Final = f"r9999-{'':0>{HASH_CHARACTERS}}"
LABEL_CHARACTERS: Final = 63
"""The most in a label of DNS and in a label's value."""
PRE_STOP_S: Final = 10
"""Until no proxy sends it new requests: a pod is told to stop while it is still being removed from the Services."""
STOP_MARGIN_S: Final = 15


@dataclass(frozen=True)
class KServeEndpoint:
    store: ModelStore
    serving: AskedServing
    settings: KServe
    namespace: str
    found: Scaler = NOTHING
    """What scales on the cluster."""

    @property
    def scaler(self) -> Scaler:
        """What scales its releases. Without a cluster, only what the settings name is known."""
        address = self.settings.prometheus
        return self.found if address == AUTO else Scaler(address or "")

    @property
    def name(self) -> str:
        return endpoint_name(self.store.model, self.namespace)

    def serving_of(self, release: str) -> Serving:
        """Fill what the settings leave open with what the release was measured with, also the dtype: the pod that
        renders this may run on another processor than the one that serves. What was measured on a processor says
        nothing of a GPU's dtype."""
        serving = pinned(self.store, self.serving, release)
        measured = MeasuredWith.read(self.store.releases / release / METRICS) if serving.dtype == "auto" else None
        engine = measured.engine if measured else None
        if engine is None or (self.settings.gpu and GPU_ARGUMENT not in engine.arguments):
            return serving
        return serving.model_copy(update={"dtype": engine.dtype})

    def image_of(self, release: str) -> str:
        """Name the image with the version of vLLM that the release was measured on."""
        return self.settings.image.replace("{version}", self.serving_of(release).engine_version or VERSION)

    def storage_uri(self, release: str) -> str:
        """Name the release's own directory, which never changes, unlike the ``production`` link."""
        return f"pvc://{self.settings.claim}/{directory_name(self.store.model)}/releases/{release}"


def endpoint_name(model: str, namespace: str) -> str:
    """Name the InferenceService: the model's name in DNS letters, with a digest, since two names may become alike. The
    longer the *namespace*'s name, the shorter: mode ``standard`` has a host for each release, too."""
    slug = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")
    slug = slug if slug[:1].isalpha() else f"m-{slug}"
    digest = hashlib.sha256(model.encode()).hexdigest()[:HASH_CHARACTERS]
    room = room_for_name(f"-{LONGEST_PREDICTOR}", namespace)
    return shortened(f"{slug}-{digest}", max(LEAST_CHARACTERS, min(NAME_CHARACTERS, room)))


def predictor_name(release: str) -> str:
    """``0002-awq-<digest>`` → ``r2-<its first six digits>``: a part of its Deployment's and its Service's name."""
    return f"r{int(release.partition('-')[0])}-{release.rpartition('-')[2][:HASH_CHARACTERS]}"


def room_for_name(suffix: str, namespace: str) -> int:
    """Count the characters left for ``<name>`` in ``<name><suffix>-predictor-<namespace>``, the host of a release's
    Deployment by KServe's own template, which is one label of DNS."""
    return LABEL_CHARACTERS - len(f"{suffix}-predictor-{namespace}")


def shortened(name: str, characters: int) -> str:
    """Shorten an endpoint's name to at most that many characters; its digest stays."""
    slug, _, digest = name.rpartition("-")
    return f"{slug[: characters - len(digest) - 1].strip('-')}-{digest}"


def predictor(endpoint: KServeEndpoint, release: str, *, drained: bool = True) -> Object:
    """Build ``spec.predictor`` of the stable release; *drained* as for ``pod_fields``. Raises as ``container``."""
    model: Object = {
        "name": "",  # without it KServe refuses a canary
        "modelFormat": {"name": "vLLM"},
        "runtime": RUNTIME,
        "storageUri": endpoint.storage_uri(release),
    }
    if "@" not in (image := endpoint.image_of(release)) and (tag := re.search(r":([\w.-]+)$", image)):
        # Without it KServe uses the image's "-cpu" variant where no GPU is requested.
        model["runtimeVersion"] = tag[1]
    pods = pod_fields(endpoint, release, drained=drained)
    pods["model"] = model | container(endpoint, release, drained=drained)
    return pods | {
        "labels": {ENDPOINT: endpoint.name, RELEASE: release, REVISION: digest_of(pods)[:12]},
        "minReplicas": max(1, endpoint.settings.scaling.minimum),
        "maxReplicas": endpoint.settings.scaling.maximum,
        "timeout": endpoint.settings.timeout_s,
    }


def release_of(predictor: Object) -> str | None:
    release: str | None = predictor.get("labels", {}).get(RELEASE)
    return release


def revision_of(predictor: Object) -> str:
    return str(predictor.get("labels", {}).get(REVISION, ""))


def condition(body: Object, name: str) -> bool:
    """Tell whether a condition of a pod or a service holds. An InferenceService's ``observedGeneration`` is a child
    object's, and means nothing here."""
    conditions = body.get("status", {}).get("conditions", [])
    return any(entry["type"] == name and entry["status"] == "True" for entry in conditions)


def manifest(
    kind: Kind,
    endpoint: KServeEndpoint,
    spec: Object,
    *,
    name: str = "",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
) -> Object:
    """Build an object in the endpoint's namespace, with these *labels* beside ``PART_OF``. It is called like the
    endpoint unless it has a *name*. One with *annotations* names the model in another one."""
    metadata: Object = {
        "name": name or endpoint.name,
        "namespace": endpoint.namespace,
        "labels": PART_OF | (labels or {}),
    }
    if annotations is not None:
        metadata["annotations"] = {MODEL: endpoint.store.model} | annotations
    return {"apiVersion": kind.api_version, "kind": kind.name, "metadata": metadata, "spec": spec}


def autoscaler_class(endpoint: KServeEndpoint) -> dict[str, str]:
    """Build the annotation that keeps KServe's own autoscalers away. With "keda" a canary would get a ScaledObject
    without triggers, which also blocks the stable release's."""
    return {AUTOSCALER: "external" if endpoint.scaler.name else "none"}


def gateway_reference(gateway: str) -> dict[str, str]:
    """Split ``namespace/name``, or a name alone, as ``parentRefs`` of a route have it."""
    namespace, _, name = gateway.rpartition("/")
    return {"name": name} | ({"namespace": namespace} if namespace else {})


def route_spec(endpoint: KServeEndpoint, gateway: str, hostname: str, backends: list[Object]) -> Object:
    """Build the specification of an HTTPRoute: what clients reach at *gateway* (``namespace/name``), and where it
    leads."""
    rule = {
        "matches": [{"path": {"type": "Exact", "value": path}, "method": method} for path, method in OFFERED.items()],
        "backendRefs": backends,
        "timeouts": {"request": f"{endpoint.settings.timeout_s}s"},
    }
    return {
        "parentRefs": [{"group": "gateway.networking.k8s.io", "kind": "Gateway"} | gateway_reference(gateway)],
        "hostnames": [hostname],
        "rules": [rule],
    }


def disruption_budget(endpoint: KServeEndpoint) -> Object:
    """Nodes are drained one replica at a time. With ``minAvailable`` and one replica, no node could be drained."""
    return manifest(BUDGETS, endpoint, {"maxUnavailable": 1, "selector": {"matchLabels": {ENDPOINT: endpoint.name}}})


def pod_fields(endpoint: KServeEndpoint, release: str, *, drained: bool = True) -> Object:
    """Build what defines a release's pods beside the container that serves. If they are not *drained*, Knative stops
    and spreads them, and refuses the fields for it."""
    settings = endpoint.settings
    gpus = endpoint.serving_of(release).tensor_parallel_size if settings.gpu else 0
    tolerations = settings.tolerations + (settings.spot.tolerations if settings.spot else ())
    (pods,) = rendered(
        TEMPLATES / "pods.yaml.jinja",
        endpoint=endpoint,
        settings=settings,
        release=release,
        drained=drained,
        shared_gib=math.ceil(shared_bytes(gpus) / GIB),
        subpath=f"{directory_name(endpoint.store.model)}/releases/{release}",
        policy=json.dumps({"signing": endpoint.serving.signing, "verification_key": str(TRUSTED_KEY)}),
        signing=SIGNING,
        key_folder=str(TRUSTED_KEY.parent),
        security_context=runtime()["securityContext"],
        slo=MeasuredWith.of(endpoint.store.releases / release).slo,
        latency_targets=LATENCY_TARGETS,
        buckets_s=BUCKETS_S,
        tolerations=[toleration.model_dump(exclude_none=True) for toleration in tolerations],
        grace_s=PRE_STOP_S + drain_s(settings) + STOP_MARGIN_S,
    )
    return dict(pods)


@functools.cache
def runtime() -> Object:
    """Read the container of the ServingRuntime."""
    (container,) = read_yaml(RUNTIME_FILE)["spec"]["containers"]
    return dict(container)


def drain_s(settings: KServe) -> int:
    """Compute the time for requests in flight when a replica stops, of which the notice of a spot node leaves less."""
    if settings.spot is None:
        return settings.drain_s
    return max(1, min(settings.drain_s, settings.spot.notice_s - PRE_STOP_S - STOP_MARGIN_S))


def container(endpoint: KServeEndpoint, release: str, *, port: int = PORT, drained: bool = True) -> Object:
    """Build what defines the container that serves; *drained* as for ``pod_fields``. Raises ConfigError if an argument
    for vLLM can't be passed through KServe."""
    settings, serving = endpoint.settings, endpoint.serving_of(release)
    memory = f"{math.ceil(_memory_bytes(endpoint, release) / GIB)}Gi" if settings.memory == "auto" else settings.memory
    gpus = {settings.gpu: str(serving.tensor_parallel_size)} if settings.gpu else {}
    # vLLM itself would bind all servers of a node to the same core.
    small = not gpus and serving.tensor_parallel_size == 1 and quantity(settings.cpu) <= 1
    variables, one_process = threads(ONE_THREAD if small else "")
    (server,) = rendered(
        TEMPLATES / "server.yaml.jinja",
        image=endpoint.image_of(release),
        arguments=[*one_process, *_arguments(endpoint, release, port)],
        variables=variables,
        port=port,
        secret=API_SECRET,
        secret_key=API_SECRET_KEY,
        cpu=settings.cpu,
        limits={"memory": memory} | gpus,
        startup_timeout_s=serving.startup_timeout_s,
        drained=drained,
        pre_stop_s=PRE_STOP_S,
    )
    return dict(server)


def _memory_bytes(endpoint: KServeEndpoint, release: str) -> int:
    """Compute what its pod needs of the node's memory, ``/dev/shm`` included."""
    serving, weights = endpoint.serving_of(release), weights_bytes(endpoint.store, release)
    if endpoint.settings.gpu:
        return gpu_memory_bytes(weights, serving.tensor_parallel_size)
    wide = 2 if serving.dtype == "float32" else 1
    return weights * wide + (serving.kv_cache_mib or CPU_KV_CACHE_MIB) * MIB + SERVER_BYTES + shared_bytes(0)


def _arguments(endpoint: KServeEndpoint, release: str, port: int) -> list[str]:
    """List the arguments: those it was measured with, its address, and a fingerprint that tells clients the release: a
    gateway does not tell them."""
    on_gpu = endpoint.settings.gpu is not None
    measured = engine_arguments(endpoint.serving_of(release), endpoint.store.releases / release, on_gpu=on_gpu)
    if templates := [argument for argument in measured if "{{" in argument]:
        text = f"serving.extra_arguments: KServe would treat {templates[0]!r} as a template of its own"
        raise ConfigError(text, hint="put the text with '{{' into a file of the model, such as chat_template.jinja")
    address = ["--host", "0.0.0.0", "--port", str(port)]  # noqa: S104
    draining = ["--shutdown-timeout", str(drain_s(endpoint.settings))]
    quiet = ["--disable-access-log-for-endpoints", "/health,/metrics"]
    named = ["--fingerprint-mode", "custom", "--fingerprint-value", release]
    adapters = lora_arguments(adapters_in(endpoint.store.releases / release), MOUNT / FOLDER)
    served = ["--served-model-name", endpoint.store.model, *adapters, "--middleware", "slipway_door.Door"]
    return [*served, *address, *draining, *quiet, *named, *FOR_CLIENTS, *measured]
