"""Commands for a cluster, and commands that work on runs of both engines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from pipeline.commands.options import (
    STORE,
    AllowIncompleteOption,
    ConfigOption,
    ContextOption,
    EngineOption,
    JsonOption,
    NamespaceOption,
    PlatformOption,
    RunArgument,
    StoreOption,
    WorkflowEngine,
    load_config,
    print_result,
)
from stages.parts.base.errors import ConfigError, MissingRun

if TYPE_CHECKING:
    from pipeline.argo.runs import ClusterRun
    from pipeline.runs.checks import CheckResult
    from pipeline.settings.config import RunConfig
    from stages.parts.cluster.api import Cluster

RUN_PREFIX: Final = "slipway-"
"""Prefix of the names of runs on a cluster; ids of runs on this machine begin with a date."""


def register(app: typer.Typer) -> None:
    app.command("stop", epilog="Example: slipway stop latest")(stop)
    app.command("retry", epilog="Example: slipway retry latest")(retry)
    app.command("report", epilog="Example: slipway report latest")(report)
    app.command("install", epilog="Example: slipway install --platform eks --dry-run")(install)
    app.command("uninstall", epilog="Example: slipway uninstall --platform eks --dry-run")(uninstall)


def is_there(name: str, engine: WorkflowEngine | None) -> bool:
    """Whether a run is on a cluster, judged by the chosen engine or the run's name."""
    return engine is WorkflowEngine.ARGO or (engine is None and name.startswith(RUN_PREFIX))


def connected(context: str | None, namespace: str | None) -> Cluster:
    """The cluster, in *namespace*, or that of the platform in ``SLIPWAY_PLATFORM``, or else the kubeconfig's."""
    from stages.parts.cluster.api import connect

    if namespace is None and (name := os.environ.get("SLIPWAY_PLATFORM")):
        from pipeline.settings.config import load

        platform = load(chosen={"platform": name}).platform
        namespace = platform.namespace if platform.cluster else None
    return connect(context, namespace)


def start(
    there: Cluster, config: RunConfig, model: str, revision: str, *, serve: bool, refresh: bool, force: bool
) -> ClusterRun:
    """Submit a run.

    Raises:
        ConfigError: the platform is this machine.
    """
    from pipeline.argo.engine import start as submit

    of_a_cluster(config)
    return submit(there, config, model, revision, serve=serve, refresh=refresh, force=force)


def print_started(there: Cluster, run: ClusterRun, *, follow: bool, as_json: bool) -> None:
    """Print the result of a run that was submitted: how it ended, or, without *follow*, its id."""
    if follow:
        from pipeline.argo.engine import to_its_end

        run = to_its_end(there, run.id)
    print_result(run.document(), run.summary() if follow else run.id, as_json)


def all_runs(context: str | None, namespace: str | None) -> list[ClusterRun]:
    from pipeline.argo.runs import all_runs as found

    return found(connected(context, namespace))


def show(name: str, context: str | None, namespace: str | None, *, as_json: bool) -> None:
    from rich.console import Group

    from pipeline.argo.pending import Rooms
    from pipeline.argo.runs import find
    from pipeline.argo.status import nodes_of, templates
    from pipeline.runs.tables import tasks_table

    there = connected(context, namespace)
    run = find(there, name)
    Rooms(there).fill(run.state, templates(run.workflow), nodes_of(run.workflow.get("status", {})))
    title = f"{run.model}  run {run.id}  {run.state.phase}  {run.state.message}".rstrip()
    document = run.document() | {"run": run.state.model_dump(mode="json")}
    print_result(document, Group(f"{title}\n", tasks_table(run), "", run.summary()), as_json)


def logs(name: str, task: str | None, context: str | None, namespace: str | None, *, follow: bool) -> Iterator[str]:
    from pipeline.argo.runs import find, read_logs

    there = connected(context, namespace)
    return read_logs(there, find(there, name), task, follow=follow)


def check(config: RunConfig, context: str | None, namespace: str | None) -> list[CheckResult]:
    """Check whether the cluster has what a run needs.

    Raises:
        ConfigError: the platform is this machine.
    """
    from pipeline.cluster.doctor import check_cluster

    of_a_cluster(config)
    return check_cluster(connected(context, namespace or config.platform.namespace), config)


def stop(
    name: RunArgument = "latest",
    store: StoreOption = STORE,
    engine: EngineOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Stop a run: its tasks end, and its report is written. The next run reuses what it finished."""
    from pipeline.local import runs

    if is_there(name, engine):
        from pipeline.argo.runs import find
        from pipeline.argo.runs import stop as stop_workflow

        there = connected(context, namespace)
        run = find(there, name)
        stopped, name = stop_workflow(there, run), run.id
    else:
        found = runs.find(store, name)
        stopped, name = runs.stop(found), found.id
    typer.echo(f"stopped {name}" if stopped else f"{name} has ended already")


def retry(
    name: RunArgument = "latest",
    store: StoreOption = STORE,
    engine: EngineOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    allow_incomplete: AllowIncompleteOption = False,
    follow: Annotated[bool, typer.Option(help="On a cluster: wait until the run ends.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Run again with the arguments of a run. What the run finished is reused, so that only the rest is done."""
    from pipeline.local import runs

    if is_there(name, engine):
        from pipeline.argo.engine import announced
        from pipeline.argo.runs import again, find

        there = connected(context, namespace)
        started = again(there, find(there, name), allow_incomplete=allow_incomplete)
        print_started(there, announced(*started), follow=follow, as_json=as_json)
        return
    from pipeline.local import submission

    finished = submission.again(runs.find(store, name), store.absolute(), allow_incomplete=allow_incomplete)
    print_result(finished.document(), finished.summary(), as_json)


def report(
    name: RunArgument = "latest",
    store: StoreOption = STORE,
    engine: EngineOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print where a run's report is; with --json, the report itself. On a cluster: the run's results."""
    from pipeline.local import runs

    if is_there(name, engine):
        from pipeline.argo.runs import find

        run = find(connected(context, namespace), name)
        print_result(run.document(), run.summary(), as_json)
        return
    found = runs.find(store, name)
    written = found.report()
    if written is None:
        raise MissingRun(f"run {found.id} has no report: it is {found.state.phase}", hint=f"slipway show {found.id}")
    print_result(written.model_dump(mode="json"), str((found.path / "report.html").absolute()), as_json)


def install(
    platform: PlatformOption = None,
    config: ConfigOption = None,
    context: ContextOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Let the cluster check everything, and change nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Take over fields that another manager has changed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Apply what a cluster needs for runs: namespace, rights, network policies, volume, limits, workflow template, and
    what rollouts need where KServe is.

    It can be repeated: only what differs is changed. Argo Workflows must be installed already.
    """
    from pipeline.cluster.changes import table
    from pipeline.cluster.install import has_kserve
    from pipeline.cluster.install import install as apply

    settings = load_config(config, None, None, platform, None)
    of_a_cluster(settings)
    there = connected(context, settings.platform.namespace)
    applied = apply(there, settings, dry_run=dry_run, force=force)
    print_result([vars(each) for each in applied], table(applied), as_json)
    if not has_kserve(there):
        sys.stderr.write("note: KServe is not installed, so runs can't serve; once it is, install again\n")


def uninstall(
    platform: PlatformOption = None,
    config: ConfigOption = None,
    context: ContextOption = None,
    models: Annotated[
        bool,
        typer.Option("--models", help="Remove the volume with all models too, and the namespace if it is empty then."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Go on while runs are active or endpoints serve.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove from a cluster what install applied. The models and the namespace stay."""
    from pipeline.cluster.changes import table
    from pipeline.cluster.uninstall import uninstall as remove

    settings = load_config(config, None, None, platform, None)
    of_a_cluster(settings)
    there = connected(context, settings.platform.namespace)
    if not (dry_run or yes):
        planned = remove(there, settings, models=models, dry_run=True, force=force)
        _confirm(there, sum(each.state == "would be removed" for each in planned), models=models)
    done = remove(there, settings, models=models, dry_run=dry_run, force=force)
    print_result([vars(each) for each in done], table(done), as_json)


def _confirm(there: Cluster, count: int, *, models: bool) -> None:
    if not sys.stdin.isatty():
        raise ConfigError("nothing was removed: there is no terminal to ask", hint="--yes, or look first: --dry-run")
    what = f"{count} objects{' with all models' if models else ''}"
    typer.confirm(f"Remove {what} from namespace {there.namespace} of {there.address}?", abort=True, err=True)


def of_a_cluster(config: RunConfig) -> None:
    from pipeline.settings.config import names

    if config.platform.cluster is None:
        known: list[str] = [name for name in names("platform") if name != "local"]
        raise ConfigError(
            f"the platform {config.platform.name} is one machine, not a cluster",
            hint=f"--platform, or SLIPWAY_PLATFORM: one of {', '.join(known)}",
        )
