"""``slipway drill``: test the running endpoint under load, with a rollback, with a crash, and whether it scales."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pipeline.commands.options import (
    STORE,
    ConfigOption,
    JsonOption,
    PlatformOption,
    SetOption,
    StoreOption,
    WorkloadOption,
    load_config,
    print_result,
)

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig
    from stages.parts.base.store import ModelStore
    from stages.rollout.drills import CrashDrill, LoadDrill, RollbackDrill
    from stages.rollout.scale_drill import ScaleDrill
    from stages.rollout.target import Target

UNBOUNDED_MS: Final = 1e9
ModelArgument = Annotated[str, typer.Argument(help="A model that is being served.")]
drill: Final = typer.Typer(
    help="Test the running endpoint: with twice its load, a rollback, a crash, a load that needs more replicas.",
    epilog="Example: slipway drill rollback org/name",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


def register(app: typer.Typer) -> None:
    app.add_typer(drill, name="drill")


@drill.command(epilog="Example: slipway drill load org/name --peak 32 --seconds 120")
def load(
    model: ModelArgument,
    peak: Annotated[
        int | None, typer.Option(min=1, help="Requests in flight at the expected peak. Default: the workload's.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long.")] = 60,
    ttft_ms: Annotated[float | None, typer.Option(help="p95 allowed. Default: the workload's slo.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="p95 allowed. Default: the workload's slo.")] = None,
    platform: PlatformOption = None,
    workload: WorkloadOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Send twice the expected peak load. Fails if a request fails or a latency target is missed."""
    from pipeline.commands.releases import place_of
    from stages.parts.base.log import say
    from stages.parts.base.workload import Slo
    from stages.rollout.drills import access_to, drill_load

    settings = load_config(config, None, workload, platform, assignments)
    place = place_of(store, model)
    slo = settings.workload.slo
    if ttft_ms is not None or tpot_ms is not None:
        slo = Slo(
            ttft_ms=ttft_ms or (slo.ttft_ms if slo else UNBOUNDED_MS),
            tpot_ms=tpot_ms or (slo.tpot_ms if slo else UNBOUNDED_MS),
        )
    expected = peak or settings.workload.concurrency
    url, via = _endpoint(settings, place, model), _via(settings)
    say(f"{2 * expected} requests in flight for {seconds:g} s")
    access = access_to(place, url, via)
    found = drill_load(access, settings.workload, peak=expected, seconds=seconds, slo=slo)
    _end(found, as_json)


@drill.command(epilog="Example: slipway drill rollback org/name --json")
def rollback(
    model: ModelArgument,
    limit_s: Annotated[float, typer.Option(min=0, help="Seconds that the rollback may take.")] = 300,
    platform: PlatformOption = None,
    workload: WorkloadOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Roll back to the previous release under load, and forward again. Fails if it takes too long or a request fails.

    With a platform that serves on KServe, it is tested there.
    """
    from stages.parts.base.program import answer_sigterm
    from stages.rollout.drills import drill_rollback

    answer_sigterm()
    settings = load_config(config, None, workload, platform, assignments)
    place, target = _drilled(settings, store, model)
    found = drill_rollback(
        place,
        target,
        settings.workload,
        settings.rollout,
        limit_s=limit_s,
        via=_via(settings),
    )
    _end(found, as_json)


@drill.command(epilog="Example: slipway drill crash org/name")
def crash(
    model: ModelArgument,
    canary: Annotated[
        bool, typer.Option("--canary", help="Kill the canary's server instead of the stable one's.")
    ] = False,
    platform: PlatformOption = None,
    workload: WorkloadOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Kill a server under load. Fails if it does not answer again within five minutes. Counts failed requests.

    With a platform that serves on KServe, one of the release's pods is killed.
    """
    from stages.rollout.drills import drill_crash

    settings = load_config(config, None, workload, platform, assignments)
    place, target = _drilled(settings, store, model)
    _end(drill_crash(place, target, settings.workload, canary=canary, via=_via(settings)), as_json)


@drill.command(epilog="Example: slipway drill scale org/name --platform gke --down")
def scale(
    model: ModelArgument,
    limit_s: Annotated[
        float, typer.Option(min=1, help="Seconds until the replicas are ready and, with --down, gone again.")
    ] = 900,
    seconds: Annotated[float, typer.Option(min=1, help="How long the load goes on with all replicas.")] = 30,
    down: Annotated[
        bool, typer.Option("--down", help="Then wait until there are as few as before, with one client.")
    ] = False,
    platform: PlatformOption = None,
    workload: WorkloadOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Send more than the replicas should have, until more are ready. Fails if they don't come or a request fails.

    This needs a platform that serves on KServe, with KEDA or Knative. The load comes on top of what clients send.
    """
    from pipeline.commands.releases import place_of, serving_of
    from pipeline.settings.serving import target_of
    from stages.rollout.scale_drill import ScaleLimits, drill_scale

    settings = load_config(config, None, workload, platform, assignments)
    place = place_of(store, model)
    target = target_of(settings, place, model, serving_of(place, settings))
    limits = ScaleLimits(limit_s=limit_s, seconds=seconds, down=down)
    _end(drill_scale(place, target, settings.workload, limits, via=_via(settings)), as_json)


def _drilled(settings: RunConfig, store: Path, model: str) -> tuple[ModelStore, Target]:
    """A model's folder in the store, and the target that serves it.

    Raises:
        NothingToServe: there is no endpoint on this machine.
    """
    from pipeline.commands.releases import place_of, serving_of
    from pipeline.settings.serving import target_of
    from stages.parts.records.rollout import LOCAL
    from stages.rollout.drills import running_endpoint

    place = place_of(store, model)
    if settings.platform.serves_on == LOCAL:
        running_endpoint(place)
    return place, target_of(settings, place, model, serving_of(place, settings))


def _endpoint(settings: RunConfig, place: ModelStore, model: str) -> str:
    """The base URL that clients use.

    Raises:
        NothingToServe: the model is not being served.
    """
    from pipeline.settings.serving import target_of
    from stages.parts.base.errors import NothingToServe
    from stages.parts.records.rollout import LOCAL
    from stages.rollout.drills import running_endpoint

    if settings.platform.serves_on == LOCAL:
        return running_endpoint(place).url
    target = target_of(settings, place, model, settings.serving)
    if target.split().stable is None:
        raise NothingToServe(f"{model} is not being served on {settings.platform.name}")
    return target.client_url()


def _via(settings: RunConfig) -> str:
    """The address to send requests to, if this machine can't resolve the cluster's host names; else empty."""
    from stages.parts.records.rollout import LOCAL

    return "" if settings.platform.serves_on == LOCAL else settings.kserve.gateway_url or ""


def _end(found: LoadDrill | RollbackDrill | CrashDrill | ScaleDrill, as_json: bool) -> None:
    """Print the result, and fail if the drill failed."""
    from stages.parts.base.errors import DrillFailed
    from stages.parts.base.log import say
    from stages.rollout.drills import check

    document = found.model_dump(mode="json") | {"held": not found.failures()}
    print_result(document, _table(document), as_json)
    try:
        check(found.failures(), found.answers)
    except DrillFailed as error:
        if not as_json:
            raise
        say(error.render())  # stdout holds the document alone
        raise typer.Exit(error.exit_code) from error


def _table(document: dict[str, object]) -> str:
    lines = []
    for name, value in document.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {each}" for key, each in value.items())
        lines.append(f"{name:20} {value}")
    return "\n".join(lines)
