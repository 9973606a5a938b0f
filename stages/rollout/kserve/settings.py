"""The settings of serving on KServe."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from stages.parts.base.settings import Positive, Settings
from stages.rollout.kserve.modes import AUTO, MODES

VERSION: Final = "0.32.0"
"""vLLM's, for releases that were measured before theirs was recorded."""
VARIABLE: Final = "SLIPWAY_KSERVE"
"""The environment variable that holds ``KServe`` as JSON for the rollout program in a pod."""
Seconds = Annotated[int, Field(ge=0)]
Metric: TypeAlias = Literal["concurrency", "queue", "ttft", "kv_cache"]
HOST: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
CRON: Final = r"^\S+( \S+){4}$"


class Floor(Settings):
    """The fewest replicas of a release between two times of the week."""

    start: Annotated[str, Field(pattern=CRON)]
    """When it begins, as cron writes it: ``0 8 * * 1-5``."""
    end: Annotated[str, Field(pattern=CRON)]
    timezone: Annotated[str, Field(pattern=r"^[A-Za-z]\w*([/+-]\w+)*$")] = "Etc/UTC"
    """A name of the IANA's, such as ``Europe/Berlin``."""
    replicas: Positive


class Scaling(Settings):
    """The replicas of one release."""

    replaced: ClassVar = {"concurrency": "scaling.target is what one replica should have of scaling.metric"}

    minimum: Annotated[int, Field(ge=0)] = 1
    """0: none while nobody asks. The next request waits as long as a model takes to load. Only in mode ``knative``,
    which keeps it meanwhile; elsewhere it would be answered 503."""
    maximum: Positive = 3
    metric: Metric = "concurrency"
    """What replicas follow. concurrency: requests that run or wait. queue: those that wait. ttft: the time of the first
    token that 95 % of the requests keep within, in ms. kv_cache: the part of the KV cache in use, 0–1."""
    target: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["auto"] = "auto"
    """What one replica should have of it; above that, another one is started. auto: by what the release was measured to
    serve within the workload's targets (``stages.rollout.kserve.scaling_targets``)."""
    schedule: tuple[Floor, ...] = ()
    """Floors by the time of the week, above ``minimum``. They need KEDA, and hold for the stable release."""
    spot: bool = False
    """Whether replicas may run on the platform's spot nodes, where the others have no room."""
    scale_up_window_s: Seconds = 30
    """The load must be higher for so long: a burst of a few seconds is over before a model has loaded."""
    scale_down_delay_s: Seconds = 300
    """The load must be lower for so long. It should be longer than a model takes to load, or replicas come and go."""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if self.minimum > self.maximum:
            raise ValueError(f"minimum ({self.minimum}) is above maximum ({self.maximum})")
        if most := max((floor.replicas for floor in self.schedule if floor.replicas > self.maximum), default=0):
            raise ValueError(f"schedule has a floor of {most} replicas above maximum ({self.maximum})")
        return self


class Toleration(Settings):
    """A toleration, as in a pod's specification."""

    key: str
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class Nodes(Settings):
    """Which nodes a pod may run on: their labels, and the taints that it tolerates."""

    selector: dict[str, str] = Field(default={})
    tolerations: tuple[Toleration, ...] = ()


class SpotNodes(Nodes):
    """Cheap nodes that may disappear."""

    notice_s: Positive = 30
    """The time from the notice to the end of a node, as far as pods get it."""


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
    image: str = "docker.io/vllm/vllm-openai:v{version}"
    """vLLM; ``{version}`` is the one that the release was measured on."""
    verifier_image: str | None = None
    """Slipway's own image, which verifies a release before vLLM loads it if ``serving.signing`` says so. None: the
    platform's."""
    gpu: str | None = "nvidia.com/gpu"
    """The resource of which each replica gets ``serving.tensor_parallel_size``. None: the CPU serves."""
    cpu: str = "4"
    memory: str = "auto"
    """auto: what vLLM's processes need, and on GPUs room for the weights in the page cache."""
    node_selector: dict[str, str] = Field(default={})
    """Selects nodes with the GPU that was measured on. In Knative mode this and ``tolerations`` need Knative's
    kubernetes.podspec-* flags."""
    tolerations: tuple[Toleration, ...] = ()
    spot_nodes: SpotNodes | None = None
    """The platform's, with ``scaling.spot``."""
    drain_s: Seconds = 60
    """The time that requests in flight are given to finish when a replica stops; where it may run on ``spot_nodes``, no
    more than their notice leaves."""
    timeout_s: Positive = 600
    """The longest time that one request may take, to the end of its answer. Knative allows at most 600."""
    prometheus: str | None = AUTO
    """Base URL, such as ``http://prometheus.monitoring:9090``. KEDA scales by it, and counters are read from it. auto:
    KEDA scales by the one that ``slipway install`` found, and counters are read from a release's pods. None: every
    release has ``scaling.minimum`` replicas in all modes but ``knative``."""
    service_url: str = "http://{service}.{namespace}.svc:{port}"
    """How the rollout reaches a Service."""
    gateway_url: str | None = None
    """Where drills reach the gateway, such as ``http://127.0.0.1:8080`` of a ``kubectl port-forward``; their requests
    carry the endpoint's name in the Host header. None: at the endpoint's own address, as clients do."""
    gateway: str | None = None
    """``namespace/name`` of the Gateway for the HTTPRoutes of the modes ``route`` and ``llm``. None: KServe's own."""
    shared_host: Annotated[str, Field(pattern=HOST)] | None = None
    """A host name, such as ``models.example.com``, at which all models are reached: the model that a request names
    decides. Needs Envoy AI Gateway 1.0 or newer. None: each model has only its own."""
    shared_through: Annotated[str, Field(pattern=HOST[:-1] + r":\d+$")] | None = None
    """``host:port`` at which the cluster reaches the Gateway's own proxies, such as
    ``envoy-kserve-….envoy-gateway-system.svc.cluster.local:80``: from the shared host to a model's own. None: by the
    model's own host name, at port 80."""
    in_force_s: Positive = 300
    """A change of traffic must show in the route's status within this time."""
    propagation_s: Annotated[float, Field(ge=0)] = 5
    """An HTTPRoute's status is set by its controller; the gateway's proxies follow within this time, and no pod is
    removed before. Gateways that are a cloud's load balancers may take minutes. Knative waits for its own proxies."""
    scaling: Scaling = Scaling()
    llm: LLM = LLM()

    @property
    def spot(self) -> SpotNodes | None:
        """The nodes on which replicas may run where the others have no room."""
        return self.spot_nodes if self.scaling.spot else None
