"""``slipway clients``: who may ask the endpoints of a store, and how much."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pipeline.commands.options import (
    STORE,
    ContextOption,
    EngineOption,
    JsonOption,
    NamespaceOption,
    PlatformOption,
    StoreOption,
    WorkflowEngine,
    load_config,
    print_result,
)
from stages.parts.base.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.cluster.gateway import ClusterClients
    from stages.parts.cluster.api import Cluster
    from stages.parts.endpoint.clients import Allowed

NameArgument = Annotated[str, typer.Argument(help="The client's name, in lower case.")]
clients: Final = typer.Typer(
    help="Let clients use the endpoints on this machine, or on a cluster, each with its own key and limits.",
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
    engine: EngineOption = None,
    platform: PlatformOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a client and print its key, which is shown only now. It holds at once, without a restart.

    On a cluster, a file that the platform names says what clients may do, and only the key is made.
    """
    from stages.parts.base.settings import parse
    from stages.parts.endpoint import clients as known

    asked = {
        "models": tuple(model or ()),
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "requests_at_once": requests_at_once,
        "priority": priority,
    }
    if engine is WorkflowEngine.ARGO:
        from pipeline.cluster.client_keys import add as add_there

        _refuse_limits([field for field, value in asked.items() if value])
        key = add_there(*_there(platform, context, namespace), name)
    else:
        made = parse(known.Client, {"name": name, "key_sha256": ""} | asked, "slipway clients add")
        key = known.add(store.absolute(), made)
    print_result({"name": name, "key": key}, key, as_json)


@clients.command(epilog="Example: slipway clients rotate search")
def rotate(
    name: NameArgument,
    store: StoreOption = STORE,
    engine: EngineOption = None,
    platform: PlatformOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a client another key and print it. The old one is refused from now on."""
    from stages.parts.endpoint import clients as known

    if engine is WorkflowEngine.ARGO:
        from pipeline.cluster.client_keys import rotate as rotate_there

        key = rotate_there(*_there(platform, context, namespace), name)
    else:
        key = known.rotate(store.absolute(), name)
    print_result({"name": name, "key": key}, key, as_json)


@clients.command(epilog="Example: slipway clients rm search")
def rm(
    name: NameArgument,
    store: StoreOption = STORE,
    engine: EngineOption = None,
    platform: PlatformOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a client: its key is refused from now on."""
    from stages.parts.endpoint import clients as known

    if engine is WorkflowEngine.ARGO:
        from pipeline.cluster.client_keys import remove as remove_there

        remove_there(*_there(platform, context, namespace), name)
    else:
        known.remove(store.absolute(), name)
    print_result({"name": name}, f"removed {name}", as_json)


@clients.command("list", epilog="Example: slipway clients list --json")
def list_(
    store: StoreOption = STORE,
    engine: EngineOption = None,
    platform: PlatformOption = None,
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the clients with what they may ask. No key is shown."""
    from stages.parts.endpoint import clients as known

    if engine is WorkflowEngine.ARGO:
        _list_there(*_there(platform, context, namespace), as_json=as_json)
        return
    there = known.read_clients(store.absolute())
    found = there.clients if there else ()
    said: Any = _table(found) if found else "no clients; add one with: slipway clients add NAME"
    print_result([each.model_dump(mode="json", exclude={"key_sha256"}) for each in found], said, as_json)


def _refuse_limits(given: list[str]) -> None:
    if given:
        options = ", ".join(f"--{field.removesuffix('s') if field == 'models' else field}" for field in given)
        raise ConfigError(
            f"on a cluster clients.yaml says what a client may do: {options.replace('_', '-')}",
            hint="write it there, then: slipway install",
        )


def _there(platform: str | None, context: str | None, namespace: str | None) -> tuple[Cluster, ClusterClients]:
    """The cluster with its endpoints, and the clients that the platform names."""
    from pipeline.cluster.gateway import read_clients
    from pipeline.commands.cluster import connected

    asked = load_config(None, None, None, platform, None).platform
    if asked.cluster is None or asked.cluster.clients is None:
        raise ConfigError(
            f"the platform {asked.name} names no clients",
            hint="cluster.clients.file in its file (docs/endpoint.md), and --platform or SLIPWAY_PLATFORM",
        )
    return connected(context, namespace or asked.namespace), read_clients(asked.cluster.clients)


def _list_there(cluster: Cluster, known: ClusterClients, *, as_json: bool) -> None:
    from pipeline.cluster.client_keys import holders

    held = holders(cluster, known)
    document = [client.model_dump(mode="json") | {"key": client.name in held} for client in known.clients]
    print_result(document, _table(known.clients, keys=held), as_json)


def _table(found: Sequence[Allowed], keys: Collection[str] | None = None) -> Any:
    """Args: keys: the names of the clients that have one; None: all have."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("Client", "Models", "Requests/min", "Tokens/min", "At once", "Priority"):
        table.add_column(heading, justify="left" if heading in ("Client", "Models") else "right")
    if keys is not None:
        table.add_column("Key")
    for each in found:
        limits = (each.requests_per_minute, each.tokens_per_minute, each.requests_at_once)
        table.add_row(
            each.name,
            ", ".join(each.models) or "all",
            *(f"{limit:,}" if limit else "–" for limit in limits),
            str(each.priority),
            *(["yes" if each.name in keys else "no"] if keys is not None else []),
        )
    return table
