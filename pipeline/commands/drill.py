"""``slipway drill``: test the running endpoint under load, with a rollback, with a crash, and whether it scales."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pipeline.commands.options import (
    STORE,
    ConfigOptions,
    JsonOption,
    StoreOption,
    WorkloadOption,
    add,
    command_group,
    model_store,
    print_result,
)
from pipeline.commands.releases import target_of_endpoint
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
class DrillOptions(ConfigOptions):
    """The settings of a drill, the store, and how its result is printed."""

    workload: WorkloadOption = None
    store: StoreOption = STORE
    as_json: JsonOption = False

    def settings(self) -> RunConfig:
        return self.load(workload=self.workload)

    def end(self, result: LoadDrill | RollbackDrill | CrashDrill | ScaleDrill) -> None:
        """Print the result, and fail if the drill failed."""
        from stages.parts.base.errors import DrillFailed
        from stages.rollout.drills import check

        document = result.model_dump(mode="json") | {"held": not result.failures()}
        print_result(document, _table(document), self.as_json)
        try:
            check(result.failures(), result.answers)
        except DrillFailed as error:
            if not self.as_json:
                raise
            say(error.render())  # stdout holds the document alone
            raise typer.Exit(error.exit_code) from error


def register(app: typer.Typer) -> None:
    group = command_group("Test the running endpoint with load and failures.", "drill rollback org/name")
    add(group, load, "drill load org/name --peak 32 --seconds 120")
    add(group, rollback, "drill rollback org/name --json")
    add(group, crash, "drill crash org/name")
    add(group, scale, "drill scale org/name --platform gke --down")
    app.add_typer(group, name="drill")


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
) -> None:
    """Send twice the expected peak load.

    Fails if a request fails or a latency target is missed.
    """
    from stages.parts.base.workload import Slo
    from stages.rollout.drills import access_to, drill_load

    settings = options.settings()
    store = model_store(options.store, model)
    slo = settings.workload.slo
    if ttft_ms is not None or tpot_ms is not None:
        slo = Slo(
            ttft_ms=ttft_ms or (slo.ttft_ms if slo else UNBOUNDED_MS),
            tpot_ms=tpot_ms or (slo.tpot_ms if slo else UNBOUNDED_MS),
        )
    expected = peak or settings.workload.concurrency
    url = _endpoint(settings, store, model)
    say(f"{2 * expected} requests in flight for {seconds:g} s")
    access = access_to(store, url, _via(settings))
    options.end(drill_load(access, settings.workload, peak=expected, seconds=seconds, slo=slo))


def rollback(
    model: ServedModelArgument,
    limit_s: Annotated[float, typer.Option(min=0, help="Seconds that the rollback may take.")] = 300,
    *,
    options: DrillOptions,
) -> None:
    """Roll back under load, and forward again.

    Goes to the previous release. Fails if it takes too long or a request fails. With a platform that serves on KServe,
    it is tested there.
    """
    from stages.parts.base.program import answer_sigterm
    from stages.rollout.drills import drill_rollback

    answer_sigterm()
    settings, store = options.settings(), model_store(options.store, model)
    target, via = _target(settings, store, model), _via(settings)
    options.end(drill_rollback(store, target, settings.workload, settings.rollout, limit_s=limit_s, via=via))


def crash(
    model: ServedModelArgument,
    canary: Annotated[
        bool, typer.Option("--canary", help="Kill the canary's server instead of the stable one's.")
    ] = False,
    *,
    options: DrillOptions,
) -> None:
    """Kill a server under load, and count failed requests.

    Fails if it does not answer again within five minutes. With a platform that serves on KServe, one of the release's
    pods is killed.
    """
    from stages.rollout.drills import drill_crash

    settings, store = options.settings(), model_store(options.store, model)
    target = _target(settings, store, model)
    options.end(drill_crash(store, target, settings.workload, canary=canary, via=_via(settings)))


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
) -> None:
    """Send more load until more replicas are ready.

    Fails if they don't get ready or a request fails. This needs a platform that serves on KServe, with KEDA or Knative.
    The load comes on top of what clients send.
    """
    from stages.rollout.scale_drill import ScaleLimits, drill_scale

    settings, store = options.settings(), model_store(options.store, model)
    target = target_of_endpoint(settings, store, model)
    limits = ScaleLimits(limit_s=limit_s, seconds=seconds, down=down)
    options.end(drill_scale(store, target, settings.workload, limits, via=_via(settings)))


def _target(settings: RunConfig, store: ModelStore, model: str) -> Target:
    """Return the target that serves the model. Raises: NothingToServe: there is no endpoint on this machine."""
    from stages.parts.records.rollout import LOCAL
    from stages.rollout.drills import running_endpoint

    if settings.platform.serves_on == LOCAL:
        running_endpoint(store)
    return target_of_endpoint(settings, store, model)


def _endpoint(settings: RunConfig, store: ModelStore, model: str) -> str:
    """Return the base URL that clients use. Raises: NothingToServe: the model is not being served."""
    from pipeline.settings.serving import target_of
    from stages.parts.base.errors import NothingToServe
    from stages.parts.records.rollout import LOCAL
    from stages.rollout.drills import running_endpoint

    if settings.platform.serves_on == LOCAL:
        return running_endpoint(store).url
    target = target_of(settings, store, model, settings.serving)
    if target.split().stable is None:
        raise NothingToServe(f"{model} is not being served on {settings.platform.name}")
    return target.client_url()


def _via(settings: RunConfig) -> str:
    """Return the address to send requests to, if this machine can't resolve the cluster's host names; else empty."""
    from stages.parts.records.rollout import LOCAL

    return "" if settings.platform.serves_on == LOCAL else settings.kserve.gateway_url or ""


def _table(document: dict[str, object]) -> str:
    lines = []
    for name, value in document.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {part}" for key, part in value.items())
        lines.append(f"{name:20} {value}")
    return "\n".join(lines)
