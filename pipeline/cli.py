"""The command line. Each command imports what it needs when it runs, so that --help starts in a blink."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from stages.errors import ConfigError, Interrupted, SlipwayError

if TYPE_CHECKING:
    from pipeline.config import RunConfig

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

StoreOption = Annotated[
    Path, typer.Option("--store", envvar="SLIPWAY_STORE", help="Folder of models, variants, releases and runs.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document, for programs.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", envvar="SLIPWAY_CONFIG", help="YAML with any part of configs/defaults.yaml.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="One setting, e.g. serving.max_model_len=4096.")
]
ProfileOption = Annotated[
    str | None,
    typer.Option(envvar="SLIPWAY_PROFILE", help="Scoring profile: a name in configs/profiles, or a YAML file."),
]
WorkloadOption = Annotated[
    str | None,
    typer.Option(envvar="SLIPWAY_WORKLOAD", help="What is measured: a name in configs/workloads, or a YAML file."),
]
PlatformOption = Annotated[
    str | None, typer.Option(envvar="SLIPWAY_PLATFORM", help="Where it runs: a name in configs/platforms.")
]
RunArgument = Annotated[str, typer.Argument(metavar="[RUN]", help="A run's id, or its beginning.")]
STORE: Final = Path(".slipway")


@app.callback()
def options(
    debug_: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    global debug
    debug = debug_
    if debug_:
        os.environ["SLIPWAY_DEBUG"] = "1"


@app.command(epilog="Example: slipway run org/name --revision main --profile chatbot --no-serve")
def run(
    model: Annotated[
        str, typer.Argument(help="Name on the Hugging Face Hub, or a local directory such as ./my-model.")
    ],
    revision: Annotated[str, typer.Option(help="Branch, tag or commit.")] = "main",
    profile: ProfileOption = None,
    workload: WorkloadOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    serve: Annotated[bool, typer.Option(help="Leave the winner serving at the end.")] = True,
    refresh: Annotated[bool, typer.Option("--refresh", help="Ask the Hub again which commit a revision is.")] = False,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Acquire a model, make and measure its variants, publish the best one, and serve it.

    What is there already and unchanged is used again: a repeated run does no work twice.
    """
    from pipeline import submit

    settings = _load(config, profile, workload, "local", assignments)
    finished = submit.run(settings, model, revision, store=store.absolute(), serve=serve, refresh=refresh)
    _print(finished.document(), finished.summary(), as_json)


@app.command("serve", epilog="Example: slipway serve org/name --port 8000")
def serve_model(
    model: Annotated[str, typer.Argument(help="A model that a run has published.")],
    port: Annotated[int | None, typer.Option(help="0 for a free one. Default: serving.port of the config.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default: this machine only.")] = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the endpoint that a run left serving.")] = False,
    store: StoreOption = STORE,
) -> None:
    """Serve the published release in the foreground, OpenAI-compatible, until Ctrl-C.

    Set SLIPWAY_API_KEY to ask clients for a key.
    """
    from stages import serve as endpoint
    from stages.hub import model_id
    from stages.program import answer_sigterm
    from stages.store import ModelStore

    given = {"serving.port": port, "serving.host": host}
    flags = [f"{field}={value}" for field, value in given.items() if value is not None]
    settings = _load(config, None, None, "local", [*(assignments or []), *flags])
    place = ModelStore(store.absolute(), model_id(model))
    if stop:
        stopped = endpoint.stop(place)
        typer.echo(f"stopped {model}" if stopped else f"{model} was not being served")
        return
    answer_sigterm()
    try:
        endpoint.serve_foreground(place, settings.serving)
    except (KeyboardInterrupt, Interrupted):
        typer.echo("stopped", err=True)


@app.command(epilog="Example: slipway runs --json")
def runs(store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """List the store's runs, the newest first."""
    from pipeline.runs import all_runs
    from pipeline.tables import runs_table

    found = all_runs(store)
    empty = f"no runs in {store}; start one with: slipway run MODEL"
    _print([each.state.model_dump(mode="json") for each in found], runs_table(found) if found else empty, as_json)


@app.command(epilog="Example: slipway show latest")
def show(name: RunArgument = "latest", store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """Show one run: its tasks, the scores, the winner and why."""
    from rich.console import Group

    from pipeline.runs import find
    from pipeline.tables import score_table, tasks_table

    found = find(store, name)
    report = found.report()
    parts: list[Any] = [f"{found.model}  run {found.id}  {found.state.phase}\n", tasks_table(found)]
    if report and report.decision:
        parts += ["", score_table(report.decision), "", report.decision.reason]
    if report:
        parts += [f"report: {found.path / 'report.html'}"]
    document = {"run": found.state.model_dump(mode="json"), "report": report and report.model_dump(mode="json")}
    _print(document, Group(*parts), as_json)


@app.command(epilog="Example: slipway logs latest evaluate-awq")
def logs(
    name: RunArgument = "latest",
    task: Annotated[str | None, typer.Argument(help="One task; without it, all that have started.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    store: StoreOption = STORE,
) -> None:
    """Print the logs of a run."""
    from pipeline.runs import find, read_logs

    for line in read_logs(find(store, name), task, follow=follow):
        sys.stdout.write(line)
        sys.stdout.flush()


@app.command(epilog="Example: slipway render workflow | kubectl apply -f -")
def render(
    what: Annotated[str, typer.Argument(help="workflow: the Argo WorkflowTemplate. config: every setting in force.")],
    profile: ProfileOption = None,
    workload: WorkloadOption = None,
    platform: PlatformOption = None,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Print what would run, without running it."""
    import yaml

    from pipeline import submit
    from stages.errors import UnknownName

    renderers: dict[str, Callable[[RunConfig], dict[str, Any]]] = {
        "workflow": submit.render,
        "config": lambda settings: settings.model_dump(mode="json"),
    }
    if what not in renderers:
        raise UnknownName("thing to render", what, renderers)
    settings = _load(config, profile, workload, platform, assignments)
    yaml.safe_dump(renderers[what](settings), sys.stdout, sort_keys=False, allow_unicode=True, width=120)


@app.command(epilog="Example: slipway doctor")
def doctor(config: ConfigOption = None, store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """Check that this machine has what a run needs, and say how to get what is missing."""
    from pipeline.doctor import check_machine, checks_table

    checks = check_machine(_load(config, None, None, "local", None), store.absolute())
    _print([each.model_dump() for each in checks], checks_table(checks), as_json)
    if any(each.state == "missing" for each in checks):
        raise typer.Exit(1)


def main() -> NoReturn:
    """The console script: errors become one line, a hint and the exit code of their kind."""
    try:
        app()
    except SlipwayError as error:
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


def _load(
    file: Path | None, profile: str | None, workload: str | None, platform: str | None, assignments: list[str] | None
) -> RunConfig:
    from pipeline.config import load

    if file is not None and not file.is_file():
        raise ConfigError(f"there is no file {file}", hint="--config takes a YAML file")
    chosen = {"profile": profile, "workload": workload, "platform": platform}
    return load(file, chosen=chosen, assignments=assignments or [])


def _print(document: Any, text: Any, as_json: bool) -> None:
    """The result on stdout: JSON for programs, or *text* (a string or anything rich can draw)."""
    if as_json:
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
        return
    from rich.console import Console

    # A pipe has no width: 80 columns would cut tables that a file can hold.
    terminal = sys.stdout.isatty()
    Console(width=None if terminal else 200, highlight=False, soft_wrap=not terminal).print(text)
