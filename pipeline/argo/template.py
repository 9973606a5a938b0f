"""Compares the installed WorkflowTemplate with the one that this version and configuration would install."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.argo.status import tasks
from pipeline.workflow.parameters import NAME
from stages.parts.base.errors import NotInstalled
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import TEMPLATES, Object
from stages.parts.cluster.refusals import Absent

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig


def read(cluster: Cluster, name: str) -> Object:
    """One of our WorkflowTemplates. Raises: NotInstalled: it, or Argo, is missing."""
    try:
        return cluster.get(TEMPLATES, name)
    except Absent as error:
        cluster.kind(TEMPLATES.api_version, TEMPLATES.name)  # raises if Argo itself is missing
        raise NotInstalled(
            f"the template {name} is not installed in namespace {cluster.namespace}",
            hint="slipway install --platform NAME",
        ) from error


def installed(cluster: Cluster, arguments: Mapping[str, str]) -> Object:
    """The installed template, which has a parameter for each of *arguments*.

    Raises:
        NotInstalled: it is missing, or lacks a parameter, or Argo is missing.
    """
    template = read(cluster, NAME)
    known = [each["name"] for each in template["spec"].get("arguments", {}).get("parameters", [])]
    if missing := ", ".join(name for name in arguments if name not in known):
        raise NotInstalled(
            f"the installed template {NAME} is another version's: it has no parameter {missing}",
            hint="slipway install --platform NAME",
        )
    return template


def compare(template: Object, config: RunConfig) -> str:
    """The first field in which the installed template differs from that of *config*; empty if none does.

    Arguments don't count: each run brings its own.

    Raises:
        NotInstalled: it has other tasks: the run would not do what the configuration says.
    """
    rendered, there = rendered_as(template, config)["spec"], template["spec"]
    wanted, has = ([task["name"] for task in tasks(spec)] for spec in (rendered, there))
    if sorted(wanted) != sorted(has):
        raise NotInstalled(
            f"the installed template {NAME} has other tasks than this configuration: {', '.join(has)}",
            hint=f"slipway install --platform {config.platform.name}, with the same --config and --set",
        )
    return difference({key: value for key, value in rendered.items() if key != "arguments"}, there, "spec")


def rendered_as(template: Object, config: RunConfig) -> Object:
    """What *config* renders, with what ``install`` found out about the cluster when it applied *template*."""
    from pipeline.settings.platform import DEFAULT_REPOSITORY
    from pipeline.workflow.definition import workflow_template
    from pipeline.workflow.stage_templates import EXIT_HANDLER

    asked = config.platform.cluster
    publishes = template["spec"].get("onExit") == EXIT_HANDLER
    if asked and asked.artifact_repository is None and publishes:
        config = with_cluster(config, {"artifact_repository": DEFAULT_REPOSITORY})
    return workflow_template(config)


def with_cluster(config: RunConfig, changed: Mapping[str, str | None]) -> RunConfig:
    """*config* with other settings of its platform's cluster."""
    if config.platform.cluster is None or not changed:
        return config
    cluster = config.platform.cluster.model_copy(update=dict(changed))
    return config.model_copy(update={"platform": config.platform.model_copy(update={"cluster": cluster})})


def difference(wanted: Any, there: Any, path: str) -> str:
    """The first field of *wanted* that is missing or different *there*; empty if none. Added defaults don't count."""
    if isinstance(wanted, dict) and isinstance(there, dict):
        pairs = [(f"{path}.{key}", value, there.get(key)) for key, value in wanted.items()]
    elif isinstance(wanted, list) and isinstance(there, list) and len(wanted) == len(there):
        pairs = [(f"{path}[{at}]", *both) for at, both in enumerate(zip(wanted, there, strict=True))]
    else:
        return "" if wanted == there else path
    return next((found for where, mine, its in pairs if (found := difference(mine, its, where))), "")
