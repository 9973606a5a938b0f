"""The container templates of the workflow: one for each stage program, with its resources."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from hera.workflows import (
    Artifact,
    Container,
    Env,
    NoneArchiveStrategy,
    Parameter,
    Resources,
    RetryStrategy,
    SecretEnv,
    Step,
    Steps,
    Suspend,
    models,
)

from pipeline.settings.platform import AUTOMATIC, STORE_MOUNT, Platform, Stage
from pipeline.workflow import pods
from stages.parts.base.formats import quantized_formats
from stages.parts.base.log import LOG_VARIABLE
from stages.parts.base.program import OUTPUTS_VARIABLE, RUN_VARIABLE
from stages.parts.base.store import STORE_VARIABLE
from stages.parts.endpoint.endpoint import API_KEY_VARIABLE
from stages.parts.machine.hardware import GPUS_VARIABLE
from stages.parts.records.rollout import LOCAL
from stages.rollout.kserve.settings import VARIABLE as KSERVE_VARIABLE

OUTPUTS_MOUNT: Final = "/outputs"
RESOLVED: Final = "resolve-daily"
"""The memoized DAG around resolve. Argo never ends a run with a hit in a template that has a retryStrategy itself."""
COMMIT: Final = "commit"
RETRY_EXPRESSION: Final = (
    "lastRetry.status == 'Error' || lastRetry.exitCode == '75' || lastRetry.exitCode == '143'"
    " || lastRetry.message matches"
    " 'node shutdown|[Ee]vict|[Pp]reempt|node was low on resource|node had condition|^Pod was rejected'"
)
"""75 is TransientError; 143 and 'Error' mean that a pod was deleted or lost. 137 may mean out of memory: no retry. The
messages are the kubelet's, which ended the pod for the sake of its node, or never took it."""
HUB_TOKEN: Final = SecretEnv(name="HF_TOKEN", secret_name="slipway-hub", secret_key="token", optional=True)  # noqa: S106
API_KEY: Final = SecretEnv(name=API_KEY_VARIABLE, secret_name="slipway-api", secret_key="key", optional=True)  # noqa: S106
RUN_DIRECTORY: Final = "{{workflow.parameters.model-directory}}/runs/{{workflow.name}}"
"""The run's folder, relative to the store."""
COMPARED: Final = "compared"
"""The output of deploy that says whether the release is to be compared, step by step, with the one that serves."""
RESULTS: Final = ("winner", "outcome", "release", "reason", "table")
"""The outputs of select, which are also the outputs of the whole run."""
REWRITING: Final = "optimize-rewrite"
"""The template of variants that are made without calibration, on a platform that gives them resources of their own."""
SERVED: Final = "variants"
"""The output of check with the variants to measure, separated by commas."""
SERVING: Final = "serving"
"""The output of check with the serving settings, with a number in place of every *auto*."""
EXIT_HANDLER: Final = "end-and-publish"
PUBLISHING: Final = "publish-report"
"""The step of the exit handler that keeps the report in the cluster's artifact repository."""
MAIN: Final = "main"
"""Argo's name for a template's container in the pod."""
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
    mutex: str | None = None
    pod_spec_patch: str | None = None


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


def optimizing(platform: Platform) -> dict[str, Stage]:
    """The templates of optimize and the resources of each: rewriting weights may need less than calibrating."""
    stages = platform.stages
    return {"optimize": stages.optimize} | ({REWRITING: stages.rewrite} if stages.rewrite else {})


def _resolve(platform: Platform) -> StageTemplate:
    return StageTemplate(
        "resolve",
        platform.stages.resolve,
        (*MODEL, "--revision", workflow_parameter("revision")),
        outputs=(COMMIT,),
        secrets=(HUB_TOKEN,),
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
    most = () if platform.most_gpus is None else ("--gpus", str(platform.most_gpus))
    return StageTemplate(
        "check",
        platform.stages.check,
        (
            *(*MODEL, "--commit", _input("commit"), "--settings", workflow_parameter("optimize")),
            *("--serving", workflow_parameter("serving"), "--workload", workflow_parameter("workload"), *most),
        ),
        inputs=("commit",),
        outputs=(*quantized_formats(), SERVED, SERVING, *AUTOMATIC, "left-out"),
        secrets=(HUB_TOKEN,),
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
    asks = platform.stages.evaluate
    return StageTemplate(
        "evaluate",
        asks,
        (
            *(*MODEL, "--variants", _input(SERVED)),
            *("--workload", workflow_parameter("workload"), "--serving", _input(SERVING)),
            *("--profile", workflow_parameter("profile")),
        ),
        inputs=(SERVED, SERVING, *asks.automatic),
        outputs=("summary",),
        pod_spec_patch=_sized(asks),
        secrets=(HUB_TOKEN,),
        mutex="slipway-evaluation" if platform.one_evaluation_at_a_time else None,
    )


def _sized(asks: Stage) -> str | None:
    """The patch that gives a pod what check found: Argo replaces references in quantities nowhere else."""
    names = {"gpus": "nvidia.com/gpu", "memory": "memory"}
    amounts = {names[each]: _input(each) for each in asks.automatic if each in names}
    patch: dict[str, object] = {}
    if amounts:
        patch["containers"] = [{"name": MAIN, "resources": {"requests": amounts, "limits": amounts}}]
    if asks.shm == "auto":
        volume = {"name": pods.SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": _input("shm")}}
        patch["volumes"] = [volume]
    return json.dumps(patch) if patch else None


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


def _ending(platform: Platform, variables: tuple[Env, ...]) -> StageTemplate:
    """The exit handler."""
    return StageTemplate(
        "ending",
        # Withdrawing waits for servers, too.
        platform.stages.report.model_copy(update={"deadline_s": platform.stages.serve.deadline_s}),
        (
            *(*MODEL, "--status", "{{workflow.status}}"),
            *("--profile", workflow_parameter("profile"), "--workload", workflow_parameter("workload")),
            *("--optimize", workflow_parameter("optimize"), "--serving", workflow_parameter("serving")),
        ),
        secrets=(API_KEY,),
        variables=variables,
    )


def _add_exit_handler(ending: StageTemplate, platform: Platform) -> None:
    """Add the exit handler, and the step that brings the report to its repository: if it fails, the run does not."""
    _add(ending, platform)
    if platform.cluster is None or not platform.cluster.publishes:
        return
    report = Artifact(
        name="report",
        path=f"{STORE_MOUNT}/{RUN_DIRECTORY}/report.html",
        archive=NoneArchiveStrategy(),  # so that Argo's UI shows the page
        optional=True,
    )
    asks = platform.stages.report
    Container(
        name=PUBLISHING,
        image=platform.image_of(PUBLISHING),
        command=["true"],  # Argo's own container, which ends after it, uploads what it finds
        outputs=[report],
        volume_mounts=[models.VolumeMount(name="store", mount_path=STORE_MOUNT)],
        resources=_resources(asks),
        active_deadline_seconds=asks.deadline_s,
        **pods.of_stage(PUBLISHING, asks, platform, variant=None),
    )
    with Steps(name=EXIT_HANDLER):
        Step(name=ending.stage, template=ending.stage)
        Step(name=PUBLISHING, template=PUBLISHING, continue_on=models.ContinueOn(error=True, failed=True))


def exit_handler(platform: Platform) -> str:
    """The template that runs last, however a run ended."""
    return EXIT_HANDLER if platform.cluster and platform.cluster.publishes else "ending"


def _add_serving(platform: Platform) -> None:
    """Add the templates that roll a release out, and the exit handler, which withdraws it from a run that failed."""
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
            outputs=("release", "state", "said", "url", COMPARED),
            secrets=(API_KEY,),
            variables=variables,
        )
        _add(template, platform)
        Suspend(name="approve", inputs=[Parameter(name="message")])
    _add_exit_handler(_ending(platform, variables), platform)


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
            *pods.mounts(asks, platform),
        ],
        resources=_resources(asks),
        pod_spec_patch=template.pod_spec_patch,
        active_deadline_seconds=asks.deadline_s,
        termination_message_policy="FallbackToLogsOnError",
        retry_strategy=RetryStrategy(
            limit=platform.retries.limit,
            retry_policy="Always",
            expression=RETRY_EXPRESSION,
            backoff=models.Backoff(duration=str(platform.retries.backoff_s), factor=2),
        ),
        synchronization=_synchronization(template, platform),
        **pods.of_stage(stage, asks, platform, variant=variant),
    )


def _resources(asks: Stage) -> Resources:
    memory = None if asks.memory == "auto" else asks.memory
    gpus = asks.gpus if isinstance(asks.gpus, int) else 0
    return Resources(cpu_request=asks.cpu, memory_request=memory, memory_limit=memory, gpus=gpus or None)


def _environment(template: StageTemplate, platform: Platform) -> list[Env | SecretEnv]:
    return [
        Env(name=STORE_VARIABLE, value=STORE_MOUNT),
        Env(name=OUTPUTS_VARIABLE, value=OUTPUTS_MOUNT),
        Env(name=RUN_VARIABLE, value="{{workflow.name}}"),
        *(
            [Env(name=LOG_VARIABLE, value=f"{STORE_MOUNT}/{RUN_DIRECTORY}/logs/{_log(template)}")]
            if platform.cluster
            else []
        ),
        *_gpus(template.asks, platform),
        *pods.environment(platform),
        *template.variables,
        *template.secrets,
    ]


def _gpus(asks: Stage, platform: Platform) -> list[Env]:
    """How many GPUs a pod gets, so that its program refuses to work without them."""
    if platform.cluster is None or not asks.gpus:
        return []
    return [Env(name=GPUS_VARIABLE, value=_input("gpus") if asks.gpus == "auto" else str(asks.gpus))]


def _log(template: StageTemplate) -> str:
    """The file of a pod's log: one for each task."""
    which = (f"-{_input(name)}" for name in template.inputs if name in ("method", "step"))
    return f"{'optimize' if template.stage == 'optimize' else template.name or template.stage}{''.join(which)}.log"


def _outputs(template: StageTemplate) -> list[Parameter]:
    paths = {name: models.ValueFrom(path=f"{OUTPUTS_MOUNT}/{name}") for name in template.outputs}
    return [Parameter(name=name, value_from=path) for name, path in paths.items()]


def _synchronization(template: StageTemplate, platform: Platform) -> models.Synchronization | None:
    semaphores = pods.gpu_semaphore(template.asks, platform)
    mutexes = [models.Mutex(name=template.mutex)] if template.mutex else None
    return models.Synchronization(mutexes=mutexes, semaphores=semaphores) if mutexes or semaphores else None


def workflow_parameter(name: str) -> str:
    """A reference to a parameter of the workflow."""
    return f"{{{{workflow.parameters.{name}}}}}"


def _input(name: str) -> str:
    return f"{{{{inputs.parameters.{name}}}}}"
