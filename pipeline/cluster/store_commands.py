"""The commands that need the store's volume, as WorkflowTemplates: on a cluster ``slipway rollback`` runs in a pod that
has it, whoever asks from wherever, and people can start the most urgent ones in Argo's user interface."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import yaml
from hera.workflows import DAG, Container, Env, Parameter, RawArtifact, Task, WorkflowTemplate, models

from pipeline.cluster.objects import labelled
from pipeline.settings.config import RunConfig
from pipeline.settings.platform import Platform
from pipeline.workflow import pods
from pipeline.workflow.parameters import COMMAND, NAME, store_settings
from pipeline.workflow.pods import titled
from pipeline.workflow.stage_templates import API_KEY, NOTIFY, REGISTRY, workflow_parameter
from stages.parts.base.errors import Degraded
from stages.parts.base.program import PRINTED
from stages.parts.cluster.kinds import Object

INSTALLED: Final = f"{NAME}-settings"
"""The ConfigMap with the settings that hold unless a command brings its own."""
KEY: Final = "config"
SETTINGS: Final = "/settings/config.yaml"
WATCH: Final = f"{NAME}-watch"
COMMANDS: Final = Path(__file__).with_name("store_commands.yaml")


def of(config: RunConfig) -> list[Object]:
    """Compile the WorkflowTemplates and the settings that they have by default, as plain data."""
    data = {KEY: store_settings(config)}
    settings = labelled("ConfigMap", INSTALLED, config.platform.namespace, data=data)
    settings["metadata"]["labels"] |= {"workflows.argoproj.io/configmap-type": "Parameter"}
    commands = yaml.safe_load(COMMANDS.read_text(encoding="utf-8"))
    return [settings, *(_template(config.platform, **command) for command in commands)]


def _template(
    platform: Platform,
    name: str,
    description: str,
    parameters: dict[str, dict[str, str]],
    arguments: list[str],
    program: Sequence[str] = ("python", "-m", "pipeline"),
    stage: str = "rollout",
) -> Object:
    """Compile an entry of ``COMMANDS``, which has the rights of a *stage* and reaches what it does."""
    title = " ".join(word for word in ("slipway", *arguments[:2]) if "{{" not in word)
    default = models.ValueFrom(config_map_key_ref=models.ConfigMapKeySelector(name=INSTALLED, key=KEY))
    config = Parameter(name="config", value_from=default, description="the platform and how it serves, as JSON")
    watches = name == WATCH
    about, of_run = (titled(text, description) for text in (title, " ".join(("slipway", *arguments))))
    with WorkflowTemplate(
        arguments=[*(Parameter(name=parameter, **fields) for parameter, fields in parameters.items()), config],
        **pods.of_workflow(platform, name, about, of_run, metrics=False),
    ) as template:
        asks = platform.stages.serve.model_copy(update={"memory": platform.stages.select.memory})
        # It is not tried again: a second rollback would go back by one release more.
        Container(
            name=COMMAND,
            image=platform.image_of("rollout"),
            command=list(program),
            args=arguments,
            env=[*pods.environment(platform, Env(name="SLIPWAY_CONFIG", value=SETTINGS)), API_KEY, NOTIFY, *REGISTRY],
            inputs=[RawArtifact(name="config", path=SETTINGS, data=workflow_parameter("config"))],
            outputs=[pods.output(PRINTED, default="")],
            volume_mounts=pods.mounts(asks, platform),
            termination_message_policy="FallbackToLogsOnError",
            **pods.of_stage(stage, asks, platform, variant=workflow_parameter("model"), metrics=watches),
        )
        with DAG(name="pipeline"):
            Task(name=COMMAND, template=COMMAND)
            if watches:
                wanted = f"{{{{tasks.{COMMAND}.exitCode}}}} == {Degraded.exit_code} && {workflow_parameter('rollback')}"
                other = models.TemplateRef(name=f"{WATCH}-rollback", template=COMMAND)
                Task(name="rollback", template_ref=other, depends=f"{COMMAND}.Failed", when=f"{wanted} == true")
    compiled: Object = template.to_dict()
    return compiled
