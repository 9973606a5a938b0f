"""``slipway drill``: test the running endpoint under load, with a rollback, with a crash, and whether it scales."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pipeline.commands.options import Commands, LocalOptions, WorkloadOption
from pipeline.commands.releases import target_of_endpoint
from pipeline.runs.engine import Printout
from stages.parts.base.log import say

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig
    from stages.parts.base.store import ModelStore
    from stages.rollout.drills import CrashDrill, LoadDrill, RollbackDrill
    from stages.rollout.scale_drill import ScaleDrill
    from stages.rollout.target import Target

UNBOUNDED_MS: Final = 1e9
ServedModelArgument = Annotated[str, typer.Argument(help="A model that is being served.")]


@dataclasses.dataclass(frozen=True)
class DrillOptions(LocalOptions):
    """The settings of a drill, and the store."""

    workload: WorkloadOption = None

    def of(self, model: str, *, served: bool = True) -> tuple[RunConfig, ModelStore, Target, str]:
        """Return the settings, the model's folder, the target that serves it, and the address to send requests to if
        this machine can't resolve the cluster's host names.

        Raises: NothingToServe: the platform is this machine, and has no endpoint, although *served*.
        """
        from stages.parts.records.rollout import LOCAL
        from stages.rollout.drills import running_endpoint

        settings, store = self.load(workload=self.workload), self.of_model(model)
        on_cluster = settings.platform.serves_on != LOCAL
        if served and not on_cluster:
            running_endpoint(store)
        via = settings.kserve.gateway_url or "" if on_cluster else ""
        return settings, store, target_of_endpoint(settings, store, model), via


commands = Commands("Test the running endpoint with load and failures.", "drill rollback org/name", name="drill")


@commands.add("drill load org/name --peak 32 --seconds 120")
def load(
    model: ServedModelArgument,
    peak: Annotated[
        int | None, typer.Option(min=1, help="Requests in flight at the expected peak. Default: the workload's.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long.")] = 60,
    ttft_ms: Annotated[float | None, typer.Option(help="p95 allowed. Default: the workload's slo.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="p95 allowed. Default: the workload's slo.")] = None,
    *,
    options: DrillOptions,
) -> Printout:
    """Send twice the expected peak load.

    Fails if a request fails or a latency target is missed.
    """
    from stages.parts.base.errors import NothingToServe
    from stages.parts.base.workload import Slo
    from stages.rollout.drills import access_to, drill_load

    settings, store, target, via = options.of(model)
    slo = settings.workload.slo
    if ttft_ms is not None or tpot_ms is not None:
        slo = Slo(
            ttft_ms=ttft_ms or (slo.ttft_ms if slo else UNBOUNDED_MS),
            tpot_ms=tpot_ms or (slo.tpot_ms if slo else UNBOUNDED_MS),
        )
    expected = peak or settings.workload.concurrency
    if target.split().stable is None:
        raise NothingToServe(f"{model} is not being served on {settings.platform.name}")
    say(f"{2 * expected} requests in flight for {seconds:g} s")
    access = access_to(store, target.client_url(), via)
    return _result(drill_load(access, settings.workload, peak=expected, seconds=seconds, slo=slo))


@commands.add("drill rollback org/name --json", cleans_up=True)
def rollback(
    model: ServedModelArgument,
    limit_s: Annotated[float, typer.Option(min=0, help="Seconds that the rollback may take.")] = 300,
    *,
    options: DrillOptions,
) -> Printout:
    """Roll back under load, and forward again.

    Goes to the previous release. Fails if it takes too long or a request fails. With a platform that serves on KServe,
    it is tested there.
    """
    from stages.rollout.drills import drill_rollback

    settings, store, target, via = options.of(model)
    return _result(drill_rollback(store, target, settings.workload, settings.rollout, limit_s=limit_s, via=via))


@commands.add("drill crash org/name")
def crash(
    model: ServedModelArgument,
    canary: Annotated[
        bool, typer.Option("--canary", help="Kill the canary's server instead of the stable one's.")
    ] = False,
    *,
    options: DrillOptions,
) -> Printout:
    """Kill a server under load, and count failed requests.

    Fails if it does not answer again within five minutes. With a platform that serves on KServe, one of the release's
    pods is killed.
    """
    from stages.rollout.drills import drill_crash

    settings, store, target, via = options.of(model)
    return _result(drill_crash(store, target, settings.workload, canary=canary, via=via))


@commands.add("drill scale org/name --platform gke --down")
def scale(
    model: ServedModelArgument,
    limit_s: Annotated[
        float, typer.Option(min=1, help="Seconds until the replicas are ready and, with --down, gone again.")
    ] = 900,
    seconds: Annotated[float, typer.Option(min=1, help="How long the load goes on with all replicas.")] = 30,
    down: Annotated[
        bool, typer.Option("--down", help="Then wait until there are as few replicas as before, with one client.")
    ] = False,
    *,
    options: DrillOptions,
) -> Printout:
    """Send more load until more replicas are ready.

    Fails if they don't get ready or a request fails. This needs a platform that serves on KServe, with KEDA or Knative.
    The load comes on top of what clients send.
    """
    from stages.rollout.scale_drill import ScaleLimits, drill_scale

    settings, store, target, via = options.of(model, served=False)
    limits = ScaleLimits(limit_s=limit_s, seconds=seconds, down=down)
    return _result(drill_scale(store, target, settings.workload, limits, via=via))


def _result(drill: LoadDrill | RollbackDrill | CrashDrill | ScaleDrill) -> Printout:
    """Print how a drill went; the command fails if the drill failed."""
    from stages.rollout.drills import failure_of

    document = drill.model_dump(mode="json") | {"held": not drill.failures()}
    lines = []
    for name, value in document.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {part}" for key, part in value.items())
        lines.append(f"{name:20} {value}")
    return Printout(document, "\n".join(lines), failure_of(drill.failures(), drill.answers))
