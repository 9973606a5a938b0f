"""The objects of mode ``llm``: a LLMInferenceService for each release, all in one routing group with weights.

KServe merges each with its own presets: lists by the keys that Kubernetes merges them by (containers, volumes and
variables by name, mounts by path), other lists as a whole. What the ServingRuntime says in the other modes is copied
from it, so that nothing of a release's container is the preset's choice. KServe makes a LLMInferenceService's
``labels`` part of its Deployment's selector, which can't change: the revision is an annotation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from scoring.units import GIB
from stages.parts.base.store import digest_of, directory_name
from stages.parts.cluster.kinds import Kind, Object
from stages.parts.releases.pinned import weights_bytes
from stages.rollout.kserve import objects
from stages.rollout.kserve.autoscaling import scaled_objects
from stages.rollout.kserve.detect import as_configured
from stages.rollout.kserve.objects import ENDPOINT, RELEASE, REVISION, KServeEndpoint

LLM_SERVICES: Final = Kind("serving.kserve.io/v1alpha1", "LLMInferenceService", "llminferenceservices")
CACHES: Final = Kind("serving.kserve.io/v1alpha1", "LocalModelNamespaceCache", "localmodelnamespacecaches")
PROMOTED: Final = "slipway/promoted"
"""The annotation of the stable release's service."""
PORT: Final = 8000
"""KServe fixes it for a LLMInferenceService."""
POOLS: Final = "inference.networking.k8s.io"
SERVICE_SUFFIX: Final = "-kserve-workload-svc"
"""The longest of the names that we read which KServe makes; it abbreviates longer ones."""
RUNTIME_FILE: Final = Path(__file__).parents[3] / "manifests" / "kserve" / "serving-runtime.yaml"
"""Says for the other modes what is the same in the container of each release."""


def llm_name(endpoint: KServeEndpoint, release: str) -> str:
    """Name a release's LLMInferenceService. KServe calls its objects ``<this>-kserve…``, as no other mode's are
    called."""
    suffix = f"-{objects.predictor_name(release)}-llm"
    return objects.shortened(endpoint.name, objects.LABEL_CHARACTERS - len(suffix) - len(SERVICE_SUFFIX)) + suffix


def llm_deployment(name: str) -> str:
    return f"{name}-kserve"


def llm_route(name: str) -> str:
    """Name the HTTPRoute that KServe makes for a service."""
    return f"{name}-kserve-route"


def backend(service: Object) -> str:
    """Name what a service's routes lead to: its pods' Service or, with a scheduler, its InferencePool."""
    name = str(service["metadata"]["name"])
    return f"{name}-inference-pool" if "scheduler" in service["spec"]["router"] else name + SERVICE_SUFFIX


def weight(service: Object) -> int:
    return int(service["spec"]["router"]["route"].get("weight", 0))


def llm_service(endpoint: KServeEndpoint, release: str, gateway: str, hostname: str, *, scheduler: bool) -> Object:
    """Build a release's LLMInferenceService, without traffic."""
    name = llm_name(endpoint, release)
    made: Object = {"model": {"uri": source_uri(endpoint, release), "name": endpoint.store.model}}
    made["template"] = _template(endpoint, release)
    made["annotations"] = {REVISION: digest_of(made)[:12]}
    made["labels"] = {ENDPOINT: endpoint.name, RELEASE: release}
    if not endpoint.settings.prometheus:  # else KEDA's
        made["replicas"] = endpoint.settings.scaling.minimum
    made["router"] = {"scheduler": {"labels": {ENDPOINT: endpoint.name}}} if scheduler else {}  # may be reached as pods
    group, kind = (POOLS, "InferencePool") if scheduler else ("", "Service")
    service = backend({"metadata": {"name": name}, "spec": made})
    # KServe puts all members of the group in the place of this backend, with their weights.
    backends = [{"group": group, "kind": kind, "name": service, "port": PORT, "weight": 1}]
    spec = objects.route_spec(endpoint, gateway, hostname, backends)
    made["router"]["route"] = {"group": endpoint.name, "weight": 0, "http": {"spec": spec}}
    return _service(endpoint, name, made)


def changed(endpoint: KServeEndpoint, former: Object, share: int, *, promoted: bool = False) -> Object:
    """Build the service as it was read, with *share* percent as its weight; if *promoted*, as the stable release's.
    KServe divides by the sum of all weights, so that others may be set meanwhile."""
    router = former["spec"]["router"]
    spec = former["spec"] | {"router": router | {"route": router["route"] | {"weight": share}}}
    return _service(endpoint, former["metadata"]["name"], spec, promoted=promoted or is_promoted(former))


def is_promoted(service: Object) -> bool:
    return PROMOTED in service["metadata"].get("annotations", {})


def source_uri(endpoint: KServeEndpoint, release: str) -> str:
    """Where KServe gets a release: in object storage, or on the store's volume."""
    if endpoint.settings.llm.source is None:
        return endpoint.storage_uri(release)
    return f"{endpoint.settings.llm.source}/{directory_name(endpoint.store.model)}/releases/{release}"


def cache(endpoint: KServeEndpoint, release: str, group: str, owner: Object | None = None) -> Object:
    """Build the copies of a release on the nodes of *group*. KServe uses them for every service with the same URI. They
    go with their *owner*, the release's service."""
    size = f"{math.ceil(weights_bytes(endpoint.store, release) / GIB) + 1}Gi"  # and its other files
    spec = {"sourceModelUri": source_uri(endpoint, release), "modelSize": size, "nodeGroups": [group]}
    labels = {ENDPOINT: endpoint.name, RELEASE: release}
    copies = objects.manifest(CACHES, endpoint, spec, name=llm_name(endpoint, release), labels=labels)
    if owner:
        of = {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}
        reference = {"apiVersion": LLM_SERVICES.api_version, "kind": LLM_SERVICES.name, **of}
        copies["metadata"]["ownerReferences"] = [reference]
    return copies


def _service(endpoint: KServeEndpoint, name: str, spec: Object, *, promoted: bool = False) -> Object:
    labels, marks = {ENDPOINT: endpoint.name}, {PROMOTED: "true"} if promoted else {}
    return objects.manifest(LLM_SERVICES, endpoint, spec, name=name, labels=labels, annotations=marks)


@functools.cache
def _runtime() -> Object:
    """Read the container of the ServingRuntime."""
    import yaml

    (container,) = yaml.safe_load(RUNTIME_FILE.read_text())["spec"]["containers"]
    return dict(container)


def _template(endpoint: KServeEndpoint, release: str) -> Object:
    server = objects.container(endpoint, release, port=PORT)
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        server[name]["httpGet"] = server[name]["httpGet"] | {"scheme": "HTTP"}  # whatever the preset's is
    runtime = _runtime()
    server["env"] += runtime["env"]
    server |= {"name": "main", "command": runtime["command"], "ports": [{"containerPort": PORT, "protocol": "TCP"}]}
    server |= {key: runtime[key] for key in ("securityContext", "volumeMounts")}
    pods = objects.pod_fields(endpoint, release)
    pods["volumes"].append({"name": "tmp", "emptyDir": {}})
    return pods | {"containers": [server]}


def render(endpoint: KServeEndpoint, shares: Mapping[str, int]) -> list[Object]:
    installation, settings = as_configured("llm", endpoint.settings, {}), endpoint.settings
    hostname = installation.hostname(endpoint.name, endpoint.namespace)
    group, scheduler = settings.llm.cache_nodes, settings.llm.scheduler
    services = {
        release: llm_service(endpoint, release, installation.gateway, hostname, scheduler=scheduler)
        for release in shares
    }
    stable = next(iter(shares))
    return [
        *(cache(endpoint, release, group) for release in shares if group),
        *(changed(endpoint, services[name], share, promoted=name == stable) for name, share in shares.items()),
        objects.disruption_budget(endpoint),
        *scaled_objects(endpoint, {release: llm_deployment(llm_name(endpoint, release)) for release in shares}),
    ]
