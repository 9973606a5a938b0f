"""Where a run takes place: the resources of each stage, its image, and the volume of the store."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from stages.parts.base.errors import ConfigError
from stages.parts.base.program import SECRET
from stages.parts.base.settings import Positive, Settings
from stages.parts.cluster.nodes import quantity
from stages.rollout.kserve.settings import Nodes, SpotNodes


def _quantity(value: str) -> str:
    try:
        quantity(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return value


def _no_secret(value: str) -> str:
    if urlsplit(value).password:
        raise ValueError("it has a password, which everyone who may read workflows could read")
    return value


Quantity = Annotated[str, AfterValidator(_quantity)]
STORE_MOUNT: Final = "/mnt/models"
"""Where pods see the store's volume."""
LOCKS: Final = "slipway-locks"
"""The ConfigMap with the limits of pods at a time."""
FAMILIES: Final = {"optimize": "optimize", "check": "evaluate", "evaluate": "evaluate"}
"""The stages whose image holds more than our own programs. All others run on ``slim``."""

DEFAULT_REPOSITORY, NO_REPOSITORY = "default", "none"
AUTOMATIC: Final = ("gpus", "memory", "shm")
"""What evaluate may get by the size of the model. The outputs of check have the same names."""


class Stage(Settings):
    """What one stage's pod (or process) asks for."""

    cpu: Quantity | Literal["all"]
    """Cores, or *all* cores of the machine, so that nothing else runs at the same time."""
    memory: Quantity | Literal["auto"]
    """*auto*, for evaluate and optimize on a cluster, is what the servers or a quantizer need by the size of the
    model."""
    gpus: Annotated[int, Field(ge=0)] | Literal["any", "all", "auto"] = 0
    """*any* is one if the machine has one, *all* all of the machine, which may be none. *auto*, for evaluate on a
    cluster, is ``serving.tensor_parallel_size``, which may itself be auto."""
    deadline_s: Positive
    """After this time the task is stopped and fails. On a cluster, waiting for a node does not count."""
    shm: Quantity | Literal["auto"] | None = None
    """Shared memory of a pod, a part of its memory, used by vLLM's processes and NCCL; by default the node's 64 MiB.
    *auto*, for evaluate on a cluster, follows the number of GPUs."""
    spot: bool = False
    """Whether it runs on cheap nodes that may disappear (``cluster.spot``); lost work is retried."""
    gpu_node: bool = False
    """Whether it runs on a node with GPUs without asking for one."""
    nodes: Nodes = Nodes()
    """Requirements besides those of GPUs and spot."""

    @property
    def automatic(self) -> tuple[str, ...]:
        """Those of ``AUTOMATIC`` that are *auto*."""
        return tuple(name for name in AUTOMATIC if getattr(self, name) == "auto")


class Stages(Settings):
    resolve: Stage
    acquire: Stage
    optimize: Stage
    evaluate: Stage
    select: Stage
    serve: Stage
    report: Stage
    rewrite: Stage | None = None
    """Resources to make the variants without calibration, such as fp16 and int8: they only rewrite weights and need no
    GPU. By default those of optimize."""

    @property
    def check(self) -> Stage:
        """A short look at the node and the GPUs on which evaluate will run."""
        # Most of the time is for pulling the image.
        small = {"cpu": "1", "memory": "4Gi", "shm": None, "deadline_s": 1800}
        return self.evaluate.model_copy(update=small | ({"gpus": 1} if self.evaluate.gpus == "auto" else {}))


class Retries(Settings):
    """Retries of a task that failed for a reason that may pass (exit code 75, eviction, preemption)."""

    limit: Annotated[int, Field(ge=0)] = 3
    backoff_s: Positive = 5
    """Wait before the first retry; doubled before each further one."""


class StoreVolume(Settings):
    """The volume with the store."""

    storage_class: str | None = None
    """By default the cluster's own."""
    access: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """ReadWriteOnce is enough where there is one node."""
    size: Quantity = "1Ti"


class ClientSettings(Settings):
    """Clients with keys of their own, whom Envoy Gateway lets in. What each may do stands in a file of its own."""

    file: str
    """Their names, limits and Secrets (docs/endpoint.md); beside the platform's file, unless it is a whole path."""
    gateway: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[a-z0-9.-]+$")] = "kserve/kserve-ingress-gateway"
    """``namespace/name`` of the Gateway through which they come."""
    proxies: str = "envoy-gateway-system"
    """The namespace in which Envoy Gateway runs that Gateway's proxies."""
    usage_secret: str | None = None
    """The Secret in the namespace of ``proxies`` whose ``url`` is the PostgreSQL database that gets the usage. Without
    it, none is kept."""
    prometheus: str | None = None
    """The namespace from which Prometheus scrapes vLLM's pods. Without it, Prometheus has no access."""
    hosts: tuple[str, ...] = ()
    """The hosts of the certificate, such as ``*.example.com``."""
    issuer: str | None = None
    """cert-manager's ClusterIssuer of a certificate for ``hosts``. Without it, no certificate is requested."""

    @model_validator(mode="after")
    def _issued_for_hosts(self) -> Self:
        if bool(self.issuer) != bool(self.hosts):
            raise ValueError("issuer and hosts belong together: who signs, and for what")
        return self


class ClusterSettings(Settings):
    """What pods on a cluster need and processes on one machine do not."""

    storage: StoreVolume = StoreVolume()
    gpu: Nodes = Nodes()
    """For stages that ask for GPUs. It selects one type of GPU, because evaluations are compared with each other."""
    accelerator: str | None = None
    """The name of this type in ``configs/accelerators.yaml``: settings that can't fit on it are refused before a run is
    submitted. Without it, only check finds out."""
    gpus_per_node: Positive = 8
    """The most that a pod may ask for: *auto* gives a server no more."""
    spot: SpotNodes | None = None
    """For stages with ``spot``, which otherwise run on the other nodes, and for ``kserve.scaling.spot``."""
    gpu_pods: Positive
    """How many pods of all runs may have GPUs at a time: a semaphore that leaves GPUs to serving."""
    gpu_quota: Annotated[int, Field(ge=0)]
    """GPUs that the namespace may use at a time, endpoints included."""
    api_server: tuple[str, ...] = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
    """Networks that hold the address of the cluster's API server, for the network policies."""
    environment: dict[str, Annotated[str, AfterValidator(_no_secret)]] = Field(default={})
    """Variables of every stage's pod, such as HF_ENDPOINT of a mirror, HTTPS_PROXY and NO_PROXY. No secrets: everyone
    who may read workflows can read them."""
    certificates: str | None = None
    """A ConfigMap of the namespace whose ``ca.crt`` holds all certificate authorities that pods trust, a company's own
    among them; by default those of the image."""
    hub_ports: tuple[Annotated[int, Field(gt=0, le=65535)], ...] = (443,)
    """Ports of the Hub, of a mirror or of a proxy, which the network policies let through."""
    priority_class: str | None = None
    queue: str | None = None
    """The Kueue LocalQueue that admits stages with GPUs."""
    artifact_repository: str | None = None
    """Where the report is kept besides the volume, so that Argo's UI shows it: a key of the ConfigMap
    ``artifact-repositories``, ``default`` for Argo's own default repository, or ``none``. By default ``install``
    takes the default one if the cluster has it; what is rendered without a cluster has none."""
    controller_namespace: str = "argo"
    """The namespace of Argo's workflow controller, which keeps memoized results there."""
    controller_account: str | None = None
    """The controller's service account, which gets the right to keep them. By default ``install`` finds it; what is
    rendered without a cluster says ``argo``, as Argo's own manifests do."""
    deadline_s: Positive = 259_200
    """Deadline of a whole run, time in queues included."""
    prometheus: Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[a-z0-9.-]+$")] | None = None
    """``namespace/name`` of the Prometheus resource that is to scrape endpoints and to alert. By default the cluster's
    only one."""
    clients: ClientSettings | None = None
    """Without them, endpoints have one key for all, or none."""
    kept_s: Positive = 604_800
    """How long an ended run is listed; a failed one is listed twice as long, and the last one that the command line
    submitted of a model until the next. Its results stay in the store."""

    @property
    def publishes(self) -> bool:
        """Whether a repository keeps the report."""
        return self.artifact_repository not in (None, NO_REPOSITORY)

    @model_validator(mode="after")
    def _variables_of_others(self) -> Self:
        if reserved := [name for name in self.environment if name.startswith(("SLIPWAY_", "ARGO_"))]:
            raise ValueError(f"environment sets what Slipway or Argo set: {', '.join(reserved)}")
        if secret := [name for name in self.environment if SECRET.search(name)]:
            raise ValueError(
                f"environment would show {', '.join(secret)} to everyone who may read workflows: the Hub's token "
                "belongs in the Secret slipway-hub, the endpoint's key in slipway-api"
            )
        return self


class Platform(Settings):
    name: str
    namespace: str
    image: str
    """``{family}`` becomes slim, optimize, optimize-<environment> or evaluate; but for slim, with ``-cpu`` for stages
    without a GPU."""
    digests: dict[str, Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]] = Field(default={})
    """The digest of each image, by what stands for ``{family}``: pods then run this very image, whatever its tag comes
    to name. ``manifests/images/build --push --record DIR`` writes them."""
    claim: str
    """The PersistentVolumeClaim that holds the store."""
    retries: Retries = Retries()
    stages: Stages
    serves_on: Literal["local", "kserve"] = "local"
    """Where releases are rolled out: vLLM behind a proxy on this machine, or KServe."""
    one_evaluation_at_a_time: bool = False
    """Whether evaluations share one machine, and would disturb each other's measurements."""
    price_per_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Price of the hardware that serves one replica, all its GPUs together. Without it, no costs are reported."""
    currency: str = "USD"
    cluster: ClusterSettings | None = None
    """Absent for one machine."""

    @model_validator(mode="after")
    def _literal_on_a_cluster(self) -> Self:
        stages = {name: stage for name, stage in self.stages if stage}
        unclear = [name for name, stage in stages.items() if stage.cpu == "all" or stage.gpus in ("all", "any")]
        if self.cluster and unclear:
            raise ValueError(f"'all' and 'any' are for one machine only: {', '.join(unclear)}")
        may_be = {"evaluate": AUTOMATIC, "optimize": ("memory",)} if self.cluster else {}
        if sized := [name for name, stage in stages.items() if {*stage.automatic} - {*may_be.get(name, ())}]:
            raise ValueError(f"'auto' is for evaluate, and the memory of optimize, on a cluster: {', '.join(sized)}")
        return self

    @property
    def most_gpus(self) -> int | None:
        """The number of GPUs that one server may have, or None for those of this machine."""
        if self.cluster is None:
            return None
        gpus = self.stages.evaluate.gpus
        quota = self.cluster.gpu_quota or self.cluster.gpus_per_node
        return gpus if isinstance(gpus, int) else min(self.cluster.gpus_per_node, quota)

    def image_of(self, stage: str, environment: str = "") -> str:
        """Return the image of a stage's pods, or of those of its quantizers that have an environment of their own."""
        family = FAMILIES.get(stage, "slim") + (f"-{environment}" if environment else "")
        asks: Stage | None = getattr(self.stages, stage, None)
        name = family if family == "slim" or (asks and asks.gpus) else f"{family}-cpu"
        digest = self.digests.get(name)
        return self.image.replace("{family}", name) + (f"@{digest}" if digest else "")

    def nodes_of(self, stage: Stage) -> Nodes:
        """Return all requirements of a stage's pod on its node."""
        if self.cluster is None:
            return Nodes()
        parts: list[Nodes] = [stage.nodes]
        parts += [self.cluster.gpu] if stage.gpus or stage.gpu_node else []
        parts += [self.cluster.spot] if stage.spot and self.cluster.spot else []
        return Nodes(
            selector={key: value for part in parts for key, value in part.selector.items()},
            tolerations=tuple(toleration for part in parts for toleration in part.tolerations),
        )

    def on(self, *, cores: int, gpus: int) -> Platform:
        """Return the same platform with every 'all' and 'any' replaced by what a machine has."""
        counts: dict[object, int] = {"all": gpus, "any": min(1, gpus)}
        literal = {}
        for name, stage in self.stages:
            if stage:
                cpu = str(cores) if stage.cpu == "all" else stage.cpu
                literal[name] = stage.model_copy(update={"cpu": cpu, "gpus": counts.get(stage.gpus, stage.gpus)})
        return self.model_copy(update={"stages": self.stages.model_copy(update=literal)})
