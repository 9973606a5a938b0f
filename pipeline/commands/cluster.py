"""``slipway install``, ``uninstall`` and ``doctor``: prepare a cluster for runs, and check it or this machine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pipeline.commands.options import Commands, ConfigOptions, ContextOption, Where
from pipeline.runs.engine import Printout, plain_table
from stages.parts.base.errors import ConfigError
from stages.parts.base.log import say

commands = Commands()


@commands.add("doctor")
def doctor(*, options: ConfigOptions, where: Where) -> Printout:
    """Check that this machine or a cluster is ready for runs.

    Says how to get what is missing.
    """
    from rich.text import Text

    settings = where.settings(options)
    if where.on_cluster:
        from pipeline.cluster.doctor import check_cluster

        findings = check_cluster(where.cluster(settings), settings)
    else:
        from pipeline.local.doctor import check_machine

        findings = check_machine(settings, where.store.absolute())
    failure = typer.Exit(1) if any(finding.state == "missing" for finding in findings.values()) else None
    document = [{"what": check, **finding._asdict()} for check, finding in findings.items()]
    styles = {"ok": "green", "off": "dim", "warning": "yellow", "missing": "red"}
    rows = [(check, Text(state, style=styles[state]), *texts) for check, (state, *texts) in findings.items()]
    return Printout(document, plain_table("Check", "State", "Found", "What to do", rows=rows), failure)


@commands.add("install --platform eks --dry-run")
def install(
    context: ContextOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the cluster check everything, and change nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Take over fields that another manager has changed.")] = False,
    *,
    options: ConfigOptions,
) -> Printout:
    """Apply what a cluster needs for runs and rollouts.

    That is the namespace, rights, network policies, the volume, limits, the workflow template and, if KServe is
    installed, what rollouts need. It can be repeated: only what differs is changed. Argo Workflows must be installed
    already.
    """
    from pipeline.cluster.install import has_kserve, table
    from pipeline.cluster.install import install as apply

    settings = options.of_cluster()
    cluster = Where(context=context).cluster(settings)
    applied = apply(cluster, settings, dry_run=dry_run, force=force)
    if not has_kserve(cluster):
        say("note: KServe is not installed, so runs can't serve; once it is, install again")
    return Printout([vars(change) for change in applied], table(applied))


@commands.add("uninstall --platform eks --dry-run")
def uninstall(
    context: ContextOption = None,
    models: Annotated[
        bool,
        typer.Option("--models", help="Remove the volume with all models too, and the namespace if it is empty then."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Go on while runs are active or endpoints serve.")] = False,
    *,
    options: ConfigOptions,
) -> Printout:
    """Remove from a cluster what install applied.

    The models and the namespace stay.
    """
    from pipeline.cluster.install import table
    from pipeline.cluster.install import uninstall as remove

    settings = options.of_cluster()
    cluster = Where(context=context).cluster(settings)
    if not (dry_run or yes):
        planned = remove(cluster, settings, models=models, dry_run=True, force=force)
        count = sum(removal.state == "would be removed" for removal in planned)
        objects = f"{count} objects{' with all models' if models else ''}"
        if not sys.stdin.isatty():
            hint = "--yes, or look first: --dry-run"
            raise ConfigError("nothing was removed: there is no terminal to ask", hint=hint)
        typer.confirm(
            f"Remove {objects} from namespace {cluster.namespace} of {cluster.address}?", abort=True, err=True
        )
    removed = remove(cluster, settings, models=models, dry_run=dry_run, force=force)
    return Printout([vars(removal) for removal in removed], table(removed))
