"""``slipway watch`` on a cluster: a CronWorkflow that looks at each model every five minutes. The pod that looks may
only read; at an alarm another one may roll back, and that is all that the workflow can do."""

from __future__ import annotations

from typing import Final

from hera.workflows import DAG, Parameter, SecretEnv, Task, WorkflowTemplate, models

from pipeline.cluster.objects import labelled
from pipeline.cluster.store_commands import container_of, settings_parameter
from pipeline.settings.config import RunConfig
from pipeline.workflow import pods
from pipeline.workflow.parameters import NAME
from pipeline.workflow.pods import titled
from pipeline.workflow.stage_templates import workflow_parameter
from stages.parts.base.errors import Degraded
from stages.parts.base.program import PRINTED
from stages.parts.cluster.kinds import Object
from stages.parts.records.watch import ALARM

WATCH: Final = f"{NAME}-watch"
SCHEDULE: Final = "*/5 * * * *"
NOTIFY: Final = SecretEnv(name="SLIPWAY_NOTIFY", secret_name="slipway-notify", secret_key="url", optional=True)  # noqa: S106
"""Where an alarm is posted; a Secret that people make by hand."""
MODELS: Final = Parameter(name="models", description="models in production, as a JSON list")
ROLLBACK: Final = Parameter(name="rollback", description="true: at an alarm, roll back to a release that is sound")


def of(config: RunConfig) -> list[Object]:
    """Compile the WorkflowTemplate, and the CronWorkflow that starts it once people have named their models."""
    platform = config.platform
    about = titled("slipway watch", "Looks whether what serves still is what was released.")
    model, given = Parameter(name="model"), [Parameter(name="model", value="{{inputs.parameters.model}}")]
    words = ("watch", "{{inputs.parameters.model}}", "--once")
    with WorkflowTemplate(
        arguments=[MODELS, ROLLBACK, settings_parameter()],
        parallelism=1,  # two loads at a time would look like a change
        **pods.of_workflow(platform, WATCH, about, about, metrics=False),
    ) as template:
        look = container_of(platform, "look", words, stage="watch", inputs=[model], env=[NOTIFY])
        look.outputs = [pods.output(PRINTED, default=""), pods.output(ALARM, default="0")]
        look.metrics = models.Metrics(prometheus=[_alarm()])
        container_of(platform, "rollback", (*words, "--rollback"), inputs=[model], env=[NOTIFY])
        with DAG(name="model", inputs=[model]):
            Task(name="look", template="look", arguments=given)
            wanted = f"{{{{tasks.look.exitCode}}}} == {Degraded.exit_code} && {workflow_parameter('rollback')} == true"
            Task(name="rollback", template="rollback", arguments=given, depends="look.Failed", when=wanted)
        with DAG(name="pipeline", fail_fast=False):
            each = [Parameter(name="model", value="{{item}}")]
            Task(name="model", template="model", arguments=each, with_param=workflow_parameter("models"))
    compiled: Object = template.to_dict()
    return [compiled, _cron(platform.namespace)]


def _alarm() -> models.Prometheus:
    return models.Prometheus(
        name="slipway_watch_alarm",
        help="Whether what serves is no longer what its release was",
        labels=[models.MetricLabel(key="model", value="{{inputs.parameters.model}}")],
        gauge=models.Gauge(realtime=False, value=f"{{{{outputs.parameters.{ALARM}}}}}"),
    )


def _cron(namespace: str) -> Object:
    parameters = [{"name": "models", "value": '["org/name"]'}, {"name": "rollback", "value": "false"}]
    spec = {
        "suspend": True,
        "schedules": [SCHEDULE],
        "timezone": "Etc/UTC",
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": 60,
        "successfulJobsHistoryLimit": 1,
        "failedJobsHistoryLimit": 3,
        "workflowSpec": {"workflowTemplateRef": {"name": WATCH}, "arguments": {"parameters": parameters}},
    }
    return labelled("argoproj.io/v1alpha1", "CronWorkflow", WATCH, namespace, spec=spec)
