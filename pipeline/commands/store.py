"""``slipway store``: what a store holds, what may be removed, whether it is sound, and its backups."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.commands.options import Commands, StoreOptions, VolumeOptions
from pipeline.commands.releases import served
from pipeline.commands.usage import time_of
from pipeline.runs.engine import Printout, plain_table
from scoring.units import readable
from stages.parts.base.errors import Busy, ConfigError, DamagedModel
from stages.parts.base.log import say

if TYPE_CHECKING:
    from pipeline.upkeep.checking import Checked
    from pipeline.upkeep.contents import Space
    from pipeline.upkeep.pruning import Pruned

SHOWN = 10
"""Files that nothing refers to, of each model, in a text."""

commands = Commands("Look after the store: space, damage, backups.", "store du", name="store")

MaybeModelArgument = Annotated[str | None, typer.Argument(help="One model. Default: all.")]
BackupArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The backup's folder.")]


@commands.add("store du")
def du(model: MaybeModelArgument = None, *, volume: VolumeOptions) -> Printout:
    """Show how much space each model takes.

    A file that a base model, a variant and a release link to counts once, where it is first.
    """
    from pipeline.upkeep.contents import models_in, space

    rows = [space(store) for store in models_in(volume.store, model)]
    return Printout(rows, _spaces(rows) if rows else "the store is empty")


@commands.add("store prune org/name --keep 5")
def prune(
    model: Annotated[str | None, typer.Argument(help="One model, or --all.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All models of the store.")] = False,
    keep: Annotated[int, typer.Option(help="How many of a model's newest releases to keep.")] = 3,
    older: Annotated[
        str | None, typer.Option(help="Only what is older, such as 30d; then also old runs, and unfinished downloads.")
    ] = None,
    others: Annotated[
        bool, typer.Option("--others", help="Also remove variants and evaluations that only other settings need.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be removed.")] = False,
    *,
    volume: VolumeOptions,
) -> Printout:
    """Remove what nothing uses.

    Releases in production, before it, in a rollout, or being served are kept, and so are runs that decided for a
    release that is kept. The store keeps the last variants and evaluations of other settings, so that a run with those
    finds them again. `--others` removes them.
    """
    from pipeline.upkeep.contents import models_in
    from pipeline.upkeep.pruning import prune as remove
    from stages.parts.releases.release import Split

    if everything == (model is not None):
        raise ConfigError("prune takes a model, or --all", hint="slipway store prune --all --dry-run")
    before, settings, pruned = time_of(older, "--older") if older else None, volume.load(), []
    for store in models_in(volume.store, model):
        split = served(store, settings, store.model) or Split(stable=None)
        try:
            pruned.append(remove(store, keep, split, older=before, others=others, dry_run=dry_run))
        except Busy as error:
            if model:
                raise
            say(f"{store.model} stays as it is: {error}")
    return Printout(pruned, "\n".join(_removed(each, dry_run) for each in pruned))


@commands.add("store check")
def check(model: MaybeModelArgument = None, *, volume: VolumeOptions) -> Printout:
    """Read every byte that a record refers to.

    Compares each file with the digest that was recorded, names the releases that a damaged file belongs to, and lists
    the files that nothing refers to. Exit code 14 if something is damaged.
    """
    from pipeline.upkeep.checking import Digests
    from pipeline.upkeep.checking import check as check_model
    from pipeline.upkeep.contents import models_in

    digests = Digests()
    results = [check_model(store, digests) for store in models_in(volume.store, model)]
    text = "\n".join(line for each in results for line in _checked(each))
    if not any(each.damaged for each in results):
        return Printout(results, text)
    damaged = [each.model for each in results if each.damaged]
    return Printout(results, text, DamagedModel(f"damaged: {', '.join(damaged)}", hint="see above, file by file"))


@commands.add("store backup /backups/2026-11-26")
def backup(target: BackupArgument, model: MaybeModelArgument = None, *, options: StoreOptions) -> Printout:
    """Copy the store while runs go on.

    Hard links stay such, and every byte is compared with its record. If it is interrupted, the same command continues.
    DIR/store is then a store as any other. Runs that go on, and the logs of the endpoint, are left out.
    """
    from pipeline.upkeep.backup import back_up

    made = back_up(options.store, target, model)
    text = f"{', '.join(made.models) or 'an empty store'}: {len(made.files)} files in {target}, all of them verified"
    return Printout({"models": made.models, "files": len(made.files), "path": str(target)}, text)


@commands.add("store restore /backups/2026-11-26")
def restore(source: BackupArgument, model: MaybeModelArgument = None, *, options: StoreOptions) -> Printout:
    """Bring a backup back.

    Nothing is overwritten: the store must not have the models yet. Every byte is compared with what was backed up
    before a model appears. If it is interrupted, the same command continues.
    """
    from pipeline.upkeep.backup import restore as bring_back

    made = bring_back(options.store, source, model)
    text = f"restored {', '.join(made.models)} to {options.store}: {len(made.files)} files, all of them verified"
    return Printout({"models": made.models, "files": len(made.files), "store": str(options.store)}, text)


def _spaces(rows: list[Space]) -> Any:
    kinds = ("base", "variants", "releases", "evaluations", "runs", "others", "rest", "total", "shared")
    table = plain_table("Model", *(kind.capitalize() for kind in kinds), right=[kind.capitalize() for kind in kinds])
    for row in rows:
        table.add_row(row.model, *(readable(getattr(row, kind)) for kind in kinds))
    if len(rows) > 1:
        table.add_row("all", *(readable(sum(getattr(row, kind) for row in rows)) for kind in kinds))
    return table


def _removed(pruned: Pruned, dry_run: bool) -> str:
    lists = [
        *pruned.removed,
        *(f"run {run}" for run in pruned.runs),
        *(["what other settings made"] if pruned.others else []),
        *(["what was left unfinished"] if pruned.unfinished else []),
    ]
    if not lists:
        return f"{pruned.model}: nothing to remove: {len(pruned.kept)} releases are kept"
    removed, freed = ("would remove", "would be freed") if dry_run else ("removed", "freed")
    text = f"{pruned.model}: {removed} {', '.join(lists)}; {readable(pruned.freed_bytes)} {freed}"
    if shared := pruned.removed_bytes - pruned.freed_bytes:
        text += f", {readable(shared)} remain, because variants or other releases link to the same files"
    return text


def _checked(result: Checked) -> list[str]:
    read = f"{readable(result.size_bytes)} in {result.files} files read"
    lines = [f"{result.model}: {read}; {len(result.damaged)} damaged"]
    for damage in result.damaged:
        lines.append(f"  {' = '.join(damage.paths)}: {damage.problem}")
        lines += [f"    part of {release}" for release in damage.releases]
        lines.append(f"    {damage.hint}")
    if result.unreferenced:
        lines.append(f"  nothing refers to {len(result.unreferenced)} files, {readable(result.unreferenced_bytes)}:")
        lines += [f"    {path}" for path in result.unreferenced[:SHOWN]]
    return lines
