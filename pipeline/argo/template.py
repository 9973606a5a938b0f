"""Compares the installed WorkflowTemplate with the one that this version and configuration would install."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.argo.status import tasks
from pipeline.settings.config import RunConfig
from pipeline.settings.platform import DEFAULT_REPOSITORY
from pipeline.workflow.parameters import NAME
from stages.parts.base.errors import NotInstalled
from stages.parts.cluster.api import Absent, Cluster
from stages.parts.cluster.kinds import TEMPLATES, Object


def read(cluster: Cluster, name: str) -> Object:
    """Read one of our WorkflowTemplates. Raises: NotInstalled: it, or Argo, is missing."""
    try:
        return cluster.get(TEMPLATES, name)
    except Absent as error:
        cluster.kind(TEMPLATES.api_version, TEMPLATES.name)  # raises if Argo itself is missing
        raise NotInstalled(
            f"the template {name} is not installed in namespace {cluster.namespace}",
            hint="slipway install --platform NAME",
        ) from error


def installed(cluster: Cluster, arguments: Mapping[str, str]) -> Object:
    """Return the installed template, which has a parameter for each of *arguments*."""
    template = read(cluster, NAME)
    parameters = [parameter["name"] for parameter in template["spec"].get("arguments", {}).get("parameters", [])]
    if lacking := ", ".join(name for name in arguments if name not in parameters):
        raise NotInstalled(
            f"the installed template {NAME} is another version's: it has no parameter {lacking}",
            hint="slipway install --platform NAME",
        )
    return template


def compare(template: Object, config: RunConfig) -> str:
    """Return the first field in which the installed template differs from that of *config*; empty if none does.

    Arguments don't count: each run brings its own.
    """
    rendered, applied = rendered_as(template, config)["spec"], template["spec"]
    names, applied_names = ([task["name"] for task in tasks(spec)] for spec in (rendered, applied))
    if sorted(names) != sorted(applied_names):
        raise NotInstalled(
            f"the installed template {NAME} has other tasks than this configuration: {', '.join(applied_names)}",
            hint=f"slipway install --platform {config.platform.name}, with the same --config and --set",
        )
    return difference({key: value for key, value in rendered.items() if key != "arguments"}, applied, "spec")


def rendered_as(template: Object, config: RunConfig) -> Object:
    """Render *config*, with what ``install`` found out about the cluster when it applied *template*."""
    from pipeline.workflow.definition import workflow_template
    from pipeline.workflow.stage_templates import EXIT_HANDLER

    cluster = config.platform.cluster
    publishes = template["spec"].get("onExit") == EXIT_HANDLER
    if cluster and cluster.artifact_repository is None and publishes:
        config = with_cluster(config, {"artifact_repository": DEFAULT_REPOSITORY})
    return workflow_template(config)


def with_cluster(config: RunConfig, changed: Mapping[str, str | None]) -> RunConfig:
    """*config* with other settings of its platform's cluster."""
    cluster = config.cluster.model_copy(update=dict(changed))
    return config.model_copy(update={"platform": config.platform.model_copy(update={"cluster": cluster})})


def difference(rendered: Any, applied: Any, path: str) -> str:
    """Return the first field of *rendered* that is missing or different in *applied*; empty if none.

    Defaults that the cluster adds don't count.
    """
    if isinstance(rendered, dict) and isinstance(applied, dict):
        pairs = [(f"{path}.{key}", value, applied.get(key)) for key, value in rendered.items()]
    elif isinstance(rendered, list) and isinstance(applied, list) and len(rendered) == len(applied):
        pairs = [(f"{path}[{at}]", *pair) for at, pair in enumerate(zip(rendered, applied, strict=True))]
    else:
        return "" if rendered == applied else path
    return next(filter(None, (difference(mine, its, field) for field, mine, its in pairs)), "")
