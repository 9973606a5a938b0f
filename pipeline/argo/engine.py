"""Runs a configuration on a cluster: submits it, follows it to its end, and reports it as a run on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.argo.follow import show_until_ended
from pipeline.argo.runs import ClusterRun, all_runs, find
from pipeline.argo.status import arguments_of
from pipeline.argo.template import compare, installed, submit
from pipeline.planning.refusal import decide_before
from pipeline.runs.engine import Printout
from pipeline.runs.state import failure
from pipeline.settings.config import RunConfig
from pipeline.workflow.parameters import allowing_incomplete, arguments, resolve_key
from stages.parts.base.errors import ConfigError, Interrupted
from stages.parts.base.log import say
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import Object
from stages.parts.model.name import ModelName
from stages.parts.records.rollout import LOCAL


@dataclass(frozen=True)
class ArgoEngine:
    """The engine of a cluster's namespace; see ``pipeline.runs.engine.PipelineEngine``."""

    cluster: Cluster
    check_serving: Callable[[Cluster, RunConfig, str], None]
    """Finds before a run what would keep the cluster from serving the model, and raises it."""
    follow: bool = True
    """Whether a run that is started is followed to its end."""

    @property
    def no_runs(self) -> str:
        return (
            "no runs in this namespace; --namespace names another one, or SLIPWAY_PLATFORM the platform of the runs; "
            "start one with: slipway run MODEL --engine argo"
        )

    def runs(self) -> list[ClusterRun]:
        return all_runs(self.cluster)

    def find(self, name: str) -> ClusterRun:
        return find(self.cluster, name)

    def start(
        self, config: RunConfig, model: str, revision: str, *, serve: bool, refresh: bool = False, force: bool = False
    ) -> Printout:
        name = ModelName.parse(model)
        if name.directory:
            hint = "push it to a Hub that the cluster reaches, or run it here: --engine local"
            raise ConfigError(f"{model} is a directory of this machine, which the cluster can't read", hint=hint)
        decide_before(config, name, revision)
        if serve and config.platform.serves_on != LOCAL:
            self.check_serving(self.cluster, config, name.id)
        parameters = arguments(config, model, revision, serve=serve, refresh=refresh)
        if different := compare(installed(self.cluster, parameters), config):
            say(
                f"warning: the installed template is not what this configuration renders ({different}); "
                f"to change it: slipway install --platform {config.platform.name}"
            )
        return self.result(self.announce(*submit(self.cluster, parameters, force=force)))

    def retry(self, name: str, *, allow_incomplete: bool = False) -> Printout:
        return self.result(self.announce(*resubmit(self.find(name), allow_incomplete=allow_incomplete)))

    def announce(self, workflow: Object, is_new: bool) -> ClusterRun:
        """Say on stderr that a run was submitted, and how to show it."""
        run = ClusterRun(self.cluster, workflow)
        lead = "submitted" if is_new else "the same run is active already (--force starts another one):"
        say(f"{lead} {run.id}; show it: slipway show {run.id} --namespace {run.namespace}")
        if run.link:
            say(run.link)
        return run

    def result(self, run: ClusterRun) -> Printout:
        """Return the result of a run that was submitted: how it ended or, if it is not followed, its id.

        Raises: as ``start``, and as ``show_until_ended``.
        """
        if not self.follow:
            return Printout(run.report().document, run.id)
        place = f" --namespace {self.cluster.namespace}"
        continues = Interrupted(f"run {run.id} continues in the cluster", hint=f"stop it: slipway stop {run.id}{place}")
        workflow = show_until_ended(self.cluster, run.id, interrupted=continues, unpulled="Stop")
        ended = ClusterRun(self.cluster, workflow)
        if ended.state.phase != "Succeeded":
            raise failure(ended.state, where=place)
        return ended.report()


def resubmit(run: ClusterRun, *, allow_incomplete: bool = False) -> tuple[Object, bool]:
    """Submit a run's arguments again. Returns the workflow, and whether it is new."""
    parameters = arguments_of(run.workflow)
    if {"model", "revision"} <= parameters.keys():
        parameters["resolve-key"] = resolve_key(parameters["model"], parameters["revision"])
    if allow_incomplete:  # a run that a trigger started leaves most to the template
        defaults = arguments_of(installed(run.cluster, parameters))
        parameters["optimize"] = allowing_incomplete((defaults | parameters)["optimize"])
    return submit(run.cluster, parameters)
