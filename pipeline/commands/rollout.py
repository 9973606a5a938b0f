"""``slipway rollout``: start, watch, approve or abort the rollout of a release."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.commands.on_the_volume import on_the_volume
from pipeline.commands.options import (
    STORE,
    ConfigOption,
    JsonOption,
    PlatformOption,
    SetOption,
    StoreOption,
    load_config,
    print_result,
)
from pipeline.commands.releases import ModelArgument, place_of, served, serving_of

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig
    from stages.parts.base.store import ModelStore
    from stages.parts.records.rollout import Analysis, CanaryCheck, Journal
    from stages.parts.releases.split import Split
    from stages.rollout.target import Target


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Roll out a new release beside the stable one, step by step.")
    group.command("start", epilog="Example: slipway rollout start org/name")(on_the_volume(start))
    group.command("status", epilog="Example: slipway rollout status org/name --json")(on_the_volume(status))
    group.command("promote", epilog="Example: slipway rollout promote org/name")(on_the_volume(promote))
    group.command("move", epilog="Example: slipway rollout move org/name --mode standard --platform gke")(
        on_the_volume(move)
    )
    group.command("render", epilog="Example: slipway rollout render org/name --platform gke --mode route")(render)
    group.command("abort", epilog="Example: slipway rollout abort org/name")(on_the_volume(abort))
    app.add_typer(group, name="rollout")


def start(
    model: ModelArgument,
    release: Annotated[
        str | None, typer.Option(help="A release's number or name. Default: the last that select chose.")
    ] = None,
    platform: PlatformOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Roll out a published release, or continue the rollout in progress."""
    from pipeline.settings.serving import target_of
    from stages.parts.base.program import answer_sigterm
    from stages.parts.releases.release import find
    from stages.rollout.resume import chosen
    from stages.rollout.state_machine import roll_out

    answer_sigterm()
    settings = load_config(config, None, None, platform, assignments)
    place = place_of(store, model)
    name = find(place, release) if release else chosen(place)
    target = target_of(settings, place, model, serving_of(place, settings))
    journal = roll_out(place, target, name, settings.rollout)
    _print(model, journal, as_json)


def status(
    model: ModelArgument,
    platform: PlatformOption = None,
    config: ConfigOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Show the current or the last rollout: its state, the split of traffic, and the measurements."""
    from stages.parts.records.rollout import read_journal, summary

    place = place_of(store, model)
    journal = read_journal(place)
    split = served(place, load_config(config, None, None, platform, None), model)
    document = {"model": model, "rollout": journal and summary(journal), "split": split and vars(split)}
    print_result(document, _view(model, journal, split), as_json)


def promote(
    model: ModelArgument,
    platform: PlatformOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Approve the rollout in progress, and skip its waiting times. The checks of the canary stay the same."""
    from stages.parts.base.program import answer_sigterm
    from stages.rollout import commands

    answer_sigterm()
    place = place_of(store, model)
    _print(
        model,
        commands.promote(place, _target(place, model, load_config(config, None, None, platform, assignments))),
        as_json,
    )


def abort(
    model: ModelArgument,
    platform: PlatformOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Abort the rollout in progress: all traffic goes back to the stable release."""
    from stages.rollout import commands

    place = place_of(store, model)
    given_up = commands.abort(place, _target(place, model, load_config(config, None, None, platform, assignments)))
    said = f"aborted the rollout of {given_up}" if given_up else f"no rollout of {model} is in progress"
    print_result({"model": model, "given_up": given_up}, said, as_json)


def move(
    model: ModelArgument,
    mode: Annotated[str, typer.Option(help="The mode of KServe to serve in: standard or route.")],
    platform: PlatformOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Serve a model in another mode of KServe, as after an upgrade of it, while clients are answered.

    The release starts in the other mode beside the present one, and takes the endpoint's name once it answers; there
    must be room for both. Requests of our own run all the while; fails if one of them does, and goes back if they are
    no longer answered.
    """
    from pipeline.settings.serving import moved
    from stages.parts.base.errors import DrillFailed
    from stages.parts.base.program import answer_sigterm

    answer_sigterm()
    settings, place = load_config(config, None, None, platform, assignments), place_of(store, model)
    found = moved(settings, place, serving_of(place, settings), mode)
    said = f"{found.release} is served in mode {mode}"
    if found.answers:
        said += f", no longer {found.before}, after {found.seconds:.0f} s; {found.answers.requests} requests meanwhile"
    print_result({"model": model, **found.model_dump(mode="json")}, said, as_json)
    if found.answers and found.answers.failed:
        said = f"{found.answers.failed} of {found.answers.requests} requests failed"
        raise DrillFailed(said, hint=f"their errors: {', '.join(found.answers.errors)}")


def render(
    model: ModelArgument,
    release: Annotated[
        str | None, typer.Option(help="A release's number or name. Default: the last that select chose.")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="How KServe splits traffic: standard, knative, route or llm. Default: kserve.mode."),
    ] = None,
    platform: PlatformOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    store: StoreOption = STORE,
) -> None:
    """Print as YAML what a rollout's first step applies to a cluster. Needs no cluster.

    The release is rolled out beside the one in production, or as the first one if there is no other.
    """
    import sys

    from pipeline.cluster.manifests import as_text
    from pipeline.settings.serving import rendered
    from stages.parts.releases.release import current_release, find
    from stages.rollout.resume import chosen

    settings, place = load_config(config, None, None, platform, assignments), place_of(store, model)
    name, stable = find(place, release) if release else chosen(place), current_release(place)
    documents = rendered(settings, place, name, stable if stable != name else None, mode or settings.kserve.mode)
    sys.stdout.write(as_text(documents))


def _target(place: ModelStore, model: str, settings: RunConfig) -> Target:
    """Where the rollout in progress takes place.

    Raises:
        ConfigError: *settings* name another platform.
    """
    from pipeline.settings.serving import target_of
    from stages.parts.base.errors import ConfigError
    from stages.parts.records.rollout import under_way

    journal, serves_on = under_way(place), settings.platform.serves_on
    if journal and journal.target != serves_on:
        raise ConfigError(
            f"this rollout is in progress on {journal.target}, not {serves_on}", hint="choose it with --platform"
        )
    return target_of(settings, place, model, serving_of(place, settings))


def _print(model: str, journal: Journal, as_json: bool) -> None:
    from stages.parts.records.rollout import summary

    said = f"{journal.release}: {journal.state}" + (f", {journal.reason}" if journal.reason else "")
    if journal.state == "awaiting approval":
        said += f" at {journal.percent} %; approve it: slipway rollout promote {model}"
    print_result(summary(journal), said, as_json)


def _view(model: str, journal: Journal | None, split: Split | None) -> Any:
    from rich.console import Group

    if journal is None:
        return f"there was no rollout of {model} yet"
    against = f" against {journal.stable}" if journal.stable not in (None, journal.release) else ""
    lines: list[Any] = [f"{journal.release}{against}", f"state     {journal.state}"]
    if journal.decision:
        lines.append(f"chosen    {journal.decision}")
    if journal.reason:
        lines.append(f"reason    {journal.reason}")
    if journal.steps:
        lines.append(f"steps     {' '.join(_step(journal, percent) for percent in journal.steps)}")
    lines.append(f"served    {_share(split)}")
    lines.append(f"started   {journal.started_at.astimezone():%Y-%m-%d %H:%M:%S}")
    if journal.analyses:
        last = journal.analyses[-1]
        lines += ["", f"last look, at {last.percent} %: {last.verdict}", _figures(last)]
    if journal.state == "awaiting approval":
        lines += ["", f"approve: slipway rollout promote {model}", f"abort: slipway rollout abort {model}"]
    return Group(*lines)


def _step(journal: Journal, percent: int) -> str:
    if percent == journal.percent and not journal.ended:
        return f"[{percent} %]"
    return f"{percent} %"


def _share(split: Split | None) -> str:
    if split is None or split.stable is None:
        return "nothing"
    canary = f", {split.canary} {split.percent} %" if split.canary else ""
    standby = f"; {split.standby} stands by" if split.standby else ""
    return f"{split.stable} {100 - split.percent if split.canary else 100} %{canary}{standby}"


def _figures(analysis: Analysis) -> Any:
    from rich.table import Table
    from rich.text import Text

    styles = {"pass": "green", "fail": "red", "unclear": "yellow"}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("Check", "Canary", "Stable", "Limit", "Verdict"):
        table.add_column(heading, justify="left" if heading in ("Check", "Verdict") else "right")
    for check in analysis.checks:
        cells = [_cell(check, value) for value in (check.canary, check.stable, check.limit)]
        table.add_row(check.name, *cells, Text(check.verdict, style=styles[check.verdict]))
    return table


def _cell(check: CanaryCheck, value: float | None) -> str:
    if value is None:
        return "–"
    if check.unit == "share":
        return f"{value:.1%}"
    if check.unit == "agreement":
        return f"{value:.3f}"
    return f"{value:.1f} {check.unit}" if check.unit else f"{value:.0f}"
