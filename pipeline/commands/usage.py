"""``slipway usage``: what clients have used of the endpoints on this machine."""

from __future__ import annotations

import csv
import re
import sys
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pipeline.commands.options import (
    STORE,
    ConfigOption,
    JsonOption,
    PlatformOption,
    StoreOption,
    load_config,
    print_result,
)
from stages.parts.base.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from stages.parts.endpoint.usage import Sum


class SharedBy(StrEnum):
    TOKENS = "tokens"
    TIME = "time"


UNITS: Final = {"m": "minutes", "h": "hours", "d": "days"}


def register(app: typer.Typer) -> None:
    app.command("usage", epilog="Example: slipway usage --since 24h --by client,model")(usage)


def usage(
    since: Annotated[str, typer.Option(help="So long ago, such as 90m, 24h or 7d, or a time, as 2026-01-31.")] = "24h",
    by: Annotated[str, typer.Option(help="Of client, model, release, path and status.")] = "client,model",
    shared_by: Annotated[
        SharedBy, typer.Option(help="How the platform's price is shared: by tokens, or by the time of requests.")
    ] = SharedBy.TOKENS,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    usage_url: Annotated[
        str,
        typer.Option(envvar="SLIPWAY_USAGE_URL", help="Of PostgreSQL; without one, SQLite in the store."),
    ] = "",
    platform: PlatformOption = None,
    config: ConfigOption = None,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Show requests, tokens, latencies and costs by client and model, the most tokens first.

    With `price_per_hour`, the platform's price of the hours since the first of these requests is shared among them.
    """
    from stages.parts.endpoint import usage as kept
    from stages.parts.endpoint.database import check_url, opened
    from stages.parts.endpoint.endpoint import SERVERS

    check_url(usage_url)
    root = store.absolute()
    groups = [each.strip() for each in by.split(",") if each.strip()]
    if unknown := [group for group in groups if group not in kept.GROUPS]:
        raise UnknownName("group", unknown[0], known=kept.GROUPS)
    begin = _begin(since)
    if not root.is_dir() and not usage_url:
        raise ConfigError(f"there is no store {store}", hint="see --store")
    with opened(root, usage_url) as database:
        for folder in sorted(root.glob(f"*/{SERVERS}")):
            kept.take_in(database, folder)
        found = kept.sums(database, begin, groups)
        settings = load_config(config, None, None, platform, None)
        if price := settings.platform.price_per_hour:
            whole = price * settings.serving.replicas * kept.hours(database, begin, datetime.now(UTC))
            found = kept.with_costs(found, whole, shared_by.value)
    if as_csv:
        _print_csv(found, groups)
        return
    said: Any = _table(found, groups) if found else f"no requests since {begin.astimezone():%Y-%m-%d %H:%M}"
    print_result([_flat(each) for each in found], said, as_json)


def _begin(since: str) -> datetime:
    """Raises: ConfigError: it is neither a duration nor a time."""
    if match := re.fullmatch(r"(\d+)([mhd])", since):
        return datetime.now(UTC) - timedelta(**{UNITS[match[2]]: int(match[1])})
    try:
        return datetime.fromisoformat(since).astimezone()
    except ValueError as error:
        raise ConfigError(f"--since {since!r} is no time", hint="such as 90m, 24h, 7d or 2026-01-31") from error


def _flat(each: Sum) -> dict[str, Any]:
    told = each.model_dump(mode="json")
    group: dict[str, Any] = told.pop("group")
    return group | told


def _print_csv(found: list[Sum], groups: list[str]) -> None:
    from stages.parts.endpoint.usage import Sum

    writer = csv.writer(sys.stdout, lineterminator="\n")
    columns = [*groups, *(name for name in Sum.model_fields if name != "group")]
    writer.writerow(columns)
    writer.writerows([_flat(each)[name] for name in columns] for each in found)


def _table(found: list[Sum], groups: list[str]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in groups:
        table.add_column(heading.capitalize())
    figures = ("Requests", "Refused", "Failed", "Tokens in", "cached", "out", "Unknown", "TTFT p95", "Duration p95")
    for heading in (*figures, *(("Cost",) if found[0].cost is not None else ())):
        table.add_column(heading, justify="right")
    for each in found:
        counts = (each.requests, each.refused, each.failed, each.prompt_tokens, each.cached_tokens)
        table.add_row(
            *("–" if each.group[name] is None else str(each.group[name]) for name in groups),
            *(f"{count:,}" for count in (*counts, each.output_tokens, each.unknown)),
            *("–" if ms is None else f"{ms:,.0f} ms" for ms in (each.ttft_p95_ms, each.duration_p95_ms)),
            *((f"{each.cost:,.2f}",) if each.cost is not None else ()),
        )
    return table
