"""``slipway samples``: the raw samples of a run as a table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeline.commands.options import STORE, RunArgument, StoreOption


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: slipway samples latest --parquet samples.parquet")(samples)


def samples(
    name: RunArgument = "latest",
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write CSV to this file.")] = None,
    parquet: Annotated[
        Path | None, typer.Option("--parquet", metavar="FILE", help="Write Parquet to this file; needs pyarrow.")
    ] = None,
    store: StoreOption = STORE,
) -> None:
    """Print a run's raw samples as CSV, or write them to files, for a notebook.

    A row is a request of the load or an item of a quality task, with its variant, kind and block; blocks count the
    starts of each server.
    """
    from pipeline.local.runs import folder
    from stages.parts.base.errors import ConfigError
    from stages.parts.samples.table import table
    from stages.select.stored import read_stored

    if parquet and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError("Parquet is written by pyarrow, which is not installed", hint="pip install pyarrow, or --csv")
    rows = table(read_stored(folder(store, name)).samples())
    if parquet:
        rows.to_parquet(parquet, index=False)
    if csv or not parquet:
        rows.to_csv(csv or sys.stdout, index=False)
