"""The part of an Argo manifest that runs here, as closed models: any other field is an error that names the field.

Kinds: ``WorkflowTemplate``, ``Workflow`` (argoproj.io/v1alpha1, Argo 4).

    spec                      entrypoint (a dag), onExit (a dag or a container), arguments.parameters, templates,
                              volumes, activeDeadlineSeconds, synchronization
    …volumes[]                name, persistentVolumeClaim.claimName (replaced by a local folder), emptyDir (a fresh
                              folder for each attempt)
    …templates[]              name; one of container, dag, suspend; inputs.parameters, outputs.parameters
      of a container          volumes, memoize, retryStrategy, synchronization, activeDeadlineSeconds (of one attempt),
                              podSpecPatch (JSON: resources of the container main, emptyDir volumes)
      of a dag                memoize
    …outputs.parameters[]     name, valueFrom: path (of a container, below a mounted volume) or parameter (of a dag)
    …container                command (``python`` is this interpreter), args, env (value, or valueFrom.secretKeyRef:
                              the environment variable of the same name), resources (cpu, memory, */gpu), volumeMounts
    …dag                      failFast (false), tasks[]: name, template, arguments.parameters, depends, when
    …retryStrategy            limit, retryPolicy (Always), expression, backoff (duration, factor)
    …memoize                  key, maxAge, cache.configMap.name
    …synchronization          mutexes[].name, semaphores[].configMapKeyRef
    references                {{inputs.parameters.P}}, {{workflow.parameters.P}}, {{workflow.name}},
                              {{tasks.T.outputs.parameters.P}}; in the exit handler also {{workflow.status}}

docs/local-engine.md lists every field of Argo and how it is treated.
``CLUSTER_ONLY`` lists the fields that are accepted and mean nothing on one machine.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

ON_POD: Final = frozenset(
    {
        "affinity",
        "automountServiceAccountToken",
        "executor",
        "hostAliases",
        "metrics",
        "nodeSelector",
        "schedulerName",
        "securityContext",
        "serviceAccountName",
        "tolerations",
    }
)
CLUSTER_ONLY: Final[dict[str, frozenset[str]]] = {
    "Spec": ON_POD
    | {
        "archiveLogs",
        "artifactRepositoryRef",
        "dnsConfig",
        "dnsPolicy",
        "hostNetwork",
        "imagePullSecrets",
        "podDisruptionBudget",
        "podGC",
        "podMetadata",
        "podPriorityClassName",
        "podResources",
        "priority",
        "ttlStrategy",
        "workflowMetadata",
    },
    "Template": ON_POD | {"annotations", "failFast", "metadata", "pendingTimeout", "podResources", "priorityClassName"},
    "Container": frozenset(
        {
            "image",
            "imagePullPolicy",
            "name",
            "ports",
            "securityContext",
            "terminationMessagePath",
            "terminationMessagePolicy",
        }
    ),
    "Outputs": frozenset({"artifacts"}),
    "VolumeMount": frozenset({"readOnly"}),
    "EmptyDir": frozenset({"medium", "sizeLimit"}),
    "RetryStrategy": frozenset({"affinity"}),
    "Metadata": frozenset({"namespace", "labels", "annotations", "generateName"}),
}
"""Fields, by model, that only say where and how a pod runs, or what a cluster keeps of it.

A template's own failFast (its dag has one, too) counts only with parallelism, which is refused.
"""

DURATION_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


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


def _json(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError("not JSON") from error


Text = Annotated[str, BeforeValidator(_text)]
"""A text; numbers and booleans become their JSON text, as in Argo's parameters."""
Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0)]
TaskName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9][-a-zA-Z0-9]*$", max_length=128)]
ParameterName = Annotated[str, Field(pattern=r"^[-a-zA-Z0-9_]+$")]
CacheName = Annotated[str, Field(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$", max_length=253)]


class Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel)

    @model_validator(mode="before")
    @classmethod
    def _drop_what_means_nothing_here(cls, data: object) -> object:
        dropped = CLUSTER_ONLY.get(cls.__name__, frozenset())
        return {key: value for key, value in data.items() if key not in dropped} if isinstance(data, dict) else data


class Parameter(Closed):
    name: ParameterName
    value: Text | None = None
    description: str = ""


class Input(Closed):
    name: ParameterName


class Argument(Closed):
    name: ParameterName
    value: Text


class ValueFrom(Closed):
    path: str = ""
    parameter: str = ""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if bool(self.path) == bool(self.parameter):
            raise ValueError("needs exactly one of path and parameter")
        return self


class OutputParameter(Closed):
    name: ParameterName
    value_from: ValueFrom


class Inputs(Closed):
    parameters: tuple[Input, ...] = ()


class Outputs(Closed):
    parameters: tuple[OutputParameter, ...] = ()


class Arguments(Closed):
    parameters: tuple[Argument, ...] = ()


class SecretKey(Closed):
    name: str
    key: str
    optional: bool = False


class EnvSource(Closed):
    secret_key_ref: SecretKey


class Env(Closed):
    name: str
    value: Text = ""
    value_from: EnvSource | None = None


class Resources(Closed):
    requests: dict[str, Text] = {}
    limits: dict[str, Text] = {}


class VolumeMount(Closed):
    name: str
    mount_path: Annotated[str, Field(pattern="^/.")]


class Container(Closed):
    command: tuple[str, ...] = Field(min_length=1)
    args: tuple[Text, ...] = ()
    env: tuple[Env, ...] = ()
    resources: Resources = Resources()
    volume_mounts: tuple[VolumeMount, ...] = ()

    def secrets(self) -> dict[str, bool]:
        """Whether each secret may be missing, by environment variable."""
        return {each.name: each.value_from.secret_key_ref.optional for each in self.env if each.value_from}


class EmptyDir(Closed):
    pass


class Claim(Closed):
    claim_name: str


class Volume(Closed):
    name: str
    empty_dir: EmptyDir | None = None
    persistent_volume_claim: Claim | None = None


class Task(Closed):
    name: TaskName
    template: str
    arguments: Arguments = Arguments()
    depends: str = ""
    when: str = ""


class Dag(Closed):
    tasks: tuple[Task, ...] = Field(min_length=1)
    fail_fast: Literal[False]
    """Required, because Argo's default is true, and here other branches always continue after a failure."""


class Backoff(Closed):
    duration: Seconds = 0.0
    factor: Annotated[float, Field(gt=0)] = 1.0


class RetryStrategy(Closed):
    limit: Annotated[int, Field(ge=0)]
    """Required: without it Argo never stops, and skips the backoff."""
    retry_policy: Literal["Always"]
    """Required, because Argo's default is OnFailure. The expression decides what is retried."""
    expression: str = ""
    backoff: Backoff = Backoff()


class ConfigMap(Closed):
    name: CacheName


class Cache(Closed):
    config_map: ConfigMap


class Memoize(Closed):
    key: str
    max_age: Seconds | None = None
    cache: Cache


class Mutex(Closed):
    name: Annotated[str, Field(min_length=1)]


class ConfigMapKey(Closed):
    name: str
    key: str


class Semaphore(Closed):
    config_map_key_ref: ConfigMapKey


class Synchronization(Closed):
    mutexes: tuple[Mutex, ...] = ()
    semaphores: tuple[Semaphore, ...] = ()


class Suspend(Closed):
    pass


class PatchedContainer(Closed):
    name: Literal["main"]
    resources: Resources = Resources()


class PatchedVolume(Closed):
    name: str
    empty_dir: EmptyDir = EmptyDir()


class PodSpecPatch(Closed):
    """What changes in a template's pod; the resources of its container mean something here."""

    containers: tuple[PatchedContainer, ...] = ()
    volumes: tuple[PatchedVolume, ...] = ()


class Template(Closed):
    name: TaskName
    inputs: Inputs = Inputs()
    outputs: Outputs = Outputs()
    container: Container | None = None
    dag: Dag | None = None
    suspend: Suspend | None = None
    volumes: tuple[Volume, ...] = ()
    memoize: Memoize | None = None
    retry_strategy: RetryStrategy | None = None
    synchronization: Synchronization = Synchronization()
    active_deadline_seconds: Annotated[float, Field(gt=0)] | None = None
    pod_spec_patch: Annotated[PodSpecPatch, BeforeValidator(_json)] = PodSpecPatch()

    @property
    def resources(self) -> Resources:
        """Its container's resources, with those of its patch in their place, whose values may have references."""
        requests, limits = dict(self.program.resources.requests), dict(self.program.resources.limits)
        for patched in self.pod_spec_patch.containers:
            requests |= patched.resources.requests
            limits |= patched.resources.limits
        return Resources(requests=requests, limits=limits)

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


class WorkflowArguments(Closed):
    parameters: tuple[Parameter, ...] = ()


class Spec(Closed):
    entrypoint: str
    on_exit: str | None = None
    arguments: WorkflowArguments = WorkflowArguments()
    templates: tuple[Template, ...] = Field(min_length=1)
    volumes: tuple[Volume, ...] = ()
    active_deadline_seconds: Annotated[float, Field(gt=0)] | None = None
    synchronization: Synchronization = Synchronization()


class Metadata(Closed):
    name: str = ""


class Manifest(Closed):
    api_version: Literal["argoproj.io/v1alpha1"]
    kind: Literal["WorkflowTemplate", "Workflow"]
    metadata: Metadata
    spec: Spec
