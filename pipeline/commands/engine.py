"""Commands for a run that is going on."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.options import STORE, JsonOption, RunArgument, StoreOption, print_result
from stages.parts.base.errors import ConfigError


def register(app: typer.Typer) -> None:
    app.command("resume", epilog="Example: slipway resume latest --task approve")(resume)


def resume(
    name: RunArgument = "latest",
    task: Annotated[str | None, typer.Option(help="One suspended task; without it, all of the run.")] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An output that the task takes from outside."),
    ] = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Let a suspended run of this machine go on, such as one that waits for an approval. (On Argo: argo resume.)"""
    from pipeline.local.suspension import resume as let_go_on
    from pipeline.runs import find

    found = find(store, name)
    resumed = let_go_on(found.path, task, dict(map(_assignment, assignments or [])))
    print_result({"run": found.id, "resumed": resumed}, f"resumed {', '.join(resumed)} of run {found.id}", as_json)


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError(f"--set {text!r} is not NAME=VALUE")
    return name, value
