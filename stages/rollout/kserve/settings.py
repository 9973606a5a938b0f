"""The settings of serving on KServe."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from stages.parts.base.settings import Positive, Settings
from stages.rollout.kserve.modes import AUTO, MODES

VARIABLE: Final = "SLIPWAY_KSERVE"
"""The environment variable that holds ``KServe`` as JSON for the rollout program in a pod."""
Seconds = Annotated[int, Field(ge=0)]


class Scaling(Settings):
    """The replicas of one release. Zero is not allowed: a large model takes minutes to load."""

    minimum: Positive = 1
    maximum: Positive = 3
    concurrency: Positive = 10
    """Running and waiting requests that one replica should have; above that, another one is started."""
    scale_up_window_s: Seconds = 30
    """The load must be higher for so long: a burst of a few seconds is over before a model has loaded."""
    scale_down_delay_s: Seconds = 300
    """The load must be lower for so long. It should be longer than a model takes to load, or replicas come and go."""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if self.minimum > self.maximum:
            raise ValueError(f"minimum ({self.minimum}) is above maximum ({self.maximum})")
        return self


class Toleration(Settings):
    """A toleration, as in a pod's specification."""

    key: str
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class LLM(Settings):
    """What mode ``llm`` has beside the others."""

    scheduler: bool = False
    """Whether KServe's scheduler chooses the replica of each request, by the prefixes that its cache holds and by its
    queue. Needs a gateway with the Inference Extension, and several replicas to be of use. Off: the gateway
    chooses. A release that is served keeps what it began with."""
    source: Annotated[str, Field(pattern=r"^s3://[^/].*[^/]$")] | None = None
    """Where the store lies in object storage, such as ``s3://bucket/models``: each replica gets its release from there
    (``<source>/<model>/releases/<release>``), not from ``claim``. To keep it the same as the volume is not our task."""
    cache_nodes: str | None = None
    """The LocalModelNodeGroup on whose nodes KServe keeps each release that is served. Needs ``source``: KServe can't
    copy from a volume claim. None: nothing is kept on nodes."""

    @model_validator(mode="after")
    def _copied_from_somewhere(self) -> Self:
        if self.cache_nodes and not self.source:
            raise ValueError("cache_nodes needs source: KServe can't copy from a volume claim to nodes")
        return self


def _known(mode: str) -> str:
    if mode not in (AUTO, *MODES):
        raise ValueError(f"should be one of {', '.join((AUTO, *MODES))}")
    return mode


class KServe(Settings):
    """Where and how releases are served on a cluster. ``Serving`` sets how vLLM itself serves, as it was measured."""

    mode: Annotated[str, AfterValidator(_known)] = AUTO
    """standard: one InferenceService with ``spec.canary`` (KServe 0.21 or newer, with the Gateway API). knative:
    ``canaryTrafficPercent``. route: two InferenceServices behind the rollout's own HTTPRoute, for older versions.
    llm: a LLMInferenceService for each release (KServe 0.20 or newer). auto: the one that serves the model already,
    else whichever of the first three the cluster supports."""
    namespace: str | None = None
    """None: the namespace of the kubeconfig, or of this pod."""
    claim: str = "slipway-models"
    """The PersistentVolumeClaim that holds the store. Releases are mounted from it, read-only."""
    image: str = "docker.io/vllm/vllm-openai:v0.32.0"
    """vLLM in the same version as in the evaluation."""
    gpu: str | None = "nvidia.com/gpu"
    """The resource of which each replica gets ``serving.tensor_parallel_size``. None: the CPU serves."""
    cpu: str = "4"
    memory: str = "auto"
    """auto: what vLLM's processes need, and on GPUs room for the weights in the page cache."""
    node_selector: dict[str, str] = Field(default={})
    """Selects nodes with the GPU that was measured on. In Knative mode this and ``tolerations`` need Knative's
    kubernetes.podspec-* flags."""
    tolerations: tuple[Toleration, ...] = ()
    drain_s: Seconds = 60
    """The time that requests in flight are given to finish when a replica stops."""
    timeout_s: Positive = 600
    """The longest time that one request may take, to the end of its answer. Knative allows at most 600."""
    prometheus: str | None = None
    """Base URL, such as ``http://prometheus.monitoring:9090``. KEDA scales by it, and counters are read from it.
    None: every release has ``scaling.minimum`` replicas in Standard mode, and counters are read from its pods."""
    service_url: str = "http://{service}.{namespace}.svc:{port}"
    """How the rollout reaches a Service."""
    gateway_url: str | None = None
    """Where drills reach the gateway, such as ``http://127.0.0.1:8080`` of a ``kubectl port-forward``; their requests
    carry the endpoint's name in the Host header. None: at the endpoint's own address, as clients do."""
    gateway: str | None = None
    """``namespace/name`` of the Gateway for the HTTPRoutes of the modes ``route`` and ``llm``. None: KServe's own."""
    in_force_s: Positive = 300
    """A change of traffic must show in the route's status within this time."""
    propagation_s: Annotated[float, Field(ge=0)] = 5
    """An HTTPRoute's status is set by its controller; the gateway's proxies follow within this time, and no pod is
    removed before. Gateways that are a cloud's load balancers may take minutes. Knative waits for its own proxies."""
    scaling: Scaling = Scaling()
    llm: LLM = LLM()
