"""The commands that need the store's volume, as WorkflowTemplates: on a cluster ``slipway rollback`` runs in a pod that
has it, whoever asks from wherever, and people can start the most urgent ones in Argo's user interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hera.workflows import (
    DAG,
    Container,
    Env,
    Parameter,
    RawArtifact,
    Resources,
    Task,
    WorkflowTemplate,
    models,
)

from pipeline.cluster.objects import LABELS
from pipeline.settings.platform import STORE_MOUNT
from pipeline.workflow import pods
from pipeline.workflow.parameters import COMMAND, NAME, STORE_COMMAND, store_settings
from pipeline.workflow.stage_templates import API_KEY, OUTPUTS_MOUNT, workflow_parameter
from stages.parts.base.program import OUTPUTS_VARIABLE, PRINTED
from stages.parts.base.store import STORE_VARIABLE

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig
    from pipeline.settings.platform import Platform

INSTALLED: Final = f"{NAME}-settings"
"""The ConfigMap with the settings that hold unless a command brings its own."""
KEY: Final = "config"
SETTINGS: Final = "/settings/config.yaml"
CONFIG_VARIABLE: Final = "SLIPWAY_CONFIG"
PARSED: Final = "import json, sys; from pipeline.cli import main; sys.argv[1:] = json.loads(sys.argv[1]); main()"
MODEL: Final = Parameter(name="model", description="a model that a run has published, such as org/name")


@dataclass(frozen=True)
class StoreCommand:
    name: str
    description: str
    program: tuple[str, ...]
    arguments: tuple[str, ...]
    parameters: tuple[Parameter, ...]


def _slipway(name: str, description: str, *arguments: str, further: tuple[Parameter, ...] = ()) -> StoreCommand:
    """A command of its own, with a form of its own in Argo's user interface."""
    program = ("python", "-m", "pipeline")
    return StoreCommand(f"{NAME}-{name}", description, program, arguments, (MODEL, *further))


COMMANDS: Final = (
    StoreCommand(
        STORE_COMMAND,
        'Runs a command of Slipway that needs the volume with the models, such as `["releases", "org/name"]`.',
        ("python", "-c", PARSED),
        (workflow_parameter("arguments"),),
        (Parameter(name="arguments", description="the command's words as a JSON list"),),
    ),
    _slipway(
        "rollback",
        "Goes back to an earlier release: all traffic moves to it as soon as it answers.",
        *("rollback", workflow_parameter("model"), "--to", workflow_parameter("to")),
        further=(Parameter(name="to", value="", description="a release's number or name; empty: the one before"),),
    ),
    _slipway(
        "rollout-promote",
        "Approves the rollout in progress, and skips its waiting times.",
        *("rollout", "promote", workflow_parameter("model")),
    ),
    _slipway(
        "rollout-abort",
        "Aborts the rollout in progress: all traffic goes back to the stable release.",
        *("rollout", "abort", workflow_parameter("model")),
    ),
    _slipway("releases", "Lists a model's releases.", "releases", workflow_parameter("model")),
)


def of(config: RunConfig) -> list[dict[str, Any]]:
    """The compiled WorkflowTemplates and the settings that they have by default, as plain data."""
    labels = LABELS | {"workflows.argoproj.io/configmap-type": "Parameter"}
    metadata = {"name": INSTALLED, "namespace": config.platform.namespace, "labels": labels}
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {KEY: store_settings(config)}}
    return [settings, *(_template(each, config.platform) for each in COMMANDS)]


def _template(command: StoreCommand, platform: Platform) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": command.name, "app.kubernetes.io/part-of": NAME}
    title = " ".join(each for each in ("slipway", *command.arguments[:2]) if "{{" not in each)
    about = {"workflows.argoproj.io/title": title, "workflows.argoproj.io/description": command.description}
    placed = pods.of_workflow(platform)
    placed.pop("metrics", None)  # it is no run
    with WorkflowTemplate(
        name=command.name,
        namespace=platform.namespace,
        labels=labels,
        annotations=about,
        workflow_metadata=models.WorkflowMetadata(
            labels={"app.kubernetes.io/part-of": NAME},
            annotations=about | {"workflows.argoproj.io/title": " ".join(("slipway", *command.arguments))},
        ),
        entrypoint="pipeline",
        arguments=[
            *command.parameters,
            Parameter(
                name="config",
                value_from=models.ValueFrom(config_map_key_ref=models.ConfigMapKeySelector(name=INSTALLED, key=KEY)),
                description="the platform and how it serves, as JSON",
            ),
        ],
        volumes=[
            models.Volume(
                name="store",
                persistent_volume_claim=models.PersistentVolumeClaimVolumeSource(claim_name=platform.claim),
            ),
            models.Volume(name="outputs", empty_dir=models.EmptyDirVolumeSource()),
            *pods.volumes(platform),
        ],
        **placed,
    ) as template:
        _add_container(command, platform)
        with DAG(name="pipeline"):
            Task(name=COMMAND, template=COMMAND)
    compiled: dict[str, Any] = template.to_dict()
    return compiled


def _add_container(command: StoreCommand, platform: Platform) -> None:
    """It is not tried again: a second rollback would go back by one release more."""
    asks = platform.stages.serve.model_copy(update={"memory": platform.stages.select.memory})
    stage = pods.of_stage("rollout", asks, platform, variant=None)  # with its rights, and what it may reach
    stage.pop("metrics", None)
    Container(
        name=COMMAND,
        image=platform.image_of("rollout"),
        command=list(command.program),
        args=list(command.arguments),
        env=[
            Env(name=STORE_VARIABLE, value=STORE_MOUNT),
            Env(name=OUTPUTS_VARIABLE, value=OUTPUTS_MOUNT),
            Env(name=CONFIG_VARIABLE, value=SETTINGS),
            *pods.environment(platform),
            API_KEY,
        ],
        inputs=[RawArtifact(name="config", path=SETTINGS, data=workflow_parameter("config"))],
        outputs=[Parameter(name=PRINTED, value_from=models.ValueFrom(path=f"{OUTPUTS_MOUNT}/{PRINTED}", default=""))],
        volume_mounts=[
            models.VolumeMount(name="store", mount_path=STORE_MOUNT),
            models.VolumeMount(name="outputs", mount_path=OUTPUTS_MOUNT),
            *pods.mounts(asks, platform),
        ],
        resources=Resources(cpu_request=asks.cpu, memory_request=asks.memory, memory_limit=asks.memory),
        active_deadline_seconds=asks.deadline_s,
        termination_message_policy="FallbackToLogsOnError",
        **stage,
    )
