"""``slipway usage``: what clients have used of the endpoints on this machine."""

from __future__ import annotations

import csv
import re
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from pipeline.commands.options import Commands, LocalOptions
from pipeline.runs.engine import Printout
from stages.parts.base.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from stages.parts.endpoint.usage import Sum


UNITS: Final = {"m": "minutes", "h": "hours", "d": "days"}


commands = Commands()


@commands.add("usage --since 24h --by client,model")
def usage(
    since: Annotated[str, typer.Option(help="How far back, such as 90m or 7d; or a time, as 2026-01-31.")] = "24h",
    by: Annotated[str, typer.Option(help="Groups: any of client, model, release, path and status.")] = "client,model",
    shared_by: Annotated[
        Literal["tokens", "time"],
        typer.Option(help="How the platform's price is shared: by tokens, or by the time of requests."),
    ] = "tokens",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    usage_url: Annotated[
        str, typer.Option(envvar="SLIPWAY_USAGE_URL", help="A PostgreSQL database. Default: SQLite in the store.")
    ] = "",
    *,
    options: LocalOptions,
) -> Printout | None:
    """Show requests, tokens, latencies and costs by client.

    The rows are groups of requests, by client and model for example; those with the most tokens come first. If the
    platform has a `price_per_hour`, each machine's endpoint of each model is charged for the hours since its first
    request, and those who used it share that.
    """
    from stages.parts.endpoint import usage as records
    from stages.parts.endpoint.database import check_url, opened
    from stages.parts.endpoint.endpoint import SERVERS

    check_url(usage_url)
    root = options.store.absolute()
    groups = [name.strip() for name in by.split(",") if name.strip()]
    if unknown := [group for group in groups if group not in records.GROUPS]:
        raise UnknownName("group", unknown[0], known=records.GROUPS)
    begin = time_of(since, "--since")
    if not root.is_dir() and not usage_url:
        raise ConfigError(f"there is no store {options.store}", hint="see --store")
    with opened(root, usage_url) as database:
        for folder in sorted(root.glob(f"*/{SERVERS}")):
            records.take_in(database, folder)
        settings = options.load()
        per_hour = (settings.platform.price_per_hour or 0.0) * settings.serving.replicas
        price = records.EndpointPrice(per_hour, shared_by, datetime.now(UTC)) if per_hour else None
        sums = records.sums(database, begin, groups, price)
    if as_csv:
        _print_csv(sums, groups)
        return None
    text: Any = _table(sums, groups) if sums else f"no requests since {begin.astimezone():%Y-%m-%d %H:%M}"
    return Printout([_flat(row) for row in sums], text)


def time_of(text: str, option: str) -> datetime:
    """Read a time, or how long ago it was. Raises: ConfigError: it is neither."""
    if match := re.fullmatch(r"(\d+)([mhd])", text):
        return datetime.now(UTC) - timedelta(**{UNITS[match[2]]: int(match[1])})
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} is no time", hint="such as 90m, 24h, 7d or 2026-01-31") from error


def _flat(row: Sum) -> dict[str, Any]:
    return {**row.group, **row.model_dump(mode="json", exclude={"group"})}


def _print_csv(rows: list[Sum], groups: list[str]) -> None:
    from stages.parts.endpoint.usage import Sum

    writer = csv.writer(sys.stdout, lineterminator="\n")
    columns = [*groups, *(name for name in Sum.model_fields if name != "group")]
    writer.writerow(columns)
    writer.writerows([_flat(row)[name] for name in columns] for row in rows)


def _table(rows: list[Sum], groups: list[str]) -> Any:
    from pipeline.runs.tables import plain_table

    figures = ["Requests", "Refused", "Failed", "Tokens in", "cached", "out", "Unknown", "TTFT p95", "Duration p95"]
    figures += ["Cost"] if rows[0].cost is not None else []
    table = plain_table(*(group.capitalize() for group in groups), *figures, right=figures)
    for row in rows:
        counts = (row.requests, row.refused, row.failed, row.prompt_tokens, row.cached_tokens)
        table.add_row(
            *("–" if row.group[name] is None else str(row.group[name]) for name in groups),
            *(f"{count:,}" for count in (*counts, row.output_tokens, row.unknown)),
            *("–" if ms is None else f"{ms:,.0f} ms" for ms in (row.ttft_p95_ms, row.duration_p95_ms)),
            *((f"{row.cost:,.2f}",) if row.cost is not None else ()),
        )
    return table
