"""The commands on runs: start one, list them, show, log, stop, retry, resume and report one; on both engines."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pipeline.commands.options import (
    AllowIncompleteOption,
    AnyModelArgument,
    ConfigOptions,
    FollowOption,
    JsonOption,
    ProfileOption,
    RevisionOption,
    RunArgument,
    Where,
    WorkloadOption,
    add,
    print_result,
)


def register(app: typer.Typer) -> None:
    add(app, run, "run org/name --revision main --profile chatbot --no-serve")
    add(app, runs, "runs --json")
    add(app, show, "show latest")
    add(app, logs, "logs latest optimize-awq")
    add(app, report, "report latest")
    add(app, stop, "stop latest")
    add(app, retry, "retry latest")
    add(app, resume, "resume latest --task approve")


def run(
    model: AnyModelArgument,
    revision: RevisionOption = "main",
    profile: ProfileOption = None,
    workload: WorkloadOption = None,
    budget: Annotated[
        float | None, typer.Option(help="Minutes for measuring all variants of a model: workload.budget_minutes.")
    ] = None,
    serve: Annotated[bool, typer.Option(help="Leave the winner serving at the end.")] = True,
    allow_incomplete: AllowIncompleteOption = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask the Hub again which commit a revision is.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="On a cluster: start another run even if the same one is active.")
    ] = False,
    follow: FollowOption = True,
    *,
    options: ConfigOptions,
    where: Where,
    as_json: JsonOption = False,
) -> None:
    """Optimize a model, measure it, publish and serve it.

    Acquires the model, makes and measures its variants, publishes the best one, and serves it. Results that are there
    already and have not changed are reused, so a repeated run does no work twice.
    """
    from pipeline.runs.engine import RunRequest

    flags = ["optimize.allow_incomplete=true"] if allow_incomplete else []
    flags += [f"workload.budget_minutes={budget}"] if budget is not None else []
    settings = where.settings(options, profile=profile, workload=workload, assignments=flags)
    request = RunRequest(model, revision, serve=serve, refresh=refresh, force=force)
    print_result(*where.engine_of(settings=settings, follow=follow).start(settings, request), as_json)


def runs(*, where: Where, as_json: JsonOption = False) -> None:
    """List the runs of the store or the cluster, newest first."""
    from pipeline.runs.tables import runs_table

    engine = where.engine_of()
    listed = engine.runs()
    text = runs_table(listed) if listed else engine.no_runs
    print_result([listed_run.state.model_dump(mode="json") for listed_run in listed], text, as_json)


def show(name: RunArgument = "latest", *, where: Where, as_json: JsonOption = False) -> None:
    """Show a run: its tasks, the scores, the winner and why."""
    print_result(*where.engine_of(name).find(name).show(), as_json)


def logs(
    name: RunArgument = "latest",
    task: Annotated[str | None, typer.Argument(help="One task. Default: all that have started.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until the run ends.")] = False,
    *,
    where: Where,
) -> None:
    """Print the logs of a run."""
    for line in where.engine_of(name).find(name).logs(task, follow=follow):
        sys.stdout.write(line)
        sys.stdout.flush()


def report(name: RunArgument = "latest", *, where: Where, as_json: JsonOption = False) -> None:
    """Print where a run's report is; with --json, the report.

    On a cluster, print the run's results.
    """
    print_result(*where.engine_of(name).find(name).report(), as_json)


def stop(name: RunArgument = "latest", *, where: Where) -> None:
    """Stop a run: its tasks end, and its report is written.

    The next run reuses what it finished.
    """
    active = where.engine_of(name).find(name)
    typer.echo(f"stopped {active.id}" if active.stop() else f"{active.id} has ended already")


def retry(
    name: RunArgument = "latest",
    allow_incomplete: AllowIncompleteOption = False,
    follow: FollowOption = True,
    *,
    where: Where,
    as_json: JsonOption = False,
) -> None:
    """Run again with a run's arguments; reuse what it finished."""
    engine = where.engine_of(name, follow=follow)
    print_result(*engine.retry(name, allow_incomplete=allow_incomplete), as_json)


def resume(
    name: RunArgument = "latest",
    task: Annotated[str | None, typer.Option(help="One suspended task. Default: all of the run.")] = None,
    *,
    where: Where,
    as_json: JsonOption = False,
) -> None:
    """Resume a run that waits for approval."""
    suspended = where.engine_of(name).find(name)
    resumed = suspended.resume(task)
    text = f"resumed {', '.join(resumed)} of run {suspended.id}"
    print_result({"run": suspended.id, "resumed": resumed}, text, as_json)
