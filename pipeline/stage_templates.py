"""The container templates of the workflow: one for each stage program, with its resources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, get_args

from hera.workflows import (
    Artifact,
    Container,
    Env,
    NoneArchiveStrategy,
    Parameter,
    Resources,
    RetryStrategy,
    SecretEnv,
    Suspend,
    models,
)

from pipeline import pods
from pipeline.platform import Platform, Stage
from stages.parts.base.program import OUTPUTS_VARIABLE, RUN_VARIABLE
from stages.parts.base.settings import REFERENCE, VariantName
from stages.parts.base.store import STORE_VARIABLE
from stages.parts.endpoint.record import API_KEY_VARIABLE
from stages.parts.records.rollout import LOCAL
from stages.rollout.kserve.settings import VARIABLE as KSERVE_VARIABLE

STORE_MOUNT: Final = "/mnt/models"
OUTPUTS_MOUNT: Final = "/outputs"
RESOLVE_CACHE: Final = "slipway-resolve"
RETRY_EXPRESSION: Final = (
    "lastRetry.status == 'Error' || lastRetry.exitCode == '75' || lastRetry.exitCode == '143'"
    " || lastRetry.message matches 'node shutdown|[Ee]vict|[Pp]reempt'"
)
"""75 is TransientError; 143 and 'Error' mean that a pod was deleted or lost. 137 may mean out of memory: no retry."""
HUB_TOKEN: Final = SecretEnv(name="HF_TOKEN", secret_name="slipway-hub", secret_key="token", optional=True)  # noqa: S106
API_KEY: Final = SecretEnv(name=API_KEY_VARIABLE, secret_name="slipway-api", secret_key="key", optional=True)  # noqa: S106
RUN_DIRECTORY: Final = "{{workflow.parameters.model-directory}}/runs/{{workflow.name}}"
"""The run's folder, relative to the store."""
RESULTS: Final = ("winner", "release", "reason", "table")
"""The outputs of select, which are also the outputs of the whole run."""
QUANTIZED: Final = tuple(name for name in get_args(VariantName) if name != REFERENCE)
"""Every variant that check may leave out. Its outputs of these names are ``true`` for those to make."""
REWRITTEN: Final = (REFERENCE, "int8")
"""The variants that are made without calibration, one block of the weights after another."""
REWRITING: Final = "optimize-rewrite"
"""Their template, on a platform that gives them resources of their own."""
SERVED: Final = "variants"
"""The output of check with the variants to measure, separated by commas."""
MODEL: Final = ("--model", "{{workflow.parameters.model}}")


@dataclass(frozen=True)
class StageTemplate:
    """What the template of one stage program adds to what all of them have."""

    stage: str
    asks: Stage
    arguments: tuple[str, ...]
    name: str = ""
    """Empty: named after the stage."""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    secrets: tuple[SecretEnv, ...] = ()
    variables: tuple[Env, ...] = ()
    memoize: models.Memoize | None = None
    mutex: str | None = None
    artifacts: tuple[Artifact, ...] = ()


def add_templates(platform: Platform) -> None:
    """Add the templates of all stages to the workflow that is being defined."""
    for template in (
        _resolve(platform),
        _acquire(platform),
        _check(platform),
        *_optimize(platform),
        _evaluate(platform),
        _select(platform),
    ):
        _add(template, platform)
    _add_serving(platform)
    _add(_report(platform), platform)


def optimizing(platform: Platform) -> dict[str, Stage]:
    """The templates of optimize and the resources of each: rewriting weights may need less than calibrating."""
    stages = platform.stages
    return {"optimize": stages.optimize} | ({REWRITING: stages.rewrite} if stages.rewrite else {})


def _resolve(platform: Platform) -> StageTemplate:
    return StageTemplate(
        "resolve",
        platform.stages.resolve,
        (*MODEL, "--revision", workflow_parameter("revision")),
        outputs=("commit",),
        secrets=(HUB_TOKEN,),
        memoize=models.Memoize(
            key=workflow_parameter("resolve-key"),
            max_age="24h",
            cache=models.Cache(config_map=models.LocalObjectReference(name=RESOLVE_CACHE)),
        ),
    )


def _acquire(platform: Platform) -> StageTemplate:
    return StageTemplate(
        "acquire",
        platform.stages.acquire,
        (*MODEL, "--revision", workflow_parameter("revision"), "--commit", _input("commit")),
        inputs=("commit",),
        outputs=("digest",),
        secrets=(HUB_TOKEN,),
    )


def _check(platform: Platform) -> StageTemplate:
    return StageTemplate(
        "check",
        platform.stages.check,
        (*MODEL, "--settings", workflow_parameter("optimize")),
        outputs=(*QUANTIZED, SERVED, "left-out"),
    )


def _optimize(platform: Platform) -> list[StageTemplate]:
    return [
        StageTemplate(
            "optimize",
            asks,
            (*MODEL, "--method", _input("method"), "--settings", workflow_parameter("optimize")),
            name=name,
            inputs=("method",),
            outputs=("digest",),
        )
        for name, asks in optimizing(platform).items()
    ]


def _evaluate(platform: Platform) -> StageTemplate:
    return StageTemplate(
        "evaluate",
        platform.stages.evaluate,
        (
            *(*MODEL, "--variants", _input("variants")),
            *("--workload", workflow_parameter("workload"), "--serving", workflow_parameter("serving")),
        ),
        inputs=("variants",),
        outputs=("summary",),
        secrets=(HUB_TOKEN,),
        mutex="slipway-evaluation" if platform.one_evaluation_at_a_time else None,
    )


def _select(platform: Platform) -> StageTemplate:
    return StageTemplate(
        "select",
        platform.stages.select,
        (
            *(*MODEL, "--profile", workflow_parameter("profile")),
            *("--price", workflow_parameter("price"), "--optimize", workflow_parameter("optimize")),
            *("--serve", workflow_parameter("serve")),
        ),
        outputs=RESULTS,
    )


def _report(platform: Platform) -> StageTemplate:
    return StageTemplate(
        "report",
        platform.stages.report,
        (
            *(*MODEL, "--status", "{{workflow.status}}"),
            *("--profile", workflow_parameter("profile"), "--workload", workflow_parameter("workload")),
            *("--optimize", workflow_parameter("optimize"), "--serving", workflow_parameter("serving")),
        ),
        artifacts=_report_artifact(platform),
    )


def _add_serving(platform: Platform) -> None:
    """Add the templates that roll a release out, and the one that withdraws it from a run that failed."""
    asks, model = platform.stages.serve, (*MODEL, "--serving", workflow_parameter("serving"))
    rollout = workflow_parameter("rollout")
    if platform.serves_on == LOCAL:
        variables: tuple[Env, ...] = ()
        arguments = (*model, "--rollout", rollout)
        _add(StageTemplate("serve", asks, arguments, outputs=("url",), secrets=(API_KEY,)), platform)
    else:
        variables = (Env(name=KSERVE_VARIABLE, value=workflow_parameter("kserve")),)
        step = ("--target", platform.serves_on, "--settings", rollout, "--step", _input("step"))
        template = StageTemplate(
            "rollout",
            asks,
            (*model, *step, "--approved", _input("approved")),
            inputs=("step", "approved"),
            outputs=("release", "state", "url"),
            secrets=(API_KEY,),
            variables=variables,
        )
        _add(template, platform)
        Suspend(name="approve")
    withdraw = StageTemplate(
        "rollout",
        # Withdrawing waits for servers, too.
        platform.stages.report.model_copy(update={"deadline_s": asks.deadline_s}),
        (*model, "--abort", "--status", "{{workflow.status}}"),
        name="withdraw",
        secrets=(API_KEY,),
        variables=variables,
    )
    _add(withdraw, platform)


def _add(template: StageTemplate, platform: Platform) -> None:
    stage, asks = template.stage, template.asks
    variant = next((_input(name) for name in template.inputs if name == "method"), None)
    Container(
        name=template.name or stage,
        image=platform.image_of(stage),
        command=["python", "-m", f"stages.{stage}"],
        args=list(template.arguments),
        env=_environment(template, platform),
        inputs=[Parameter(name=name) for name in template.inputs],
        outputs=_outputs(template),
        volumes=pods.shared_memory(asks, platform),
        volume_mounts=[
            models.VolumeMount(name="store", mount_path=STORE_MOUNT),
            models.VolumeMount(name="outputs", mount_path=OUTPUTS_MOUNT),
            *pods.scratch_mounts(asks, platform),
        ],
        resources=Resources(
            cpu_request=asks.cpu, memory_request=asks.memory, memory_limit=asks.memory, gpus=asks.gpus or None
        ),
        active_deadline_seconds=asks.deadline_s,
        termination_message_policy="FallbackToLogsOnError",
        retry_strategy=RetryStrategy(
            limit=platform.retries.limit,
            retry_policy="Always",
            expression=RETRY_EXPRESSION,
            backoff=models.Backoff(duration=str(platform.retries.backoff_s), factor=2),
        ),
        memoize=template.memoize,
        synchronization=_synchronization(template, platform),
        **pods.of_stage(stage, asks, platform, variant=variant),
    )


def _environment(template: StageTemplate, platform: Platform) -> list[Env | SecretEnv]:
    return [
        Env(name=STORE_VARIABLE, value=STORE_MOUNT),
        Env(name=OUTPUTS_VARIABLE, value=OUTPUTS_MOUNT),
        Env(name=RUN_VARIABLE, value="{{workflow.name}}"),
        *pods.environment(platform),
        *template.variables,
        *template.secrets,
    ]


def _outputs(template: StageTemplate) -> list[Parameter | Artifact]:
    written = (
        Parameter(name=name, value_from=models.ValueFrom(path=f"{OUTPUTS_MOUNT}/{name}")) for name in template.outputs
    )
    return [*written, *template.artifacts]


def _synchronization(template: StageTemplate, platform: Platform) -> models.Synchronization | None:
    semaphores = pods.gpu_semaphore(template.asks, platform)
    mutexes = [models.Mutex(name=template.mutex)] if template.mutex else None
    return models.Synchronization(mutexes=mutexes, semaphores=semaphores) if mutexes or semaphores else None


def _report_artifact(platform: Platform) -> tuple[Artifact, ...]:
    """The report's page, not compressed so that Argo's UI shows it. None if the platform has no artifact repository."""
    if platform.cluster is None or platform.cluster.artifact_repository is None:
        return ()
    path = f"{STORE_MOUNT}/{RUN_DIRECTORY}/report.html"
    return (Artifact(name="report", path=path, archive=NoneArchiveStrategy(), optional=True),)


def workflow_parameter(name: str) -> str:
    """A reference to a parameter of the workflow."""
    return f"{{{{workflow.parameters.{name}}}}}"


def _input(name: str) -> str:
    return f"{{{{inputs.parameters.{name}}}}}"
