"""``slipway clients``: who may ask the endpoints of a store, and how much."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pipeline.options import STORE, JsonOption, StoreOption, print_result

if TYPE_CHECKING:
    from stages.parts.endpoint.clients import Client

NameArgument = Annotated[str, typer.Argument(help="The client's name, in lower case.")]
clients: Final = typer.Typer(
    help="Let clients use the endpoints on this machine, each with its own key and limits.",
    epilog="Example: slipway clients list",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


def register(app: typer.Typer) -> None:
    app.add_typer(clients, name="clients")


@clients.command(epilog="Example: slipway clients add search --model org/name --tokens-per-minute 20000")
def add(
    name: NameArgument,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that it may ask; may be repeated. Default: all.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Default: no limit.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Of prompts and answers together. Default: no limit.")
    ] = None,
    requests_at_once: Annotated[int | None, typer.Option(min=1, help="Default: no limit.")] = None,
    priority: Annotated[
        int, typer.Option(help="vLLM takes waiting requests with lower numbers first, such as -1 before 0 before 10.")
    ] = 0,
    store: StoreOption = STORE,
    as_json: JsonOption = False,
) -> None:
    """Add a client and print its key, which is shown only now. It holds at once, without a restart."""
    from stages.parts.base.settings import parse
    from stages.parts.endpoint import clients as known

    made = parse(
        known.Client,
        {
            "name": name,
            "key_sha256": "",
            "models": tuple(model or ()),
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "requests_at_once": requests_at_once,
            "priority": priority,
        },
        "slipway clients add",
    )
    key = known.add(store.absolute(), made)
    print_result({"name": name, "key": key}, key, as_json)


@clients.command(epilog="Example: slipway clients rotate search")
def rotate(name: NameArgument, store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """Give a client another key and print it. The old one is refused from now on."""
    from stages.parts.endpoint import clients as known

    key = known.rotate(store.absolute(), name)
    print_result({"name": name, "key": key}, key, as_json)


@clients.command(epilog="Example: slipway clients rm search")
def rm(name: NameArgument, store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """Remove a client: its key is refused from now on."""
    from stages.parts.endpoint import clients as known

    known.remove(store.absolute(), name)
    print_result({"name": name}, f"removed {name}", as_json)


@clients.command("list", epilog="Example: slipway clients list --json")
def list_(store: StoreOption = STORE, as_json: JsonOption = False) -> None:
    """List the clients with what they may ask. Keys are not kept, and so not listed."""
    from stages.parts.endpoint import clients as known

    there = known.read_clients(store.absolute())
    found = there.clients if there else ()
    said: Any = _table(found) if found else "no clients; add one with: slipway clients add NAME"
    print_result([each.model_dump(mode="json", exclude={"key_sha256"}) for each in found], said, as_json)


def _table(found: tuple[Client, ...]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("Client", "Models", "Requests/min", "Tokens/min", "At once", "Priority"):
        table.add_column(heading, justify="left" if heading in ("Client", "Models") else "right")
    for each in found:
        limits = (each.requests_per_minute, each.tokens_per_minute, each.requests_at_once)
        table.add_row(
            each.name,
            ", ".join(each.models) or "all",
            *(f"{limit:,}" if limit else "–" for limit in limits),
            str(each.priority),
        )
    return table
