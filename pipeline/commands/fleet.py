"""``slipway apply`` and ``models``: run what a fleet file changes, and show all models."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.commands.options import Commands, ConfigOptions, PlatformOption, Where
from pipeline.commands.releases import target_of_endpoint
from pipeline.runs.engine import Printout, last_runs, plain_table
from stages.parts.base.errors import AccessDenied, ConfigError, Interrupted, SlipwayError
from stages.parts.base.log import say

if TYPE_CHECKING:
    from pipeline.planning.fleet import FleetModel
    from pipeline.runs.models import ModelRow
    from pipeline.settings.config import RunConfig

commands = Commands()


@commands.add("apply fleet.yaml --dry-run")
def apply(
    file: Annotated[Path, typer.Argument(help="YAML with models, their owners and settings, and defaults.")],
    model: Annotated[str | None, typer.Option(help="Only this model of the file.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit of --model that was pushed to main.")] = None,
    nightly: Annotated[
        bool, typer.Option("--nightly", envvar="SLIPWAY_NIGHTLY", help="Run those with schedule: nightly, too.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be run and why; start nothing.")] = False,
    platform: PlatformOption = None,
    *,
    where: Where,
) -> Printout:
    """Run the models of a fleet file that have changed.

    A model is run if its settings, or the commit that its revision names, are not those of its last run. One that fails
    does not keep the others from being run. On a cluster the runs are submitted, and not waited for.
    """
    from pipeline.planning.fleet import FleetStep, find, read_fleet, step_of
    from stages.parts.base.store import directory_name

    if commit and not model:
        raise ConfigError("--commit is of one model", hint="name it with --model")
    fleet = read_fleet(file, platform, on_cluster=where.on_cluster)
    chosen = [find(fleet, model, pushed=bool(commit))] if model else [*fleet.values()]
    spaces, steps = _namespaces(fleet.values()), list[FleetStep]()
    engines = {namespace: where.engine_of(settings=config, follow=False) for namespace, config in spaces.items()}
    runs = {namespace: last_runs(engine.runs()) for namespace, engine in engines.items()}
    for each in chosen:
        try:
            last = runs[each.config.platform.namespace].get(directory_name(each.name.id))
            steps.append(step_of(each, commit or each.commit_now(), last.state if last else None, nightly=nightly))
        except SlipwayError as error:
            steps.append(FleetStep(each, error=error))
    lines = [line for step in steps for line in step.lines("would run" if dry_run else "runs")]
    lines += [] if model else _left(fleet, where, spaces.values(), file)
    if not any(step.starts or step.error for step in steps):
        lines.append(f"nothing to do: what {file} says is in force")
    elif not dry_run:
        say("\n".join(lines))
        lines = []
        for step in (step for step in steps if step.starts):
            name, config = step.model.name, step.model.config
            revision = step.model.policy.revision if name.directory else step.commit  # not one that resolve remembers
            source, engine = str(name.directory or name.source), engines[config.platform.namespace]
            try:
                step.run = str(engine.start(config, source, revision, serve=True).document["run"])
            except Interrupted:
                raise
            except SlipwayError as error:
                step.error = error
            lines.append(f"{name.id}: {step.error or f'run {step.run}'}")
    failure = next((step.error for step in steps if step.error), None)
    return Printout([step.document() for step in steps], "\n".join(lines), failure)


def _namespaces(models: Iterable[FleetModel]) -> dict[str, RunConfig]:
    """Return each namespace that the models are in, with the settings of one of them."""
    return {model.config.platform.namespace: model.config for model in models}


def _left(fleet: Iterable[str], where: Where, configs: Iterable[RunConfig], file: Path) -> Iterator[str]:
    """Say which models are served and not in the file, as far as that may be seen, and how to end that."""
    from stages.parts.endpoint.endpoint import serving_here
    from stages.rollout.kserve.detect import served_modes
    from stages.rollout.kserve.modes import mode_named

    ends = {}
    if not where.on_cluster:
        ends = {served.model: f"slipway serve {served.model} --stop" for served in serving_here(where.store)}
    for cluster in [where.cluster(config) for config in configs] if where.on_cluster else []:
        with contextlib.suppress(AccessDenied):
            for served, modes in served_modes(cluster).items():
                kinds = (f"{mode_named(mode).services.plural} {' '.join(names)}" for mode, names in modes.items())
                ends[served] = "; ".join(f"kubectl -n {cluster.namespace} delete {kind}" for kind in kinds)
    for model in ends.keys() - set(fleet):
        yield f"{model} is not in {file} and goes on serving; to end that: {ends[model]}"


@commands.add("models fleet.yaml")
def models(
    file: Annotated[Path | None, typer.Argument(help="A fleet file, for the owners and what was not run yet.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write a HTML page, too, such as .slipway/models.html beside the reports.")
    ] = None,
    *,
    options: ConfigOptions,
    where: Where,
) -> Printout:
    """Show what serves, what ran last, and what waits.

    With a fleet file, whose each model is, and those that were not run yet.
    """
    from pipeline.planning.fleet import read_fleet
    from pipeline.runs.models import HEADINGS, ModelRow, page_of
    from stages.parts.base.files import write_text
    from stages.parts.base.store import directory_name

    fleet = read_fleet(file, options.platform, on_cluster=where.on_cluster).values() if file else ()
    owners = {directory_name(model.name.id): model.policy.owner for model in fleet}
    rows: dict[str, ModelRow] = {}
    for settings in _namespaces(fleet).values() or [options.of_cluster() if where.on_cluster else options.load()]:
        last = last_runs(where.engine_of(settings=settings).runs())
        served = {directory_name(row.model): row for row in _rows(where, settings)}
        for name in served | last | owners:
            row = served.get(name) or rows.get(name) or ModelRow(model=name.replace("--", "/", 1))
            rows[name] = row.after(last.get(name), owners.get(name, ""))
    shown = [rows[name] for name in sorted(rows)]
    table = plain_table(*HEADINGS, rows=(row.columns for row in shown), right=("Replicas", "Per hour"))
    if page:
        write_text(page, page_of(shown, page))
    none = "no models yet; run one with: slipway run MODEL"
    return Printout(shown, table if shown else none)


def _rows(where: Where, settings: RunConfig) -> list[ModelRow]:
    """Read the models of a store, on a cluster in a pod that has it."""
    from pipeline.argo.template import call_in_pod
    from pipeline.runs.models import ModelRow, row_of
    from stages.parts.base.store import ModelStore

    if where.on_cluster:
        output, _ = call_in_pod(where.cluster(settings), settings, ["models", "--json"])
        return [ModelRow.model_validate(row) for row in json.loads(output)]
    folders = {path.parent.name for kind in ("runs", "releases") for path in where.store.glob(f"[!.]*/{kind}")}
    stores = [ModelStore(where.store.absolute(), name.replace("--", "/", 1)) for name in sorted(folders)]
    return [row_of(store, partial(target_of_endpoint, settings, store, store.model)) for store in stores]
