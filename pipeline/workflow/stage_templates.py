"""The container templates of the workflow: one for each stage program, with its resources."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from hera import workflows as hera
from hera.workflows import Env, Parameter, SecretEnv, models

from pipeline.runs.state import LEFT_OUT
from pipeline.settings.platform import AUTOMATIC, STORE_MOUNT, Platform, Stage
from pipeline.workflow import pods
from stages.parts.base import notify
from stages.parts.base.formats import quantized_formats
from stages.parts.base.log import LOG_VARIABLE
from stages.parts.base.program import RUN_VARIABLE
from stages.parts.endpoint.endpoint import API_KEY_VARIABLE
from stages.parts.machine.environment import ENVIRONMENTS
from stages.parts.machine.hardware import GPUS_VARIABLE
from stages.parts.records.rollout import LOCAL
from stages.parts.releases.signing import CERTIFICATE_VARIABLE, KEY_VARIABLE
from stages.rollout.kserve.objects import API_SECRET, API_SECRET_KEY
from stages.rollout.kserve.settings import VARIABLE as KSERVE_VARIABLE

NOTIFY_SECRET: Final = "slipway-notify"  # noqa: S105
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
API_KEY: Final = SecretEnv(name=API_KEY_VARIABLE, secret_name=API_SECRET, secret_key=API_SECRET_KEY, optional=True)
SIGNING_KEY: Final = SecretEnv(name=KEY_VARIABLE, secret_name="slipway-signing-key", secret_key="key", optional=True)  # noqa: S106
SIGNING: Final = SIGNING_KEY, replace(SIGNING_KEY, name=CERTIFICATE_VARIABLE, secret_key="certificate")  # noqa: S106
NOTIFY: Final = SecretEnv(name=notify.VARIABLE, secret_name=NOTIFY_SECRET, secret_key="url", optional=True)  # noqa: S106
"""The address of a web hook; a Secret that people make by hand."""
REGISTRY: Final = [SecretEnv(name=n, secret_name="slipway-mlflow", secret_key=n, optional=True) for n in notify.MLFLOW]  # noqa: S106
RUN_DIRECTORY: Final = "{{workflow.parameters.model-directory}}/runs/{{workflow.name}}"
"""The run's folder, relative to the store."""
PROMOTION: Final = "promotion"
"""The output of select that says whether the winner takes the place of what is in production."""
COMPARED: Final = "compared"
"""The output of deploy that says whether the release is to be compared, step by step, with the one that serves."""
RESULTS: Final = ("winner", "outcome", PROMOTION, "release", "reason", "table")
"""The outputs of select, which are also the outputs of the whole run."""
REWRITING: Final = "optimize-rewrite"
"""The template of variants that are made without calibration, on a platform that gives them resources of their own."""
OPTIMIZE_IN: Final = "optimize-{}"
"""The template of variants that are made in an environment of their own, on a cluster."""
SERVED: Final = "variants"
"""The output of check with the variants to measure, separated by commas."""
SERVING: Final = "serving"
"""The output of check with the serving settings, with a number in place of every *auto*."""
OPTIMIZE_MEMORY: Final = "optimize-memory"
"""The output of check with the memory that a quantizer needs which loads the whole model."""
CANDIDATES: Final = "candidates"
"""The output of check with the candidates to fetch, as JSON; the template and the task that fetch them."""
WITH_CANDIDATES: Final = "fetch"
"""The output of check that says whether there are any."""
EXIT_HANDLER: Final = "end-and-publish"
PUBLISHING: Final = "publish-report"
"""The step of the exit handler that keeps the report in the cluster's artifact repository."""


@dataclass(frozen=True)
class StageTemplate:
    """What the template of one stage program adds to what all of them have."""

    stage: str
    asks: Stage
    arguments: tuple[str, ...]
    name: str = ""
    """The stage's, unless it has several templates."""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    env: tuple[Env | SecretEnv, ...] = ()
    mutex: str | None = None
    environment: str = ""
    """The environment of its own that its image has."""


class Approval(hera.Suspend):  # type: ignore[misc]
    """A step that waits for a person, with its metrics, which Hera leaves out."""

    def _build_template(self) -> models.Template:
        template = super()._build_template()
        template.metrics = self._build_metrics()
        return template


def add_templates(platform: Platform) -> None:
    """Add the templates of all stages to the workflow that is being defined."""
    for template in _templates(platform):
        _add(template, platform)
    if platform.serves_on != LOCAL:
        waiting = pods.metrics_of("approval", "{{duration}}", model=workflow_parameter("model"))
        Approval(name="approve", inputs=[Parameter(name="message")], metrics=waiting if platform.cluster else None)
    _add_exit_handler(platform)


def _templates(platform: Platform) -> Iterator[StageTemplate]:
    stages, hub = platform.stages, (HUB_TOKEN,)
    resolve, commit = _flags("model", "revision"), ("--commit", _input(COMMIT))
    yield StageTemplate("resolve", stages.resolve, resolve, outputs=(COMMIT,), env=hub)
    acquire = (*resolve, *commit, *_flags("serving"))
    yield StageTemplate("acquire", stages.acquire, acquire, inputs=(COMMIT,), outputs=("digest",), env=hub)
    most: tuple[str, ...] = ()
    if platform.most_gpus is not None:
        most = ("--gpus", str(platform.most_gpus), "--memory", stages.evaluate.memory)
        most += ("--optimize-memory", stages.optimize.memory)
    yield StageTemplate(
        "check",
        stages.check,
        (*_flags("model"), *commit, *_flags("settings=optimize", "serving", "workload", "profile"), *most),
        inputs=(COMMIT,),
        outputs=(
            *quantized_formats(),
            *(CANDIDATES, WITH_CANDIDATES, SERVED, SERVING),
            *AUTOMATIC,
            OPTIMIZE_MEMORY,
            LEFT_OUT,
        ),
        env=hub,
    )
    fetch = (*_flags("model"), "--candidates", _input(CANDIDATES))
    yield StageTemplate("acquire", stages.acquire, fetch, CANDIDATES, inputs=(CANDIDATES,), env=hub)
    optimize = (*_flags("model"), "--method", _input("method"), *_flags("settings=optimize"))
    # Rewriting weights may need less than calibrating. An environment of its own is an image on a cluster.
    own = [(OPTIMIZE_IN.format(name), stages.optimize, name) for name in ENVIRONMENTS] if platform.cluster else []
    for name, asks, environment in (("optimize", stages.optimize, ""), (REWRITING, stages.rewrite, ""), *own):
        if asks:
            yield StageTemplate("optimize", asks, optimize, name, ("method",), ("digest",), environment=environment)
    measured = ("--variants", _input(SERVED), *_flags("workload"), "--serving", _input(SERVING))
    yield StageTemplate(
        "evaluate",
        stages.evaluate,
        (*_flags("model"), *measured, *_flags("profile")),
        inputs=(SERVED, SERVING),
        outputs=("summary",),
        env=hub,
        mutex="slipway-evaluation" if platform.one_evaluation_at_a_time else None,
    )
    select = (*_flags("model", "profile", "price", "optimize", "serve"), "--serving", _input(SERVING))
    yield StageTemplate("select", stages.select, select, inputs=(SERVING,), outputs=RESULTS, env=(*SIGNING, *REGISTRY))
    yield _serving_template(platform)


def _serving_template(platform: Platform) -> StageTemplate:
    """Make the template of serve on one machine, or of a step of the rollout on a cluster."""
    stages = platform.stages
    if platform.serves_on == LOCAL:
        serve = _flags("model", "serving", "rollout")
        return StageTemplate("serve", stages.serve, serve, outputs=("url",), env=(API_KEY, *REGISTRY))
    step = ("--target", platform.serves_on, *_flags("settings=rollout"), "--step", _input("step"))
    return StageTemplate(
        "rollout",
        stages.serve,
        (*_flags("model", "serving"), *step, "--approved", _input("approved")),
        inputs=("step", "approved"),
        outputs=("release", "state", "said", "url", COMPARED),
        env=_serving_env(platform),
    )


def _serving_env(platform: Platform) -> tuple[Env | SecretEnv, ...]:
    kserve = Env(name=KSERVE_VARIABLE, value=workflow_parameter("kserve"))
    return (API_KEY, *REGISTRY) if platform.serves_on == LOCAL else (kserve, API_KEY, NOTIFY, *REGISTRY)


def _sized(asks: Stage) -> str | None:
    """Make the patch that gives a pod what check found: Argo replaces references in quantities nowhere else."""
    names = {"gpus": "nvidia.com/gpu", "memory": "memory"}
    amounts = {names[amount]: _input(amount) for amount in asks.automatic if amount in names}
    patch: dict[str, object] = {}
    if amounts:  # "main" is Argo's name for a template's container in the pod
        patch["containers"] = [{"name": "main", "resources": {"requests": amounts, "limits": amounts}}]
    if asks.shm == "auto":
        volume = {"name": pods.SHARED_MEMORY, "emptyDir": {"medium": "Memory", "sizeLimit": _input("shm")}}
        patch["volumes"] = [volume]
    return json.dumps(patch) if patch else None


def _add_exit_handler(platform: Platform) -> None:
    """Add the stage that runs last, and the step, which may fail, that brings the report to its repository."""
    report = platform.stages.report
    flags = _flags("profile", "workload", "optimize", "serving")
    ending = StageTemplate(
        "ending",
        # Withdrawing a canary waits for servers, too.
        report.model_copy(update={"deadline_s": platform.stages.serve.deadline_s}),
        (*_flags("model"), "--status", "{{workflow.status}}", *flags),
        env=_serving_env(platform),
    )
    _add(ending, platform)
    if exit_handler(platform) == ending.stage:
        return
    page = f"{STORE_MOUNT}/{RUN_DIRECTORY}/report.html"
    # Without an archive, Argo's UI shows the page.
    artifact = hera.Artifact(name="report", path=page, archive=hera.NoneArchiveStrategy(), optional=True)
    hera.Container(
        name=PUBLISHING,
        image=platform.image_of(PUBLISHING),
        command=["true"],  # Argo's own container, which ends after it, uploads what it finds
        outputs=[artifact],
        volume_mounts=[models.VolumeMount(name="store", mount_path=STORE_MOUNT)],
        **pods.of_stage(PUBLISHING, report, platform),
    )
    with hera.Steps(name=EXIT_HANDLER):
        hera.Step(name=ending.stage, template=ending.stage)
        hera.Step(name=PUBLISHING, template=PUBLISHING, continue_on=models.ContinueOn(error=True, failed=True))


def exit_handler(platform: Platform) -> str:
    """Return the template that runs last, however a run ended."""
    return EXIT_HANDLER if platform.cluster and platform.cluster.publishes else "ending"


def _add(template: StageTemplate, platform: Platform) -> None:
    stage, asks = template.stage, template.asks
    of_model = workflow_parameter("model") if stage == "rollout" else "none"  # an alert names it
    variant = _input("method") if "method" in template.inputs else of_model
    variables = [Env(name=RUN_VARIABLE, value="{{workflow.name}}")]
    if platform.cluster:
        parts = [stage if stage == "optimize" else template.name or stage]
        parts += [_input(name) for name in template.inputs if name in ("method", "step")]  # one file for each task
        variables.append(Env(name=LOG_VARIABLE, value=f"{STORE_MOUNT}/{RUN_DIRECTORY}/logs/{'-'.join(parts)}.log"))
    if platform.cluster and asks.gpus:  # without them the program refuses to work
        variables.append(Env(name=GPUS_VARIABLE, value=_input("gpus") if asks.gpus == "auto" else str(asks.gpus)))
    hera.Container(
        name=template.name or stage,
        image=platform.image_of(stage, template.environment),
        command=["python", "-m", f"stages.{stage}"],
        args=list(template.arguments),
        env=[*pods.environment(platform, *variables), *template.env],
        inputs=[Parameter(name=name) for name in (*template.inputs, *asks.automatic)],
        outputs=[pods.output(name) for name in template.outputs],
        volumes=pods.shared_memory(asks, platform),
        volume_mounts=pods.mounts(asks, platform),
        pod_spec_patch=_sized(asks),
        termination_message_policy="FallbackToLogsOnError",
        retry_strategy=hera.RetryStrategy(
            limit=platform.retries.limit,
            retry_policy="Always",
            expression=RETRY_EXPRESSION,
            backoff=models.Backoff(duration=str(platform.retries.backoff_s), factor=2),
        ),
        synchronization=pods.synchronization(asks, platform, template.mutex),
        **pods.of_stage(stage, asks, platform, variant=variant),
    )


def _flags(*names: str) -> tuple[str, ...]:
    """Give each workflow parameter as the flag of its name, or of another one: ``flag=parameter``."""
    pairs = (name.partition("=") for name in names)
    return tuple(word for flag, _, name in pairs for word in (f"--{flag}", workflow_parameter(name or flag)))


def workflow_parameter(name: str) -> str:
    return f"{{{{workflow.parameters.{name}}}}}"


def _input(name: str) -> str:
    return f"{{{{inputs.parameters.{name}}}}}"
