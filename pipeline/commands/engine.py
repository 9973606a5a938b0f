"""``slipway resume``: resumes a run that waits for approval."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.options import STORE, JsonOption, RunArgument, StoreOption, print_result


def register(app: typer.Typer) -> None:
    app.command("resume", epilog="Example: slipway resume latest --task approve")(resume)


def resume(
    name: RunArgument = "latest",
    task: Annotated[str | None, typer.Option(help="One suspended task. Default: all of the run.")] = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Resume a run of this machine that waits for approval. On a cluster: argo resume."""
    from pipeline.local.runs import find
    from pipeline.local.suspension import resume as resume_tasks

    found = find(store, name)
    resumed = resume_tasks(found.path, task)
    print_result({"run": found.id, "resumed": resumed}, f"resumed {', '.join(resumed)} of run {found.id}", as_json)
