"""``slipway rollout``: start, watch, approve or abort the rollout of a release."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.commands.options import (
    STORE,
    ConfigOptions,
    JsonOption,
    ModelArgument,
    StoreOption,
    add,
    command_group,
    model_store,
    print_result,
)
from pipeline.commands.releases import served, serving_of, target_of_endpoint
from pipeline.commands.volume import VolumeOptions, on_the_volume

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig
    from stages.parts.base.store import ModelStore
    from stages.parts.records.rollout import Analysis, CanaryCheck, Journal
    from stages.parts.releases.split import Split
    from stages.rollout.target import Target

ReleaseOption = Annotated[
    str | None, typer.Option(help="A release's number or name. Default: the last that select chose.")
]


def register(app: typer.Typer) -> None:
    text = "Roll out a release beside the stable one, step by step."
    group = command_group(text, "rollout start org/name")
    add(group, on_the_volume(start), "rollout start org/name")
    add(group, on_the_volume(status), "rollout status org/name --json")
    add(group, on_the_volume(promote), "rollout promote org/name")
    add(group, on_the_volume(abort), "rollout abort org/name")
    add(group, on_the_volume(move), "rollout move org/name --mode standard --platform gke")
    add(group, render, "rollout render org/name --platform gke --mode route")
    app.add_typer(group, name="rollout")


def start(
    model: ModelArgument, release: ReleaseOption = None, *, volume: VolumeOptions, as_json: JsonOption = False
) -> None:
    """Start a rollout, or continue the one in progress."""
    from stages.parts.base.program import answer_sigterm
    from stages.parts.releases.release import find
    from stages.rollout.resume import chosen
    from stages.rollout.state_machine import roll_out

    answer_sigterm()
    settings, store = volume.load(), model_store(volume.store, model)
    name = find(store, release) if release else chosen(store)
    target = target_of_endpoint(settings, store, model)
    _print(model, roll_out(store, target, name, settings.rollout), as_json)


def status(model: ModelArgument, *, volume: VolumeOptions, as_json: JsonOption = False) -> None:
    """Show the current or last rollout.

    Shows its state, the split of traffic, and the measurements.
    """
    from stages.parts.records.rollout import read_journal, summary

    store = model_store(volume.store, model)
    journal = read_journal(store)
    split = served(store, volume.load(), model)
    document = {"model": model, "rollout": journal and summary(journal), "split": split and vars(split)}
    print_result(document, _view(model, journal, split), as_json)


def promote(model: ModelArgument, *, volume: VolumeOptions, as_json: JsonOption = False) -> None:
    """Approve the rollout in progress, without further waiting.

    The checks of the canary stay the same.
    """
    from stages.parts.base.program import answer_sigterm
    from stages.rollout import commands

    answer_sigterm()
    store = model_store(volume.store, model)
    _print(model, commands.promote(store, _target(store, model, volume.load())), as_json)


def abort(model: ModelArgument, *, volume: VolumeOptions, as_json: JsonOption = False) -> None:
    """Abort the rollout: all traffic goes back to the stable release."""
    from stages.rollout import commands

    store = model_store(volume.store, model)
    given_up = commands.abort(store, _target(store, model, volume.load()))
    text = f"aborted the rollout of {given_up}" if given_up else f"no rollout of {model} is in progress"
    print_result({"model": model, "given_up": given_up}, text, as_json)


def move(
    model: ModelArgument,
    mode: Annotated[str, typer.Option(help="The mode of KServe to serve in: standard or route.")],
    *,
    volume: VolumeOptions,
    as_json: JsonOption = False,
) -> None:
    """Move a model to another mode of KServe without an outage.

    The release starts in the other mode beside the present one, and takes the endpoint's name once it answers; there
    must be room for both. The command sends requests of its own all the while. It fails if one of them does, and goes
    back if they are no longer answered.
    """
    from pipeline.settings.serving import moved
    from stages.parts.base.errors import DrillFailed
    from stages.parts.base.program import answer_sigterm

    answer_sigterm()
    settings, store = volume.load(), model_store(volume.store, model)
    result = moved(settings, store, serving_of(store, settings), mode)
    text = f"{result.release} is served in mode {mode}"
    if result.answers:
        text += (
            f", no longer {result.before}, after {result.seconds:.0f} s; {result.answers.requests} requests meanwhile"
        )
    print_result({"model": model, **result.model_dump(mode="json")}, text, as_json)
    if result.answers and result.answers.failed:
        raise DrillFailed(
            f"{result.answers.failed} of {result.answers.requests} requests failed",
            hint=f"their errors: {', '.join(result.answers.errors)}",
        )


def render(
    model: ModelArgument,
    release: ReleaseOption = None,
    mode: Annotated[
        str | None,
        typer.Option(help="How KServe splits traffic: standard, knative, route or llm. Default: kserve.mode."),
    ] = None,
    *,
    options: ConfigOptions,
    store: StoreOption = STORE,
) -> None:
    """Print as YAML what a rollout's first step applies.

    Needs no cluster. The release is rolled out beside the one in production, or as the first one if there is no other.
    """
    from pipeline.cluster.manifests import as_text
    from pipeline.settings.serving import rendered
    from stages.parts.releases.release import current_release, find
    from stages.rollout.resume import chosen

    settings, models = options.load(), model_store(store, model)
    name, stable = find(models, release) if release else chosen(models), current_release(models)
    documents = rendered(settings, models, name, stable if stable != name else None, mode or settings.kserve.mode)
    sys.stdout.write(as_text(documents))


def _target(store: ModelStore, model: str, settings: RunConfig) -> Target:
    """Return the target that the rollout in progress takes place on."""
    from stages.parts.base.errors import ConfigError
    from stages.parts.records.rollout import under_way

    journal, serves_on = under_way(store), settings.platform.serves_on
    if journal and journal.target != serves_on:
        raise ConfigError(
            f"this rollout is in progress on {journal.target}, not {serves_on}", hint="choose it with --platform"
        )
    return target_of_endpoint(settings, store, model)


def _print(model: str, journal: Journal, as_json: bool) -> None:
    from stages.parts.records.rollout import summary

    text = f"{journal.release}: {journal.state}" + (f", {journal.reason}" if journal.reason else "")
    if journal.state == "awaiting approval":
        text += f" at {journal.percent} %; approve it: slipway rollout promote {model}"
    print_result(summary(journal), text, as_json)


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
        current = None if journal.ended else journal.percent
        steps = " ".join(f"[{percent} %]" if percent == current else f"{percent} %" for percent in journal.steps)
        lines.append(f"steps     {steps}")
    lines.append(f"served    {_share(split)}")
    lines.append(f"started   {journal.started_at.astimezone():%Y-%m-%d %H:%M:%S}")
    if journal.analyses:
        last = journal.analyses[-1]
        lines += ["", f"last look, at {last.percent} %: {last.verdict}", _figures(last)]
    if journal.state == "awaiting approval":
        lines += ["", f"approve: slipway rollout promote {model}", f"abort: slipway rollout abort {model}"]
    return Group(*lines)


def _share(split: Split | None) -> str:
    if split is None or split.stable is None:
        return "nothing"
    canary = f", {split.canary} {split.percent} %" if split.canary else ""
    standby = f"; {split.standby} stands by" if split.standby else ""
    return f"{split.stable} {100 - split.percent if split.canary else 100} %{canary}{standby}"


def _figures(analysis: Analysis) -> Any:
    from rich.text import Text

    from pipeline.runs.tables import plain_table

    styles = {"pass": "green", "fail": "red", "unclear": "yellow"}
    table = plain_table("Check", "Canary", "Stable", "Limit", "Verdict", right=("Canary", "Stable", "Limit"))
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
