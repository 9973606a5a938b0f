"""What serving on KServe can be told."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from stages.parts.base.settings import Positive, Settings

VARIABLE: Final = "SLIPWAY_KSERVE"
"""The environment variable that holds ``KServe`` as JSON for the rollout program in a pod."""
Seconds = Annotated[int, Field(ge=0)]


class Scaling(Settings):
    """Replicas of one release. Zero is not offered: a large model takes minutes to load."""

    minimum: Positive = 1
    maximum: Positive = 3
    concurrency: Positive = 10
    """Requests running and waiting that one replica should have; above it another one is started."""
    scale_up_window_s: Seconds = 30
    """The load must have been higher for so long: a burst of seconds is over before a model has loaded."""
    scale_down_delay_s: Seconds = 300
    """The load must have been lower for so long. Longer than a model takes to load, or replicas come and go."""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if self.minimum > self.maximum:
            raise ValueError(f"minimum ({self.minimum}) is above maximum ({self.maximum})")
        return self


class Toleration(Settings):
    """As in a pod's specification."""

    key: str
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class KServe(Settings):
    """Where and how releases are served on a cluster. How vLLM itself serves is ``Serving``, as it was measured."""

    mode: Literal["auto", "standard", "knative", "route"] = "auto"
    """standard: one InferenceService with ``spec.canary`` (KServe 0.21 or newer, with the Gateway API). knative:
    ``canaryTrafficPercent``. route: two InferenceServices behind an HTTPRoute of ours, for older versions.
    auto: by what the cluster has."""
    namespace: str | None = None
    """None: that of the kubeconfig, or of this pod."""
    claim: str = "slipway-models"
    """The PersistentVolumeClaim that holds the store. Releases are mounted from it, read-only."""
    image: str = "docker.io/vllm/vllm-openai:v0.32.0"
    """vLLM, of the very version that the evaluation ran."""
    gpu: str | None = "nvidia.com/gpu"
    """The resource of which a replica gets ``serving.tensor_parallel_size``. None: it is served on the CPU."""
    cpu: str = "4"
    memory: str = "32Gi"
    node_selector: dict[str, str] = Field(default={})
    """Of the GPU that was measured on. In Knative mode this and ``tolerations`` need its kubernetes.podspec-* flags."""
    tolerations: tuple[Toleration, ...] = ()
    drain_s: Seconds = 60
    """Requests in flight are given so long to end when a replica stops."""
    timeout_s: Positive = 600
    """Of one request, to the end of its answer. Knative allows no more than 600."""
    prometheus: str | None = None
    """Base URL, such as ``http://prometheus.monitoring:9090``. KEDA scales by it, and totals are read from it.
    None: every release has ``scaling.minimum`` replicas in Standard mode, and totals are read from its pods."""
    service_url: str = "http://{service}.{namespace}.svc:{port}"
    """How a Service is reached from where the rollout runs."""
    gateway_url: str | None = None
    """Where drills reach the gateway, such as ``http://127.0.0.1:8080`` of a ``kubectl port-forward``; their requests
    carry the endpoint's name in the Host header. None: by the endpoint's own address, as clients do."""
    gateway: str | None = None
    """``namespace/name`` of the Gateway for the HTTPRoute of mode ``route``. None: the one that KServe uses."""
    in_force_s: Positive = 300
    """A change of traffic must show in the route's status within this time."""
    propagation_s: Annotated[float, Field(ge=0)] = 5
    """The status of an HTTPRoute is its controller's word: the gateway's proxies follow within this time, and no pod
    goes before. Gateways that are a cloud's load balancers may take minutes. Knative waits for its own proxies."""
    scaling: Scaling = Scaling()
