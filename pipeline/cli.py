"""The command line. Each command imports what it needs when it runs, so that --help starts fast."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Final, NoReturn

import typer

from pipeline.commands import (
    clients,
    cluster,
    decisions,
    drill,
    events,
    fleet,
    plan,
    releases,
    rollout,
    runs,
    signing,
    store,
    usage,
    watch,
)
from pipeline.commands.options import Commands, print_result
from pipeline.runs.engine import Printout
from stages.parts.base.errors import SlipwayError, disk_errors

app: Final = Commands(
    "A model's name in, a measured LLM endpoint out: acquire, optimize, select, serve.",
    "run org/name --profile chatbot",
    name="slipway",
    pretty_exceptions_enable=False,
    add_completion=False,
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

        document = versions()
        print_result(Printout(document, f"slipway {document['slipway']}"), as_json)
        raise typer.Exit
    if as_json or context.invoked_subcommand is None:
        context.fail("--json belongs after the command." if as_json else "Missing command.")


for module in (runs, plan, releases, rollout, watch, decisions, signing, usage, clients, store, drill, cluster, events):
    app.add_typer(module.commands)
app.add_typer(fleet.commands)
app.add_typer(releases.release_commands)


def main() -> NoReturn:
    """Run the command line; an error becomes one line, a hint and the exit code of its class."""
    try:
        with disk_errors():
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
