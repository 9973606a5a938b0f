"""``slipway releases``, ``rollback`` and ``prune``: list releases, go back to one, remove old ones."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final

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

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig
    from stages.parts.base.serving_settings import AskedServing
    from stages.parts.base.store import ModelStore
    from stages.parts.releases.listing import MoveSummary, Pruned, ReleaseSummary
    from stages.parts.releases.split import Split

KEPT: Final = 3
ModelArgument = Annotated[str, typer.Argument(help="A model that a run has published.")]


def register(app: typer.Typer) -> None:
    app.command("releases", epilog="Example: slipway releases org/name --history")(on_the_volume(releases))
    app.command("rollback", epilog="Example: slipway rollback org/name --to 3")(on_the_volume(rollback))
    app.command("prune", epilog="Example: slipway prune org/name --keep 5")(on_the_volume(prune))


def releases(
    model: ModelArgument,
    platform: PlatformOption = None,
    config: ConfigOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
    history: Annotated[bool, typer.Option("--history", help="List every move between releases instead.")] = False,
) -> None:
    """List a model's releases, the newest first, with the state of each."""
    from stages.parts.releases.listing import catalogue, summarized_moves

    place = place_of(store, model)
    if history:
        moves = summarized_moves(place)
        said: Any = _history(moves) if moves else f"no release of {model} was published or rolled out yet"
        print_result([move.model_dump(mode="json") for move in moves], said, as_json)
        return
    found = catalogue(place, served(place, load_config(config, None, None, platform, None), model))
    text: Any = _table(found) if found else f"no release of {model} in {store}; publish one with: slipway run {model}"
    print_result([each.model_dump(mode="json") for each in found], text, as_json)


def rollback(
    model: ModelArgument,
    to: Annotated[
        str | None, typer.Option(help="A release's number or name. Default: the previous one in production.")
    ] = None,
    platform: PlatformOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Go back to an earlier release. If the model is being served, all traffic moves to it as soon as it answers.

    No weights are copied. If nothing is being served, the next `serve` serves it.
    """
    from pipeline.settings.serving import target_of
    from stages.parts.base.program import answer_sigterm
    from stages.rollout.commands import roll_back

    answer_sigterm()
    settings = load_config(config, None, None, platform, assignments)
    place = place_of(store, model)
    target = target_of(settings, place, model, serving_of(place, settings))
    release, is_served = roll_back(place, target, settings.rollout, to=to)
    said = f"{release} is in production" + ("" if is_served else f"; nothing was being served: slipway serve {model}")
    print_result({"model": model, "release": release, "served": is_served}, said, as_json)


def prune(
    model: ModelArgument,
    keep: Annotated[int, typer.Option(help="How many of the newest releases to keep.")] = KEPT,
    others: Annotated[
        bool, typer.Option("--others", help="Also remove variants and evaluations that only other settings need.")
    ] = False,
    platform: PlatformOption = None,
    config: ConfigOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Remove old releases. Releases in production, before it, in a rollout, or being served are kept.

    The store keeps the last variants and evaluations of other settings, so that a run with those finds them again.
    `--others` removes them.
    """
    from stages.parts.releases.listing import prune as remove
    from stages.parts.releases.split import Split

    place = place_of(store, model)
    settings = load_config(config, None, None, platform, None)
    pruned = remove(place, keep, served(place, settings, model) or Split(stable=None), others=others)
    print_result(pruned.model_dump(mode="json"), _said(pruned), as_json)


def place_of(store: Any, model: str) -> ModelStore:
    """A model's folder in the store, which need not exist.

    Raises:
        InvalidName: *model* is neither a name on the Hub nor a local directory.
    """
    from stages.parts.base.store import ModelStore
    from stages.parts.model.name import ModelName

    return ModelStore(store.absolute(), ModelName.parse(model).id)


def serving_of(place: ModelStore, settings: RunConfig) -> AskedServing:
    """The settings of the running endpoint, so that commands need not repeat them; else the configured ones."""
    from stages.parts.base.serving_settings import AskedServing
    from stages.parts.base.settings import parse
    from stages.parts.endpoint.endpoint import endpoint

    found = endpoint(place)
    return parse(AskedServing, found.serving, "endpoint.json") if found else settings.serving


def served(place: ModelStore, settings: RunConfig, model: str) -> Split | None:
    """What is being served; None if nothing is. Starts nothing."""
    from pipeline.settings.serving import target_of
    from stages.parts.records.rollout import LOCAL
    from stages.parts.releases.split import Split

    if settings.platform.serves_on != LOCAL:
        return target_of(settings, place, model, settings.serving).split()
    from stages.parts.endpoint.endpoint import endpoint

    found = endpoint(place)
    return Split(found.release, found.canary, found.percent, found.standby) if found else None


def _table(found: list[ReleaseSummary]) -> Any:
    from rich.table import Table
    from rich.text import Text

    styles = {"production": "green", "canary": "cyan", "candidate": "cyan", "rolled back": "red"}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("Release", "Variant", "Digest", "Score", "Made", "Size", "State"):
        table.add_column(heading, justify="right" if heading in ("Release", "Score", "Size") else "left")
    for each in found:
        table.add_row(
            str(each.number),
            each.variant,
            each.digest[:12] if each.digest else "damaged",
            "–" if each.score is None else f"{each.score:.3f}",
            f"{each.made_at.astimezone():%Y-%m-%d %H:%M}",
            _size(each.size_bytes),
            Text(each.state, style=styles.get(each.state, "")),
        )
    return table


def _history(moves: list[MoveSummary]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("When", "What", "From", "To", "Reached", "Outcome", "Took", "Who", "Why"):
        table.add_column(heading, justify="right" if heading in ("From", "To", "Reached", "Took") else "left")
    for move in moves:
        table.add_row(
            f"{move.started_at.astimezone():%Y-%m-%d %H:%M}",
            move.kind,
            _number(move.before),
            _number(move.release),
            f"{move.percent} %",
            Text(move.result, style="green" if move.result == "promoted" else "red"),
            str(timedelta(seconds=round(move.seconds))),
            ", ".join(dict.fromkeys(act.by for act in move.acts)),
            move.reason,
        )
    return table


def _number(release: str | None) -> str:
    return str(int(release.partition("-")[0])) if release else "–"


def _said(pruned: Pruned) -> str:
    removed = ", ".join((*pruned.removed, *(["what other settings made"] if pruned.others else [])))
    if not removed:
        return f"nothing to remove: all {len(pruned.kept)} releases are kept"
    said = f"removed {removed}; {_size(pruned.freed_bytes)} freed"
    shared = pruned.removed_bytes - pruned.freed_bytes
    return said + (
        f", {_size(shared)} remain, because variants or other releases link to the same files" if shared else ""
    )


def _size(count: int) -> str:
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
