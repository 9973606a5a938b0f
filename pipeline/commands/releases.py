"""``slipway serve``, ``releases`` and ``rollback``: serve a release, list them, go back."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.commands import options as common
from pipeline.runs.engine import Printout, plain_table
from scoring.units import readable
from stages.parts.base.errors import Interrupted, NothingToServe

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig
    from stages.parts.base.serving_settings import AskedServing
    from stages.parts.base.store import ModelStore
    from stages.parts.releases.listing import MoveSummary, ReleaseSummary
    from stages.parts.releases.release import Split
    from stages.rollout.target import Target

commands = common.Commands()
release_commands = common.Commands(
    "Put a release in production.", "release promote org/name --reason …", name="release"
)


@commands.add("serve org/name --port 8000")
def serve(
    model: common.ModelArgument,
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 takes a free one. Default: serving.port.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: this machine only.")] = None,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the endpoint that a run left serving.")] = False,
    config: common.ConfigOption = None,
    assignments: common.SetOption = None,
    *,
    options: common.StoreOptions,
) -> None:
    """Serve the published release, OpenAI-compatible.

    Serves in the foreground, until Ctrl-C. Set SLIPWAY_API_KEY to demand a key from clients.
    """
    from stages.parts.base.program import answer_sigterm
    from stages.parts.endpoint.endpoint import stop as stop_serving
    from stages.parts.endpoint.supervisor import serve_foreground

    flags = {"serving.port": port, "serving.host": host}
    fields = [f"{field}={value}" for field, value in flags.items() if value is not None]
    settings = common.ConfigOptions(config=config, assignments=assignments).load(platform="local", assignments=fields)
    models = options.of_model(model)
    if stop:
        typer.echo(f"stopped {model}" if stop_serving(models) else f"{model} was not being served")
        return
    answer_sigterm()
    try:
        serve_foreground(models, settings.serving)
    except (KeyboardInterrupt, Interrupted):
        typer.echo("stopped", err=True)


@commands.add("releases org/name --history")
def releases(
    model: common.ModelArgument,
    history: Annotated[bool, typer.Option("--history", help="List every move between releases instead.")] = False,
    *,
    volume: common.VolumeOptions,
) -> Printout:
    """List a model's releases, the newest first."""
    from stages.parts.releases.listing import catalogue, summarized_moves

    store = volume.of_model(model)
    if history:
        moves = summarized_moves(store)
        text = _history(moves) if moves else f"no release of {model} was published or rolled out yet"
        return Printout(moves, text)
    rows = catalogue(store, served(store, volume.load(), model))
    none = f"no release of {model} in {volume.store}; publish one with: slipway run {model}"
    return Printout(rows, _table(rows) if rows else none)


@commands.add("rollback org/name --to 3", cleans_up=True)
def rollback(
    model: common.ModelArgument,
    to: Annotated[
        str | None, typer.Option(help="A release's number or name. Default: the previous one in production.")
    ] = None,
    *,
    volume: common.VolumeOptions,
) -> Printout:
    """Go back to an earlier release.

    If the model is being served, all traffic moves to it as soon as it answers. No weights are copied. If nothing is
    being served, the next `serve` serves it.
    """
    from stages.rollout.commands import roll_back

    settings, store = volume.load(), volume.of_model(model)
    target = target_of_endpoint(settings, store, model)
    return _in_production(model, *roll_back(store, target, settings.rollout, to=to))


@release_commands.add("release promote org/name --release 4 --reason 'its tone was wanted'", cleans_up=True)
def promote(
    model: common.ModelArgument,
    reason: Annotated[str, typer.Option(help="Why, for the history of the releases.")],
    release: Annotated[
        str | None, typer.Option(help="A release's number or name. Default: the newest, such as one that a run kept.")
    ] = None,
    *,
    volume: common.VolumeOptions,
) -> Printout:
    """Put a release in production, whatever a run found of it.

    If the model is being served, the release is rolled out as any other, and withdrawn if it fails. Your name and
    reason are recorded.
    """
    from stages.parts.releases.release import find, numbered
    from stages.rollout.commands import publish

    settings, store = volume.load(), volume.of_model(model)
    if not (names := numbered(store)):
        raise NothingToServe(f"no release of {model} is published", hint=f"first: slipway run {model}")
    name = find(store, release) if release else names[max(names)]
    target = target_of_endpoint(settings, store, model)
    return _in_production(model, name, publish(store, target, settings.rollout, name, reason))


def _in_production(model: str, release: str, is_served: bool) -> Printout:
    text = f"{release} is in production" + ("" if is_served else f"; nothing was being served: slipway serve {model}")
    return Printout({"model": model, "release": release, "served": is_served}, text)


@release_commands.add("release export org/name release.tar", cleans_up=True)
def export(
    model: common.ModelArgument,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A new .tar file or directory, oci://… or hf://…")],
    release: common.ReleaseOption = None,
    *,
    options: common.LocalOptions,
) -> Printout:
    """Write a release as an OCI image, or into a repository on the Hugging Face Hub.

    The image, also at oci://registry/name:tag, has the release's files in /models, its decision and its signature among
    them, as KServe and image volumes take it; `release import` puts it into another store. At hf://org/name@branch they
    are all that the branch has then.
    """
    from pipeline.upkeep.image import export as write

    store, folder = options.of_model(model), options.release_of(model, release)
    digest = write(folder, store.model, target)
    document = {"model": store.model, "release": folder.name, "path": target, "digest": digest}
    return Printout(document, f"{folder.name} is in {target}: {digest}")


@release_commands.add("release import release.tar --key signing.pub", name="import", cleans_up=True)
def import_(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="What `release export` wrote, a file or oci://…")],
    key: Annotated[
        Path | None, typer.Option(help="The public key of its signature. Default: as serving.signing says.")
    ] = None,
    *,
    options: common.LocalOptions,
) -> Printout:
    """Put an exported release into this store.

    Every byte is compared with its digests first, and the release with its decision. `release promote` then puts it in
    production. Exit code 46 if it is not signed by the key.
    """
    from pipeline.upkeep.image import bring_in
    from stages.parts.releases.signing import check_trust, verify

    serving = options.load(platform="local").serving
    store, name = bring_in(options.store, source, lambda work: verify(work, key) if key else check_trust(work, serving))
    text = f"{name} of {store.model} is in the store; to serve it: slipway release promote {store.model} --reason …"
    return Printout({"model": store.model, "release": name}, text)


def serving_of(store: ModelStore, settings: RunConfig) -> AskedServing:
    """Return the settings of the running endpoint, so that commands need not repeat them; else the configured ones."""
    from stages.parts.base.serving_settings import AskedServing
    from stages.parts.base.settings import parse
    from stages.parts.endpoint.endpoint import endpoint

    running = endpoint(store)
    return parse(AskedServing, running.serving, "endpoint.json") if running else settings.serving


def target_of_endpoint(settings: RunConfig, store: ModelStore, model: str) -> Target:
    """Return the target that serves a model, with the settings of the running endpoint."""
    from pipeline.settings.config import kserve_settings
    from stages.rollout.target import connect

    serving = serving_of(store, settings)
    return connect(settings.platform.serves_on, store, model, serving, kserve_settings(settings))


def served(store: ModelStore, settings: RunConfig, model: str) -> Split | None:
    """Return the split of traffic; None if nothing is being served. Starts nothing."""
    from stages.parts.endpoint.endpoint import endpoint
    from stages.parts.records.rollout import LOCAL
    from stages.parts.releases.release import Split

    if settings.platform.serves_on != LOCAL:
        return target_of_endpoint(settings, store, model).split()
    running = endpoint(store)
    return Split(running.release, running.canary, running.percent, running.standby) if running else None


def _table(rows: list[ReleaseSummary]) -> Any:
    from rich.text import Text

    styles = {"production": "green", "canary": "cyan", "candidate": "cyan", "rolled back": "red"}
    headings = ("Release", "Variant", "Engine", "Digest", "Score", "Made", "Size", "State")
    table = plain_table(*headings, right=("Release", "Score", "Size"))
    for row in rows:
        table.add_row(
            str(row.number),
            " + ".join((row.variant, *row.adapters)),
            row.engine or "–",
            row.digest[:12] if row.digest else "damaged",
            "–" if row.score is None else f"{row.score:.3f}",
            f"{row.made_at.astimezone():%Y-%m-%d %H:%M}",
            readable(row.size_bytes),
            Text(row.state, style=styles.get(row.state, "")),
        )
    return table


def _history(moves: list[MoveSummary]) -> Any:
    from rich.text import Text

    headings = ("When", "What", "From", "To", "Reached", "Outcome", "Took", "Who", "Why")
    table = plain_table(*headings, right=("From", "To", "Reached", "Took"))
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
            "; ".join(dict.fromkeys(filter(None, (move.reason, *(act.reason for act in move.acts))))),
        )
    return table


def _number(release: str | None) -> str:
    return str(int(release.partition("-")[0])) if release else "–"
