"""The commands on runs: start one, list them, show, log, stop, retry, resume and report one; on both engines."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pipeline.commands import options as common
from pipeline.runs.engine import Printout
from stages.parts.base.errors import ConfigError

commands = common.Commands()


@commands.add("run org/name --revision main --profile chatbot --no-serve")
def run(
    model: common.AnyModelArgument,
    revision: common.RevisionOption = "main",
    profile: common.ProfileOption = None,
    workload: common.WorkloadOption = None,
    candidates: common.CandidatesOption = None,
    candidates_from: common.CandidatesFromOption = None,
    budget: Annotated[
        float | None, typer.Option(help="Minutes for measuring all variants of a model: workload.budget_minutes.")
    ] = None,
    serve: Annotated[bool, typer.Option(help="Leave the winner serving at the end.")] = True,
    allow_incomplete: common.AllowIncompleteOption = False,
    force_publish: common.ForcePublishOption = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask the Hub again which commit a revision is.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="On a cluster: start another run even if the same one is active.")
    ] = False,
    follow: common.FollowOption = True,
    *,
    options: common.ConfigOptions,
    where: common.Where,
) -> Printout:
    """Optimize a model, measure it, publish and serve it.

    Acquires the model, makes and measures its variants, publishes the best one, and serves it. If a release is in
    production, the best one takes its place only if it is shown to be better, and in nothing worse. Results that are
    there already and have not changed are reused, so a repeated run does no work twice.
    """
    flags = [*common.assignments_of(candidates_from, where.store), *common.candidates_set(candidates)]
    flags += ["optimize.allow_incomplete=true"] if allow_incomplete else []
    flags += ["optimize.force_publish=true"] if force_publish else []
    flags += [f"workload.budget_minutes={budget}"] if budget is not None else []
    settings = where.settings(options, profile=profile, workload=workload, assignments=flags)
    if settings.engine != type(settings.engine)():
        raise ConfigError("engine: only slipway requalify takes it", hint="a run tries engines by serving.recipes")
    engine = where.engine_of(settings=settings, follow=follow)
    return engine.start(settings, model, revision, serve=serve, refresh=refresh, force=force)


@commands.add("requalify org/name --set engine.version=0.31.0")
def requalify(
    model: common.ModelArgument,
    profile: common.ProfileOption = None,
    workload: common.WorkloadOption = None,
    serve: Annotated[bool, typer.Option(help="Leave it serving at the end, if it is promoted.")] = True,
    *,
    options: common.ConfigOptions,
    where: common.Where,
) -> Printout:
    """Try the release in production under another vLLM.

    By default under the installed one. Both versions are measured side by side. The other one takes its place, by a
    rollout, if it is shown to be worse in nothing by more than the profile's margins; otherwise nothing changes.
    """
    from scoring.names import PRODUCTION
    from stages.parts.releases.pinned import MeasuredWith, requalification

    if where.on_cluster:
        raise ConfigError("a pod has one version of vLLM", hint="requalify on one machine with the cluster's hardware")
    settings, store = where.settings(options, profile=profile, workload=workload), where.of_model(model)
    recipe = requalification(store, settings.engine, settings.serving.extra_arguments)
    recipes = {f"vllm-{recipe.engine_version}": recipe}
    changed = {
        "profile": settings.profile.model_copy(update={"reference": PRODUCTION}),
        "optimize": settings.optimize.model_copy(update={"candidates": ()}),
        "serving": settings.serving.model_copy(update={"recipes": recipes}),
    }
    engine, commit = where.engine_of(settings=settings), MeasuredWith.of(store.production).commit
    return engine.start(settings.model_copy(update=changed), model, commit, serve=serve)


@commands.add("runs --json")
def runs(*, where: common.Where) -> Printout:
    """List the runs of the store or the cluster, newest first."""
    from pipeline.runs.tables import runs_table

    engine = where.engine_of()
    listed = engine.runs()
    text = runs_table(listed) if listed else engine.no_runs
    return Printout([each.state for each in listed], text)


@commands.add("show latest")
def show(name: common.RunArgument = "latest", *, where: common.Where) -> Printout:
    """Show a run: its tasks, the scores, the winner and why."""
    return where.engine_of(name).find(name).show()


@commands.add("logs latest optimize-awq")
def logs(
    name: common.RunArgument = "latest",
    task: Annotated[str | None, typer.Argument(help="One task. Default: all that have started.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until the run ends.")] = False,
    *,
    where: common.Where,
) -> None:
    """Print the logs of a run."""
    for line in where.engine_of(name).find(name).logs(task, follow=follow):
        sys.stdout.write(line)
        sys.stdout.flush()


@commands.add("report latest")
def report(name: common.RunArgument = "latest", *, where: common.Where) -> Printout:
    """Print where a run's report is; with --json, the report.

    On a cluster, print the run's results.
    """
    return where.engine_of(name).find(name).report()


@commands.add("stop latest")
def stop(name: common.RunArgument = "latest", *, where: common.Where) -> None:
    """Stop a run: its tasks end, and its report is written.

    The next run reuses what it finished.
    """
    active = where.engine_of(name).find(name)
    typer.echo(f"stopped {active.id}" if active.stop() else f"{active.id} has ended already")


@commands.add("retry latest")
def retry(
    name: common.RunArgument = "latest",
    allow_incomplete: common.AllowIncompleteOption = False,
    follow: common.FollowOption = True,
    *,
    where: common.Where,
) -> Printout:
    """Run again with a run's arguments; reuse what it finished."""
    engine = where.engine_of(name, follow=follow)
    return engine.retry(name, allow_incomplete=allow_incomplete)


@commands.add("resume latest --task approve")
def resume(
    name: common.RunArgument = "latest",
    task: Annotated[str | None, typer.Option(help="One suspended task. Default: all of the run.")] = None,
    *,
    where: common.Where,
) -> Printout:
    """Resume a run that waits for approval."""
    suspended = where.engine_of(name).find(name)
    resumed = suspended.resume(task)
    text = f"resumed {', '.join(resumed)} of run {suspended.id}"
    return Printout({"run": suspended.id, "resumed": resumed}, text)
