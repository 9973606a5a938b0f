"""``slipway rollout``: start, watch, approve or abort the rollout of a release."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.commands.options import Commands, LocalOptions, ModelArgument, VolumeOptions
from pipeline.commands.releases import served, serving_of, target_of_endpoint
from pipeline.runs.engine import Printout, plain_table
from stages.parts.base.errors import ConfigError, DrillFailed, check_known

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig
    from stages.parts.base.store import ModelStore
    from stages.parts.records.rollout import Analysis, CanaryCheck, Journal
    from stages.parts.releases.release import Split
    from stages.rollout.target import Target

ReleaseOption = Annotated[
    str | None, typer.Option(help="A release's number or name. Default: the last that select chose.")
]

commands = Commands("Roll out a release beside the stable one, step by step.", "rollout start org/name", name="rollout")


@commands.add("rollout start org/name", cleans_up=True)
def start(model: ModelArgument, release: ReleaseOption = None, *, volume: VolumeOptions) -> Printout:
    """Start a rollout, or continue the one in progress."""
    from stages.parts.releases.release import find
    from stages.rollout.resume import chosen
    from stages.rollout.state_machine import roll_out

    settings, store = volume.load(), volume.of_model(model)
    name = find(store, release) if release else chosen(store)
    target = target_of_endpoint(settings, store, model)
    return _printout(model, roll_out(store, target, name, settings.rollout))


@commands.add("rollout status org/name --json")
def status(model: ModelArgument, *, volume: VolumeOptions) -> Printout:
    """Show the current or last rollout.

    Shows its state, the split of traffic, and the measurements.
    """
    from stages.parts.records.rollout import read_journal, summary

    store = volume.of_model(model)
    journal = read_journal(store)
    split = served(store, volume.load(), model)
    document = {"model": model, "rollout": journal and summary(journal), "split": split and vars(split)}
    return Printout(document, _view(model, journal, split))


@commands.add("rollout promote org/name", cleans_up=True)
def promote(model: ModelArgument, *, volume: VolumeOptions) -> Printout:
    """Approve the rollout in progress, without further waiting.

    The checks of the canary stay the same.
    """
    from stages.rollout.commands import promote as approve

    store = volume.of_model(model)
    return _printout(model, approve(store, _target(store, model, volume.load())))


@commands.add("rollout abort org/name")
def abort(model: ModelArgument, *, volume: VolumeOptions) -> Printout:
    """Abort the rollout: all traffic goes back to the stable release."""
    from stages.rollout.commands import abort as give_up

    store = volume.of_model(model)
    given_up = give_up(store, _target(store, model, volume.load()))
    text = f"aborted the rollout of {given_up}" if given_up else f"no rollout of {model} is in progress"
    return Printout({"model": model, "given_up": given_up}, text)


@commands.add("rollout move org/name --mode standard --platform gke", cleans_up=True)
def move(
    model: ModelArgument,
    mode: Annotated[str, typer.Option(help="The mode of KServe to serve in: standard or route.")],
    *,
    volume: VolumeOptions,
) -> Printout:
    """Move a model to another mode of KServe without an outage.

    The release starts in the other mode beside the present one, and takes the endpoint's name once it answers; there
    must be room for both. The command sends requests of its own all the while. It fails if one of them does, and goes
    back if they are no longer answered.
    """
    from pipeline.settings.config import served_by_kserve
    from stages.parts.cluster.api import connect
    from stages.rollout.kserve.move import movable_modes
    from stages.rollout.kserve.move import move as change_mode

    settings, store = volume.load(), volume.of_model(model)
    kserve = served_by_kserve(settings)
    check_known("mode to move to", mode, movable_modes())
    result = change_mode(connect(namespace=kserve.namespace), store, serving_of(store, settings), kserve, mode)
    text, failure = f"{result.release} is served in mode {mode}", None
    if answers := result.answers:
        text += f", no longer {result.before}, after {result.seconds:.0f} s; {answers.requests} requests meanwhile"
        if answers.failed:
            hint = f"their errors: {', '.join(answers.errors)}"
            failure = DrillFailed(f"{answers.failed} of {answers.requests} requests failed", hint=hint)
    return Printout({"model": model, **result.model_dump(mode="json")}, text, failure)


@commands.add("rollout render org/name --platform gke --mode route")
def render(
    model: ModelArgument,
    release: ReleaseOption = None,
    mode: Annotated[
        str | None,
        typer.Option(help="How KServe splits traffic: standard, knative, route or llm. Default: kserve.mode."),
    ] = None,
    *,
    options: LocalOptions,
) -> None:
    """Print as YAML what a rollout's first step applies.

    Needs no cluster. The release is rolled out beside the one in production, or as the first one if there is no other.
    """
    from pipeline.cluster.manifests import as_text
    from pipeline.settings.config import served_by_kserve
    from stages.parts.releases.release import current_release, find
    from stages.rollout.kserve.modes import MODES
    from stages.rollout.kserve.modes import render as objects_of
    from stages.rollout.kserve.objects import KServeEndpoint
    from stages.rollout.resume import chosen

    settings, models = options.load(), options.of_model(model)
    name, stable = find(models, release) if release else chosen(models), current_release(models)
    kserve, mode = served_by_kserve(settings), mode or settings.kserve.mode
    check_known("mode (no cluster is asked for its own)", mode, MODES)
    endpoint = KServeEndpoint(models, settings.serving, kserve, kserve.namespace or "default")
    beside, rollout = stable if stable != name else None, settings.rollout
    percent, copied = (0, rollout.mirror.percent) if rollout.mirror and beside else (rollout.steps[0], 0)
    sys.stdout.write(as_text(objects_of(endpoint, name, beside, mode, percent, copied)))


def _target(store: ModelStore, model: str, settings: RunConfig) -> Target:
    """Return the target that the rollout in progress takes place on."""
    from stages.parts.records.rollout import under_way

    journal, serves_on = under_way(store), settings.platform.serves_on
    if journal and journal.target != serves_on:
        hint = "choose it with --platform"
        raise ConfigError(f"this rollout is in progress on {journal.target}, not {serves_on}", hint=hint)
    return target_of_endpoint(settings, store, model)


def _printout(model: str, journal: Journal) -> Printout:
    from stages.parts.records.rollout import summary

    text = f"{journal.release}: {journal.state}" + (f", {journal.reason}" if journal.reason else "")
    if journal.state == "awaiting approval":
        text += f" at {journal.percent} %; approve it: slipway rollout promote {model}"
    return Printout(summary(journal), text)


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
        shares = {percent: f"{percent} %" if percent else "copies" for percent in journal.steps}
        steps = " ".join(f"[{share}]" if percent == current else share for percent, share in shares.items())
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

    styles = {"pass": "green", "fail": "red", "unclear": "yellow"}
    table = plain_table("Check", "Canary", "Stable", "Limit", "Verdict", right=("Canary", "Stable", "Limit"))
    for check in analysis.checks:
        cells = [_cell(check, value) for value in (check.canary, check.stable, check.limit)]
        table.add_row(check.name, *cells, Text(check.verdict, style=styles[check.verdict]))
    return table


def _cell(check: CanaryCheck, value: float | None) -> str:
    if value is None:
        return "–"
    by_unit = {"share": f"{value:.1%}", "agreement": f"{value:.3f}", "": f"{value:.0f}"}
    return by_unit.get(check.unit, f"{value:.1f} {check.unit}")
