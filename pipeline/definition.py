"""The pipeline, once: a Hera WorkflowTemplate. Argo runs it on a cluster; the local engine runs the same compiled
manifest on one machine.

    resolve - acquire -+- optimize-fp16 - evaluate-fp16 -+
                       +- optimize-awq  - evaluate-awq  -+- select - serve      on exit: report
                       +- optimize-gptq - evaluate-gptq -+

Only fp16 has to succeed; a quantized variant that fails is left out of the selection and named in the report.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Sequence
from typing import Any, Final

from hera.workflows import (
    DAG,
    Container,
    Env,
    Parameter,
    Resources,
    RetryStrategy,
    SecretEnv,
    Task,
    WorkflowTemplate,
    models,
)

from pipeline.config import RunConfig
from pipeline.platform import Platform, Stage
from stages.endpoint import API_KEY_VARIABLE
from stages.hub import is_local, model_id
from stages.program import OUTPUTS_VARIABLE, RUN_VARIABLE
from stages.store import STORE_VARIABLE, canonical_json, directory_name

NAME: Final = "slipway"
STORE_MOUNT: Final = "/mnt/models"
OUTPUTS_MOUNT: Final = "/outputs"
RESOLVE_CACHE: Final = "slipway-resolve"
REQUIRED_VARIANT: Final = "fp16"
RETRY_EXPRESSION: Final = (
    "lastRetry.status == 'Error' || lastRetry.exitCode == '75' || lastRetry.exitCode == '143'"
    " || lastRetry.message matches 'node shutdown|[Ee]vict|[Pp]reempt'"
)
"""75 is our TransientError; 143 and 'Error' are a pod that was deleted or lost. 137 may be out of memory: no retry."""
HUB_TOKEN: Final = SecretEnv(name="HF_TOKEN", secret_name="slipway-hub", secret_key="token", optional=True)  # noqa: S106
API_KEY: Final = SecretEnv(name=API_KEY_VARIABLE, secret_name="slipway-api", secret_key="key", optional=True)  # noqa: S106
DESCRIPTION: Final = (
    "Takes a model's name to a production endpoint: acquires it, makes FP16, AWQ and GPTQ variants, "
    "measures each on vLLM, publishes the best one and serves it."
)


def workflow_template(config: RunConfig) -> dict[str, Any]:
    """The compiled WorkflowTemplate for the configuration's variants and platform, as plain data."""
    platform, variants = config.platform, config.optimize.variants
    with WorkflowTemplate(
        name=NAME,
        namespace=platform.namespace,
        labels={"app.kubernetes.io/name": NAME, "app.kubernetes.io/part-of": NAME},
        annotations={
            "workflows.argoproj.io/title": "{{workflow.parameters.model}}",
            "workflows.argoproj.io/description": DESCRIPTION,
        },
        entrypoint="pipeline",
        on_exit="report",
        arguments=_parameters(config),
        volumes=[
            models.Volume(
                name="store",
                persistent_volume_claim=models.PersistentVolumeClaimVolumeSource(claim_name=platform.claim),
            ),
            models.Volume(name="outputs", empty_dir=models.EmptyDirVolumeSource()),
        ],
        # Two runs of one model would write the same paths; the lock is held until the run's end.
        synchronization=models.Synchronization(
            mutexes=[models.Mutex(name="model-{{workflow.parameters.model-directory}}")]
        ),
    ) as template:
        _stage_templates(platform, variants)
        with DAG(name="pipeline", fail_fast=False):
            _tasks(variants)
    compiled: dict[str, Any] = template.to_dict()
    return compiled


def arguments(config: RunConfig, model: str, revision: str, *, serve: bool, refresh: bool = False) -> dict[str, str]:
    """The workflow's parameters for one run.

    Raises:
        InvalidName: *model* is neither a name on the Hub nor a local directory.
    """
    return {
        "model": model,
        "revision": revision,
        "model-directory": directory_name(model_id(model)),
        "resolve-key": resolve_key(model, revision, refresh=refresh),
        "serve": str(serve).lower(),
        "optimize": canonical_json(config.optimize),
        "workload": canonical_json(config.workload),
        "serving": canonical_json(config.serving),
        "profile": canonical_json(config.profile),
    }


def resolve_key(model: str, revision: str, *, refresh: bool = False) -> str:
    """The memoization key of resolve: a name and revision at one hub. A local directory can change at any time, and
    *refresh* asks again on purpose: then the key is new."""
    if refresh or is_local(model):
        return uuid.uuid4().hex
    hub = os.environ.get("HF_ENDPOINT", "")
    return hashlib.sha256(canonical_json([hub, model, revision]).encode()).hexdigest()


def _parameters(config: RunConfig) -> list[Parameter]:
    return [
        Parameter(name="model", description="name on the Hugging Face Hub, such as org/name"),
        Parameter(name="revision", value="main", description="branch, tag or commit"),
        Parameter(name="model-directory", description="the model's directory in the store: org--name"),
        Parameter(name="resolve-key", description="sha256 of hub, model and revision: the commit is cached under it"),
        Parameter(name="serve", value="true", description="false: stop once the winner is published"),
        Parameter(name="optimize", value=canonical_json(config.optimize), description="optimize settings as JSON"),
        Parameter(name="workload", value=canonical_json(config.workload), description="the workload as JSON"),
        Parameter(name="serving", value=canonical_json(config.serving), description="serving settings as JSON"),
        Parameter(name="profile", value=canonical_json(config.profile), description="the scoring profile as JSON"),
    ]


def _stage_templates(platform: Platform, variants: Sequence[str]) -> None:
    stages = platform.stages
    _container(
        "resolve",
        stages.resolve,
        platform,
        ["--model", _workflow("model"), "--revision", _workflow("revision")],
        outputs=["commit"],
        secrets=[HUB_TOKEN],
        memoize=models.Memoize(
            key=_workflow("resolve-key"),
            max_age="24h",
            cache=models.Cache(config_map=models.LocalObjectReference(name=RESOLVE_CACHE)),
        ),
    )
    _container(
        "acquire",
        stages.acquire,
        platform,
        ["--model", _workflow("model"), "--revision", _workflow("revision"), "--commit", _input("commit")],
        inputs=["commit"],
        outputs=["digest"],
        secrets=[HUB_TOKEN],
    )
    _container(
        "optimize",
        stages.optimize,
        platform,
        ["--model", _workflow("model"), "--method", _input("method"), "--settings", _workflow("optimize")],
        inputs=["method"],
        outputs=["digest"],
    )
    _container(
        "evaluate",
        stages.evaluate,
        platform,
        [
            *("--model", _workflow("model"), "--variant", _input("variant")),
            *("--workload", _workflow("workload"), "--serving", _workflow("serving")),
        ],
        inputs=["variant"],
        outputs=["summary"],
        secrets=[HUB_TOKEN],
        mutex="slipway-evaluation" if platform.one_evaluation_at_a_time else None,
    )
    _container(
        "select",
        stages.select,
        platform,
        ["--model", _workflow("model"), "--profile", _workflow("profile"), "--variants", ",".join(variants)],
        outputs=["winner", "release", "reason"],
    )
    _container(
        "serve",
        stages.serve,
        platform,
        ["--model", _workflow("model"), "--serving", _workflow("serving")],
        outputs=["url"],
        secrets=[API_KEY],
    )
    _container("report", stages.report, platform, ["--model", _workflow("model"), "--status", "{{workflow.status}}"])


def _container(
    stage: str,
    asks: Stage,
    platform: Platform,
    arguments: list[str],
    *,
    inputs: Sequence[str] = (),
    outputs: Sequence[str] = (),
    secrets: Sequence[SecretEnv] = (),
    memoize: models.Memoize | None = None,
    mutex: str | None = None,
) -> None:
    """One stage program as a container template."""
    environment = [
        Env(name=STORE_VARIABLE, value=STORE_MOUNT),
        Env(name=OUTPUTS_VARIABLE, value=OUTPUTS_MOUNT),
        Env(name=RUN_VARIABLE, value="{{workflow.name}}"),
    ]
    Container(
        name=stage,
        image=platform.image,
        command=["python", "-m", f"stages.{stage}"],
        args=arguments,
        env=[*environment, *secrets],
        inputs=[Parameter(name=name) for name in inputs],
        outputs=[Parameter(name=name, value_from=models.ValueFrom(path=f"{OUTPUTS_MOUNT}/{name}")) for name in outputs],
        volume_mounts=[
            models.VolumeMount(name="store", mount_path=STORE_MOUNT),
            models.VolumeMount(name="outputs", mount_path=OUTPUTS_MOUNT),
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
        memoize=memoize,
        synchronization=models.Synchronization(mutexes=[models.Mutex(name=mutex)]) if mutex else None,
    )


def _tasks(variants: Sequence[str]) -> None:
    Task(name="resolve", template="resolve")
    commit = "{{tasks.resolve.outputs.parameters.commit}}"
    Task(name="acquire", template="acquire", arguments={"commit": commit}, depends="resolve")
    for variant in variants:
        Task(name=f"optimize-{variant}", template="optimize", arguments={"method": variant}, depends="acquire")
        Task(
            name=f"evaluate-{variant}",
            template="evaluate",
            arguments={"variant": variant},
            depends=f"optimize-{variant}",
        )
    Task(name="select", template="select", depends=" && ".join(_over(variant) for variant in variants))
    Task(name="serve", template="serve", depends="select", when=f"{_workflow('serve')} == true")


def _over(variant: str) -> str:
    task = f"evaluate-{variant}"
    if variant == REQUIRED_VARIANT:
        return f"{task}.Succeeded"
    return f"({task}.Succeeded || {task}.Failed || {task}.Errored || {task}.Omitted)"


def _workflow(parameter: str) -> str:
    return f"{{{{workflow.parameters.{parameter}}}}}"


def _input(parameter: str) -> str:
    return f"{{{{inputs.parameters.{parameter}}}}}"
