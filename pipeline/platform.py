"""Where a run takes place: what each stage asks for, and from which image and volume it runs."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from pipeline.quantity import quantity
from stages.parts.base.errors import ConfigError
from stages.parts.base.settings import Positive, Settings
from stages.rollout.kserve.settings import Toleration


def _quantity(value: str) -> str:
    try:
        quantity(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return value


Quantity = Annotated[str, AfterValidator(_quantity)]
FAMILIES: Final = {"optimize": "optimize", "evaluate": "evaluate"}
"""The stages whose image carries more than our own programs. Every other one runs on ``slim``."""


class Nodes(Settings):
    """Which nodes a pod may run on: their labels, and the taints it does not mind."""

    selector: dict[str, str] = Field(default={})
    tolerations: tuple[Toleration, ...] = ()


class Stage(Settings):
    """What one stage's pod (or process) asks for."""

    cpu: Quantity | Literal["all"]
    """Cores. all: every core of the machine, so that nothing else runs beside it."""
    memory: Quantity
    gpus: Annotated[int, Field(ge=0)] | Literal["any", "all"] = 0
    """any: one if the machine has one; all: all that it has, which may be none."""
    deadline_s: Positive
    """After this the task is stopped and failed. On a cluster the time without a node does not count."""
    shm: Quantity | None = None
    """Shared memory of a pod, out of its memory: vLLM's processes and NCCL talk through it. None: the node's 64 MiB."""
    spot: bool = False
    """On cheap nodes that may vanish (``cluster.spot``). What is lost is retried."""
    gpu_node: bool = False
    """On a node with GPUs, also without asking for one."""
    nodes: Nodes = Nodes()
    """Besides what GPUs and spot ask for."""


class Stages(Settings):
    resolve: Stage
    acquire: Stage
    optimize: Stage
    evaluate: Stage
    select: Stage
    serve: Stage
    report: Stage
    fp16: Stage | None = None
    """optimize for the fp16 variant, which only rewrites weights and needs no GPU. None: as optimize."""


class Retries(Settings):
    """Of a task that failed for a reason that may pass (exit code 75, eviction, preemption)."""

    limit: Annotated[int, Field(ge=0)] = 3
    backoff_s: Positive = 5
    """Before the first new attempt; doubled before each further one."""


class Storage(Settings):
    """The volume with the store."""

    storage_class: str | None = None
    """None: the cluster's default."""
    access: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """ReadWriteOnce is enough where there is one node."""
    size: Quantity = "1Ti"


class ClusterSettings(Settings):
    """What pods need, and processes of one machine have no use for."""

    storage: Storage = Storage()
    gpu: Nodes = Nodes()
    """For stages that ask for GPUs. The label of one type of GPU: evaluations are compared with each other."""
    spot: Nodes | None = None
    """For stages with ``spot``. None: there are no such nodes, and these stages run on the others."""
    gpu_pods: Positive
    """Pods with GPUs at a time, over all runs: a semaphore, so that a queue of runs leaves GPUs to serving."""
    gpu_quota: Annotated[int, Field(ge=0)]
    """GPUs that the namespace may have at a time, endpoints included."""
    api_server: tuple[str, ...] = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10")
    """Networks in which the cluster's API server has its address, for the network policies."""
    priority_class: str | None = None
    queue: str | None = None
    """The Kueue LocalQueue that admits stages with GPUs. None: without Kueue."""
    artifact_repository: str | None = None
    """A key of the ConfigMap ``artifact-repositories``: the report is kept there, and Argo's UI shows it. None: it
    stays on the volume alone."""
    controller_namespace: str = "argo"
    """Where Argo's workflow controller runs: that is where it keeps what is memoized."""
    deadline_s: Positive = 259_200
    """Of a whole run, time in queues included."""
    kept_s: Positive = 604_800
    """How long an ended run is listed; a failed one twice as long. What it made stays in the store."""


class Platform(Settings):
    name: str
    namespace: str
    image: str
    """``{family}`` in it becomes slim, optimize or evaluate; on a cluster with ``-cpu`` where no GPU is asked for."""
    claim: str
    """The PersistentVolumeClaim that holds the store."""
    retries: Retries = Retries()
    stages: Stages
    serves_on: Literal["local", "kserve"] = "local"
    """Where releases are rolled out: vLLM behind a proxy on this machine, or KServe."""
    one_evaluation_at_a_time: bool = False
    """True where evaluations share one machine: they would measure each other."""
    price_per_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Of the hardware that one replica is served on, all its GPUs together. None: costs are not told."""
    currency: str = "USD"
    cluster: ClusterSettings | None = None
    """None: one machine."""

    @model_validator(mode="after")
    def _literal_on_a_cluster(self) -> Self:
        unclear = [name for name, stage in self.stages if stage and (stage.cpu == "all" or isinstance(stage.gpus, str))]
        if self.cluster and unclear:
            raise ValueError(f"'all' and 'any' mean something on one machine only: {', '.join(unclear)}")
        return self

    def image_of(self, stage: str) -> str:
        family = FAMILIES.get(stage, "slim")
        asks: Stage | None = getattr(self.stages, stage, None)
        return self.image.replace("{family}", family if family == "slim" or (asks and asks.gpus) else f"{family}-cpu")

    def nodes_of(self, stage: Stage) -> Nodes:
        """All that a stage's pod asks of its node."""
        if self.cluster is None:
            return Nodes()
        asked = [stage.nodes]
        asked += [self.cluster.gpu] if stage.gpus or stage.gpu_node else []
        asked += [self.cluster.spot] if stage.spot and self.cluster.spot else []
        return Nodes(
            selector={key: value for each in asked for key, value in each.selector.items()},
            tolerations=tuple(toleration for each in asked for toleration in each.tolerations),
        )

    def on(self, *, cores: int, gpus: int) -> Platform:
        """The same with every 'all' and 'any' replaced by what a machine has."""
        counts = {"all": gpus, "any": min(1, gpus)}
        literal = {
            name: stage.model_copy(
                update={
                    "cpu": str(cores) if stage.cpu == "all" else stage.cpu,
                    "gpus": counts[stage.gpus] if isinstance(stage.gpus, str) else stage.gpus,
                }
            )
            for name, stage in self.stages
            if stage
        }
        return self.model_copy(update={"stages": self.stages.model_copy(update=literal)})
