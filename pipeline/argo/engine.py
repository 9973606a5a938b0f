"""Runs a configuration on a cluster: submits it, follows it to its end, and reports it as a run on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.argo.follow import follow
from pipeline.argo.runs import ClusterRun, find, stop
from pipeline.argo.submission import submit
from pipeline.argo.template import compare, installed
from pipeline.cluster.doctor import check_serving
from pipeline.planning.refusal import decide_before
from pipeline.runs.progress import observer_for
from pipeline.runs.state import failure
from pipeline.workflow.parameters import arguments
from stages.parts.base.errors import ConfigError, Interrupted, NotInstalled
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import Object
from stages.parts.model.name import ModelName
from stages.parts.records.rollout import LOCAL

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig


def start(
    cluster: Cluster, config: RunConfig, model: str, revision: str, *, serve: bool, refresh: bool, force: bool
) -> ClusterRun:
    """Submit a run, or find the active one with the same arguments; say on stderr which.

    Raises:
        ConfigError: *model* is a directory of this machine, or the settings contradict each other or the hardware.
        NotInstalled, AccessDenied, ClusterUnavailable: nothing was started.
    """
    if ModelName.parse(model).directory:
        raise ConfigError(
            f"{model} is a directory of this machine, which the cluster can't read",
            hint="push it to a Hub that the cluster reaches, or run it here: --engine local",
        )
    decide_before(config, model, revision)
    if serve and config.platform.serves_on != LOCAL:
        check_serving(cluster, config, ModelName.parse(model).id)
    given = arguments(config, model, revision, serve=serve, refresh=refresh)
    if different := compare(installed(cluster, given), config):
        sys.stderr.write(
            f"warning: the installed template is not what this configuration renders ({different}); "
            f"to change it: slipway install --platform {config.platform.name}\n"
        )
    return announced(*submit(cluster, given, force=force))


def announced(workflow: Object, new: bool) -> ClusterRun:
    """Say on stderr that a run was submitted, and how to show it."""
    run = ClusterRun(workflow)
    said = "submitted" if new else "the same run is active already (--force starts another one):"
    sys.stderr.write(f"{said} {run.id}; show it: slipway show {run.reference}\n")
    if run.link:
        sys.stderr.write(f"{run.link}\n")
    return run


def to_its_end(cluster: Cluster, name: str) -> ClusterRun:
    """Follow a run on stderr until it has succeeded.

    Raises:
        RunFailed: with the exit code of the task that failed first.
        MissingRun: it was deleted.
        ClusterUnavailable: the API did not answer for too long; the run continues.
        NotInstalled: an image can't be pulled; the run was stopped.
        Interrupted: by Ctrl-C; the run continues.
    """
    try:
        run = ClusterRun(follow(cluster, name, observer_for(sys.stderr, Path(name))))
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"run {name} continues in the cluster", hint=f"stop it: slipway stop {name} --namespace {cluster.namespace}"
        ) from error
    except NotInstalled:
        stop(cluster, find(cluster, name))
        raise
    if run.state.phase != "Succeeded":
        raise failure(run.state, where=f" --namespace {cluster.namespace}")
    return run
