"""The command line. Each command imports what it needs when it runs, so that --help starts fast."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from pipeline.commands import clients, cluster, decisions, drill, engine, events, plan, releases, rollout, usage
from pipeline.commands.options import (
    STORE,
    AllowIncompleteOption,
    BudgetOption,
    ConfigOption,
    ContextOption,
    EngineOption,
    JsonOption,
    NamespaceOption,
    PlatformOption,
    ProfileOption,
    RunArgument,
    SetOption,
    StoreOption,
    WorkloadOption,
    load_config,
    print_result,
)
from stages.parts.base.errors import Interrupted, SlipwayError

if TYPE_CHECKING:
    from pipeline.runs.tables import Shown
    from pipeline.settings.config import RunConfig

app: Final = typer.Typer(
    name="slipway",
    help="A model's name in, a measured LLM endpoint out: acquire, optimize, select, serve.",
    epilog="Example: slipway run org/name --profile chatbot",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
)
debug: bool = False


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version; with --json those of vLLM and the machine too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", hidden=True)] = False,
    debug_: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    global debug
    debug = debug_
    if debug_:
        os.environ["SLIPWAY_DEBUG"] = "1"
    if version:
        from pipeline.local.doctor import versions

        found = versions()
        print_result(found, f"slipway {found['slipway']}", as_json)
        raise typer.Exit
    if as_json or context.invoked_subcommand is None:
        context.fail("--json belongs after the command." if as_json else "Missing command.")


@app.command(epilog="Example: slipway run org/name --revision main --profile chatbot --no-serve")
def run(
    model: Annotated[
        str, typer.Argument(help="Name on the Hugging Face Hub, or a local directory such as ./my-model.")
    ],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit.")] = "main",
    profile: ProfileOption = None,
    workload: WorkloadOption = None,
    budget: BudgetOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    serve: Annotated[bool, typer.Option(help="Leave the winner serving at the end.")] = True,
    allow_incomplete: AllowIncompleteOption = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask the Hub again which commit a revision is.")] = False,
    engine: EngineOption = None,
    platform: PlatformOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="On a cluster: start another run even if the same one is active.")
    ] = False,
    follow: Annotated[bool, typer.Option(help="On a cluster: wait until the run ends.")] = True,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Acquire a model, make and measure its variants, publish the best one, and serve it.

    Results that are there already and have not changed are reused, so a repeated run does no work twice.
    """
    from pipeline.local import submission

    if allow_incomplete:
        assignments = [*(assignments or []), "optimize.allow_incomplete=true"]
    if budget is not None:
        assignments = [*(assignments or []), f"workload.budget_minutes={budget}"]
    if engine == "argo":
        settings = load_config(config, profile, workload, platform, assignments)
        there = cluster.connected(context, namespace or settings.platform.namespace)
        started = cluster.start(there, settings, model, revision, serve=serve, refresh=refresh, force=force)
        cluster.print_started(there, started, follow=follow, as_json=as_json)
        return
    settings = load_config(config, profile, workload, "local", assignments)
    finished = submission.run(settings, model, revision, store=store.absolute(), serve=serve, refresh=refresh)
    print_result(finished.document(), finished.summary(), as_json)


@app.command("serve", epilog="Example: slipway serve org/name --port 8000")
def serve_model(
    model: Annotated[str, typer.Argument(help="A model that a run has published.")],
    port: Annotated[
        int | None, typer.Option(help="Port to listen on; 0 takes a free one. Default: serving.port.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: this machine only.")] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the endpoint that a run left serving.")] = False,
    store: StoreOption = STORE,
) -> None:
    """Serve the published release in the foreground, OpenAI-compatible, until Ctrl-C.

    Set SLIPWAY_API_KEY to demand a key from clients.
    """
    from stages.parts.base.program import answer_sigterm
    from stages.parts.base.store import ModelStore
    from stages.parts.endpoint.endpoint import stop as stop_serving
    from stages.parts.endpoint.supervisor import serve_foreground
    from stages.parts.model.name import ModelName

    given = {"serving.port": port, "serving.host": host}
    flags = [f"{field}={value}" for field, value in given.items() if value is not None]
    settings = load_config(config, None, None, "local", [*(assignments or []), *flags])
    place = ModelStore(store.absolute(), ModelName.parse(model).id)
    if stop:
        stopped = stop_serving(place)
        typer.echo(f"stopped {model}" if stopped else f"{model} was not being served")
        return
    answer_sigterm()
    try:
        serve_foreground(place, settings.serving)
    except (KeyboardInterrupt, Interrupted):
        typer.echo("stopped", err=True)


@app.command(epilog="Example: slipway runs --json")
def runs(
    store: StoreOption = STORE,
    engine: EngineOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the runs of the store, or of a cluster's namespace, the newest first."""
    from pipeline.local.runs import all_runs
    from pipeline.runs.tables import runs_table

    found: Sequence[Shown]
    if engine == "argo":
        found = cluster.all_runs(context, namespace)
        empty = (
            "no runs in this namespace; --namespace names another one, or SLIPWAY_PLATFORM the platform of the runs; "
            "start one with: slipway run MODEL --engine argo"
        )
    else:
        found, empty = all_runs(store), f"no runs in {store}; start one with: slipway run MODEL"
    print_result([each.state.model_dump(mode="json") for each in found], runs_table(found) if found else empty, as_json)


@app.command(epilog="Example: slipway show latest")
def show(
    name: RunArgument = "latest",
    store: StoreOption = STORE,
    engine: EngineOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one run: its tasks, the scores, the winner and why."""
    from rich.console import Group

    from pipeline.local.runs import find
    from pipeline.runs.tables import score_table, tasks_table

    if cluster.is_there(name, engine):
        cluster.show(name, context, namespace, as_json=as_json)
        return
    found = find(store, name)
    report = found.report()
    parts: list[Any] = [f"{found.model}  run {found.id}  {found.state.phase}\n", tasks_table(found)]
    if report and report.decision:
        parts += ["", score_table(report.decision), "", report.decision.reason, *report.decision.notes]
    if report:
        parts += [f"report: {found.path / 'report.html'}"]
    document = {"run": found.state.model_dump(mode="json"), "report": report and report.model_dump(mode="json")}
    print_result(document, Group(*parts), as_json)


@app.command(epilog="Example: slipway logs latest optimize-awq")
def logs(
    name: RunArgument = "latest",
    task: Annotated[str | None, typer.Argument(help="One task. Default: all that have started.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until the run ends.")] = False,
    store: StoreOption = STORE,
    engine: EngineOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Print the logs of a run."""
    from pipeline.local.runs import find, read_logs

    if cluster.is_there(name, engine):
        lines = cluster.logs(name, task, context, namespace, follow=follow)
    else:
        lines = read_logs(find(store, name), task, follow=follow)
    for line in lines:
        sys.stdout.write(line)
        sys.stdout.flush()


@app.command(epilog="Example: slipway render workflow | kubectl apply -f -")
def render(
    what: Annotated[
        str,
        typer.Argument(
            help="workflow: the Argo WorkflowTemplate. config: every setting that applies. events, poll: what starts "
            "runs on a cluster, with the platform's image."
        ),
    ],
    profile: ProfileOption = None,
    workload: WorkloadOption = None,
    platform: PlatformOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Print what would run, without running it."""
    import yaml

    from pipeline.cluster.manifests import TRIGGERS, for_triggers
    from pipeline.local import submission
    from stages.parts.base.errors import UnknownName

    renderers: dict[str, Callable[[RunConfig], list[dict[str, Any]]]] = {
        "workflow": lambda settings: [submission.render(settings)],
        "config": lambda settings: [settings.model_dump(mode="json")],
        **{name: partial(for_triggers, name) for name in TRIGGERS},
    }
    if what not in renderers:
        raise UnknownName("thing to render", what, renderers)
    settings = load_config(config, profile, workload, platform, assignments)
    yaml.safe_dump_all(renderers[what](settings), sys.stdout, sort_keys=False, allow_unicode=True, width=120)


@app.command(epilog="Example: slipway doctor")
def doctor(
    config: ConfigOption = None,
    store: StoreOption = STORE,
    engine: EngineOption = None,
    platform: PlatformOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check whether this machine, or a cluster, has what a run needs, and say how to get what is missing."""
    from pipeline.local.doctor import check_machine
    from pipeline.runs.checks import checks_table

    if engine == "argo":
        checks = cluster.check(load_config(config, None, None, platform, None), context, namespace)
    else:
        checks = check_machine(load_config(config, None, None, "local", None), store.absolute())
    print_result([check.model_dump() for check in checks], checks_table(checks), as_json)
    if any(check.state == "missing" for check in checks):
        raise typer.Exit(1)


clients.register(app)
cluster.register(app)
engine.register(app)
plan.register(app)
releases.register(app)
rollout.register(app)
drill.register(app)
decisions.register(app)
events.register(app)
usage.register(app)


def main() -> NoReturn:
    """Run the command line; an error becomes one line, a hint and the exit code of its class."""
    try:
        app()
    except SlipwayError as error:
        from stages.parts.base.program import leave_failure

        leave_failure(str(error), error.hint, error.exit_code)
        if debug:
            raise
        if "--json" in sys.argv[1:]:
            sys.stdout.write(json.dumps({"error": str(error), "hint": error.hint, "exit_code": error.exit_code}) + "\n")
        sys.stderr.write(error.render() + "\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain again while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    sys.exit(0)
