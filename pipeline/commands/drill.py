"""slipway drill: try on the living endpoint what it must withstand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from pipeline.options import (
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
    from stages.rollout.drills import CrashDrill, LoadDrill, RollbackDrill

UNBOUNDED_MS: Final = 1e9
ModelArgument = Annotated[str, typer.Argument(help="A model that is being served.")]
drill: Final = typer.Typer(
    help="Try on the living endpoint what it must withstand: twice its load, a rollback, a crash.",
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
    workload: WorkloadOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Send twice the expected peak; fails if a request fails or the latency targets are not kept."""
    from stages.hub import model_id
    from stages.rollout.drills import drill_load, living
    from stages.serve.endpoint import say
    from stages.settings import Slo
    from stages.store import ModelStore

    settings = load_config(config, None, workload, "local", assignments)
    place = ModelStore(store.absolute(), model_id(model))
    slo = settings.workload.slo
    if ttft_ms is not None or tpot_ms is not None:
        slo = Slo(
            ttft_ms=ttft_ms or (slo.ttft_ms if slo else UNBOUNDED_MS),
            tpot_ms=tpot_ms or (slo.tpot_ms if slo else UNBOUNDED_MS),
        )
    expected = peak or settings.workload.concurrency
    say(f"{2 * expected} requests in flight for {seconds:g} s")
    _end(drill_load(place, living(place).url, settings.workload, peak=expected, seconds=seconds, slo=slo), as_json)


@drill.command(epilog="Example: slipway drill rollback org/name --json")
def rollback(
    model: ModelArgument,
    platform: PlatformOption = None,
    workload: WorkloadOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Go back to the release before under load, and forward again; fails above five minutes or if a request fails.

    With a platform that serves on KServe, how long it takes there.
    """
    from pipeline.commands.releases import place_of, serving_of
    from pipeline.serving import target_of
    from stages.rollout.drills import drill_rollback, living
    from stages.rollout.targets import LOCAL
    from stages.serve.endpoint import say

    settings = load_config(config, None, workload, platform, assignments)
    place, serves_on = place_of(store, model), settings.platform.serves_on
    if serves_on == LOCAL:
        living(place)
    target = target_of(settings, place, model, serving_of(place, settings))
    found = drill_rollback(place, target, settings.workload, settings.rollout, say, target_name=serves_on)
    _end(found, as_json)


@drill.command(epilog="Example: slipway drill crash org/name")
def crash(
    model: ModelArgument,
    canary: Annotated[bool, typer.Option("--canary", help="The canary's server instead of the stable one's.")] = False,
    workload: WorkloadOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Kill a server under load; fails if it is not up again within five minutes. Counts the requests that fail."""
    from stages.hub import model_id
    from stages.rollout.drills import drill_crash
    from stages.serve.endpoint import say
    from stages.store import ModelStore

    settings = load_config(config, None, workload, "local", assignments)
    place = ModelStore(store.absolute(), model_id(model))
    _end(drill_crash(place, settings.workload, say, canary=canary), as_json)


def _end(found: LoadDrill | RollbackDrill | CrashDrill, as_json: bool) -> None:
    """Print it, held or not; then fail if it was not."""
    from stages.errors import DrillFailed
    from stages.rollout.drills import check
    from stages.serve.endpoint import say

    document = found.model_dump(mode="json") | {"held": not found.failures()}
    print_result(document, _table(document), as_json)
    try:
        check(found)
    except DrillFailed as error:
        if not as_json:
            raise
        say(error.render())  # the document is the one result
        raise typer.Exit(error.exit_code) from error


def _table(document: dict[str, object]) -> str:
    lines = []
    for name, value in document.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {each}" for key, each in value.items())
        lines.append(f"{name:20} {value}")
    return "\n".join(lines)
