"""The part of an Argo manifest that the workflow uses, as closed models: any other field is an error that names it.

A model's ``cluster_only`` names the fields that only say where and how a pod runs, or what a cluster keeps of it.

``{{…}}`` in a text are references to parameters, outputs and the workflow itself. They are replaced once: a ``{{`` in a
value stays as it is. ``{{=…}}`` (expression templates) is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Annotated, ClassVar, Final, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from pipeline.runs.expressions import holds, parse
from pipeline.runs.state import FailedAttempt
from stages.parts.base.errors import ConfigError

REFERENCE: Final = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
DURATION_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Unresolved(ConfigError):
    """A reference without a value."""

    def __init__(self, reference: str, why: str) -> None:
        super().__init__(f"{{{{{reference}}}}} has no value: {why}")


def substitute(text: str, lookup: Callable[[str], str]) -> str:
    """Replace each reference in *text* by the value that *lookup* returns for it."""
    return REFERENCE.sub(lambda match: lookup(match[1].strip()), text)


def seconds(text: str) -> float:
    """Read a Go duration ('90s', '1h30m') or a plain number of seconds, in seconds."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if not text or DURATION_PART.sub("", text):
        raise ValueError("not a duration such as 90s, 10m or 24h")
    return sum(float(number) * SECONDS[unit] for number, unit in DURATION_PART.findall(text))


def _text(value: object) -> object:
    return json.dumps(value) if isinstance(value, bool | int | float) else value


def _seconds(value: object) -> object:
    return seconds(str(value)) if isinstance(value, str | int | float) else value


Text = Annotated[str, BeforeValidator(_text)]
"""A text; numbers and booleans become their JSON text, as in Argo's parameters."""
Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0)]
TaskName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9][-a-zA-Z0-9]*$", max_length=128)]
ParameterName = Annotated[str, Field(pattern=r"^[-a-zA-Z0-9_]+$")]
CacheName = Annotated[str, Field(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$", max_length=253)]
AnyParameter = TypeVar("AnyParameter")
POD_FIELDS: Final = frozenset(
    {"automountServiceAccountToken", "metrics", "nodeSelector", "securityContext", "serviceAccountName", "tolerations"}
)


class ManifestPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel)

    cluster_only: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_cluster_only(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key not in cls.cluster_only}


class Parameter(ManifestPart):
    name: ParameterName
    value: Text | None = None
    description: str = ""


class Input(ManifestPart):
    name: ParameterName


class Argument(ManifestPart):
    name: ParameterName
    value: Text


class ValueFrom(ManifestPart):
    path: str = ""
    parameter: str = ""


class OutputParameter(ManifestPart):
    name: ParameterName
    value_from: ValueFrom


class ParameterList(ManifestPart, Generic[AnyParameter]):
    parameters: tuple[AnyParameter, ...] = ()


class Outputs(ParameterList[OutputParameter]):
    cluster_only = frozenset({"artifacts"})


class SecretKey(ManifestPart):
    name: str
    key: str
    optional: bool = False


class EnvSource(ManifestPart):
    secret_key_ref: SecretKey


class Env(ManifestPart):
    name: str
    value: Text = ""
    value_from: EnvSource | None = None


class Resources(ManifestPart):
    requests: dict[str, Text] = {}
    limits: dict[str, Text] = {}


class VolumeMount(ManifestPart):
    cluster_only = frozenset({"readOnly"})

    name: str
    mount_path: Annotated[str, Field(pattern="^/.")]


class Container(ManifestPart):
    cluster_only = frozenset({"image", "imagePullPolicy", "securityContext", "terminationMessagePolicy"})

    command: tuple[str, ...] = Field(min_length=1)
    args: tuple[Text, ...] = ()
    env: tuple[Env, ...] = ()
    resources: Resources = Resources()
    volume_mounts: tuple[VolumeMount, ...] = ()

    def secrets(self) -> dict[str, bool]:
        """Whether each secret may be missing, by environment variable."""
        return {one.name: one.value_from.secret_key_ref.optional for one in self.env if one.value_from}


class Claim(ManifestPart):
    claim_name: str


class Volume(ManifestPart):
    cluster_only = frozenset({"emptyDir"})

    name: str
    persistent_volume_claim: Claim | None = None


class Task(ManifestPart):
    name: TaskName
    template: str
    arguments: ParameterList[Argument] = ParameterList()
    depends: str = ""
    when: str = ""


class Dag(ManifestPart):
    tasks: tuple[Task, ...] = Field(min_length=1)
    fail_fast: Literal[False]
    """Required, because Argo's default is true, and here other branches always continue after a failure."""


class Backoff(ManifestPart):
    duration: Seconds = 0.0
    factor: Annotated[float, Field(gt=0)] = 1.0


class RetryStrategy(ManifestPart):
    limit: Annotated[int, Field(ge=0)]
    """Required: without it Argo never stops, and skips the backoff."""
    retry_policy: Literal["Always"]
    """Required, because Argo's default is OnFailure. The expression decides what is retried."""
    expression: str = ""
    backoff: Backoff = Backoff()

    def backoff_s(self, failure: FailedAttempt, attempts: int) -> float | None:
        """Seconds until the next attempt, after *attempts* of them; None if there is no next one."""
        if attempts > self.limit:
            return None
        variables = {  # Argo's, of which the exit code is a text (docs/retries.md)
            "lastRetry.exitCode": str(failure.exit_code),
            "lastRetry.status": failure.phase,
            "lastRetry.message": failure.message,
        }
        if self.expression and not holds(parse(self.expression, "expression"), variables.__getitem__):
            return None
        return self.backoff.duration * self.backoff.factor ** (attempts - 1)


class ConfigMap(ManifestPart):
    name: CacheName


class Cache(ManifestPart):
    config_map: ConfigMap


class Memoize(ManifestPart):
    key: str
    max_age: Seconds | None = None
    cache: Cache


class Mutex(ManifestPart):
    name: Annotated[str, Field(min_length=1)]


class Synchronization(ManifestPart):
    cluster_only = frozenset({"semaphores"})

    mutexes: tuple[Mutex, ...] = ()

    def names(self, lookup: Callable[[str], str]) -> tuple[str, ...]:
        """Return the mutexes with every reference resolved."""
        return tuple(substitute(mutex.name, lookup) for mutex in self.mutexes)


class Suspend(ManifestPart):
    pass


class Template(ManifestPart):
    cluster_only = POD_FIELDS | {"failFast", "metadata"}

    name: TaskName
    inputs: ParameterList[Input] = ParameterList()
    outputs: Outputs = Outputs()
    container: Container | None = None
    dag: Dag | None = None
    suspend: Suspend | None = None
    volumes: tuple[Volume, ...] = ()
    memoize: Memoize | None = None
    retry_strategy: RetryStrategy | None = None
    synchronization: Synchronization = Synchronization()
    active_deadline_seconds: Annotated[float, Field(gt=0)] | None = None
    pod_spec_patch: str = ""
    """How large a pod is; nothing here."""

    @property
    def program(self) -> Container:
        """Its container, which every template that is run as a process has."""
        if self.container is None:
            raise TypeError(f"template {self.name!r} has no container")
        return self.container

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of its dag; none if it is not a dag."""
        return self.dag.tasks if self.dag else ()


class Spec(ManifestPart):
    cluster_only = POD_FIELDS | {
        "executor",
        "podGC",
        "podMetadata",
        "podPriorityClassName",
        "ttlStrategy",
        "workflowMetadata",
    }

    entrypoint: str
    on_exit: str | None = None
    arguments: ParameterList[Parameter] = ParameterList()
    templates: tuple[Template, ...] = Field(min_length=1)
    volumes: tuple[Volume, ...] = ()
    active_deadline_seconds: Annotated[float, Field(gt=0)] | None = None
    synchronization: Synchronization = Synchronization()


class Metadata(ManifestPart):
    cluster_only = frozenset({"annotations", "generateName", "labels", "namespace"})

    name: str = ""


class Manifest(ManifestPart):
    api_version: Literal["argoproj.io/v1alpha1"]
    kind: Literal["WorkflowTemplate", "Workflow"]
    metadata: Metadata
    spec: Spec
