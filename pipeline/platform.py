"""Where a run takes place: what each stage asks for, and from which image and volume it runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from pipeline.local.resources import quantity
from stages.errors import ConfigError
from stages.settings import Positive, Settings


def _quantity(value: str) -> str:
    try:
        quantity(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return value


Quantity = Annotated[str, AfterValidator(_quantity)]


class Stage(Settings):
    """What one stage's pod (or process) asks for."""

    cpu: Quantity | Literal["all"]
    """Cores. all: every core of the machine, so that nothing else runs beside it."""
    memory: Quantity
    gpus: Annotated[int, Field(ge=0)] | Literal["any", "all"] = 0
    """any: one if the machine has one; all: all that it has, which may be none."""
    deadline_s: Positive
    """After this the task is stopped and failed."""


class Stages(Settings):
    resolve: Stage
    acquire: Stage
    optimize: Stage
    evaluate: Stage
    select: Stage
    serve: Stage
    report: Stage


class Retries(Settings):
    """Of a task that failed for a reason that may pass (exit code 75, eviction, preemption)."""

    limit: Annotated[int, Field(ge=0)] = 3
    backoff_s: Positive = 5
    """Before the first new attempt; doubled before each further one."""


class Platform(Settings):
    name: str
    namespace: str
    image: str
    claim: str
    """The ReadWriteMany PersistentVolumeClaim that holds the store."""
    retries: Retries = Retries()
    stages: Stages
    one_evaluation_at_a_time: bool = False
    """True where evaluations share one machine: they would measure each other."""

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
        }
        return self.model_copy(update={"stages": self.stages.model_copy(update=literal)})
