"""``slipway resume``: resumes a run that waits for approval."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.commands.options import (
    STORE,
    ContextOption,
    EngineOption,
    JsonOption,
    NamespaceOption,
    RunArgument,
    StoreOption,
    print_result,
)


def register(app: typer.Typer) -> None:
    app.command("resume", epilog="Example: slipway resume latest --task approve")(resume)


def resume(
    name: RunArgument = "latest",
    task: Annotated[str | None, typer.Option(help="One suspended task. Default: all of the run.")] = None,
    store: StoreOption = STORE,
    engine: EngineOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Resume a run that waits for approval."""
    from pipeline.commands.cluster import connected, is_there

    if is_there(name, engine):
        from pipeline.argo.runs import find
        from pipeline.argo.runs import resume as resume_nodes

        there = connected(context, namespace)
        run = find(there, name)
        found, resumed = run.id, resume_nodes(there, run, task)
    else:
        from pipeline.local.runs import find as find_here
        from pipeline.local.suspension import resume as resume_tasks

        here = find_here(store, name)
        found, resumed = here.id, resume_tasks(here.path, task)
    print_result({"run": found, "resumed": resumed}, f"resumed {', '.join(resumed)} of run {found}", as_json)
