"""``slipway usage`` and ``top``: what clients have used of endpoints, and what those of this machine do now."""

from __future__ import annotations

import contextlib
import csv
import re
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from pipeline.commands.options import Commands, ConfigOptions, StoreOptions, Where
from pipeline.runs.engine import Printout, plain_table
from stages.parts.base.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from stages.parts.endpoint.clients import TokenPrices
    from stages.parts.endpoint.usage import EndpointPrice, Sum

UNITS: Final = {"m": "minutes", "h": "hours", "d": "days"}

commands = Commands()


@commands.add("usage --since 24h --by client,model")
def usage(
    since: Annotated[str, typer.Option(help="How far back, such as 90m or 7d; or a time, as 2026-01-31.")] = "24h",
    by: Annotated[
        str, typer.Option(help="Groups: any of client, model, month, release, path and status.")
    ] = "client,model",
    shared_by: Annotated[
        Literal["tokens", "time"],
        typer.Option(help="How the platform's price is shared: by tokens, or by the time of requests."),
    ] = "tokens",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    usage_url: Annotated[
        str, typer.Option(envvar="SLIPWAY_USAGE_URL", help="A PostgreSQL database. Default: SQLite in the store.")
    ] = "",
    *,
    options: ConfigOptions,
    where: Where,
) -> Printout | None:
    """Show requests, tokens, latencies and costs by client.

    The rows are groups of requests, by client and model for example; those with the most tokens come first. If the
    platform has a `price_per_hour`, each machine's endpoint of each model is charged for the hours since its first
    request, and those who used it share that. On a cluster, costs are those of the tokens, by the `prices` in
    clients.yaml.
    """
    from pipeline.cluster.clients_file import read_clients
    from stages.parts.endpoint import usage as records
    from stages.parts.endpoint.database import check_url, opened
    from stages.parts.endpoint.endpoint import SERVERS

    check_url(usage_url)
    root = where.store.absolute()
    groups = [name.strip() for name in by.split(",") if name.strip()]
    if unknown := [group for group in groups if group not in records.GROUPS]:
        raise UnknownName("group", unknown[0], known=records.GROUPS)
    begin = time_of(since, "--since")
    if where.on_cluster and not usage_url:
        raise ConfigError("a cluster's usage is in PostgreSQL", hint="SLIPWAY_USAGE_URL says in which database")
    if not root.is_dir() and not usage_url:
        raise ConfigError(f"there is no store {where.store}", hint="see --store")
    settings = options.load()
    price: EndpointPrice | TokenPrices | None = None
    cluster = settings.platform.cluster
    if where.on_cluster and cluster and cluster.clients:
        price = read_clients(cluster.clients).prices
    elif settings.platform.price_per_hour and not where.on_cluster:
        per_hour = settings.platform.price_per_hour * settings.serving.replicas
        price = records.EndpointPrice(per_hour, shared_by, datetime.now(UTC))
    with opened(root, usage_url) as database:
        for folder in () if where.on_cluster else sorted(root.glob(f"*/{SERVERS}")):
            records.take_in(database, folder)
        sums = records.sums(database, begin, groups, price)
    if as_csv:
        _print_csv(sums, groups)
        return None
    text: Any = _table(sums, groups) if sums else f"no requests since {begin.astimezone():%Y-%m-%d %H:%M}"
    return Printout([_flat(row) for row in sums], text)


@commands.add("top --once")
def top(
    every: Annotated[float, typer.Option(min=0.1, help="Seconds from one look to the next.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look for so long, print what was seen, and end.")] = False,
    *,
    options: StoreOptions,
) -> Printout | None:
    """Show what the endpoints of this machine do now.

    A release's rates are since the look before. A client's figures are of the requests that have ended in the last
    minute, but for those under way at once. Ends at Ctrl-C; in a pipe, and with --json, after one look.
    """
    from stages.parts.endpoint.activity import ActivityReader

    observer = ActivityReader(options.store.absolute())
    rows = observer.look()
    if once or not sys.stdout.isatty() or "--json" in sys.argv:
        time.sleep(every)
        rows = observer.look()
        return Printout(rows, _live_tables(rows))
    from rich.live import Live

    with contextlib.suppress(KeyboardInterrupt), Live(_live_tables(rows), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            live.update(_live_tables(observer.look()), refresh=True)
    return None


def _live_tables(rows: dict[str, list[dict[str, Any]]]) -> Any:
    from rich.console import Group

    if not rows["releases"]:
        return "nothing is being served; start an endpoint with: slipway serve MODEL"
    tables: list[Any] = []
    for kind in rows.values():
        fields = list(dict.fromkeys(field for row in kind for field in row))
        headings = [field.replace("_per_", "/").replace("_", " ") for field in fields]
        tables += [plain_table(*headings, right=headings[2:]), ""]
        for row in kind:
            values = ("–" if row.get(field) is None else row[field] for field in fields)
            tables[-2].add_row(*(value if isinstance(value, str) else f"{value:,}" for value in values))
    return Group(*tables)


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

    columns = [*groups, *(name for name in Sum.model_fields if name != "group")]
    writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_flat, rows))


def _table(rows: list[Sum], groups: list[str]) -> Any:
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
