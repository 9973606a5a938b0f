"""``slipway clients``: who may use the endpoints of a store or of a cluster, and how much."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from pipeline.commands.options import Commands, ConfigOptions, Where
from pipeline.runs.engine import Printout, plain_table
from stages.parts.base.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.cluster.clients_file import ClusterClients
    from stages.parts.cluster.api import Cluster
    from stages.parts.endpoint.clients import Allowed

LIMITS: Final = {
    "requests_per_minute": "Requests/min",
    "tokens_per_minute": "Tokens/min",
    "tokens_per_month": "Tokens/month",
    "money_per_month": "Money/month",
    "requests_at_once": "At once",
}
NameArgument = Annotated[str, typer.Argument(help="The client's name, in lower case.")]

commands = Commands("Give clients of the endpoints their own keys and limits.", "clients list", name="clients")


@commands.add("clients add search --model org/name --tokens-per-minute 20000", name="add")
def add_client(
    name: NameArgument,
    model: Annotated[
        list[str] | None, typer.Option(help="A model that the client may use; may be repeated. Default: all.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Default: no limit.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompts and answers together. Default: no limit.")
    ] = None,
    requests_at_once: Annotated[int | None, typer.Option(min=1, help="Default: no limit.")] = None,
    priority: Annotated[
        int, typer.Option(help="vLLM takes waiting requests with lower numbers first, such as -1 before 0 before 10.")
    ] = 0,
    *,
    options: ConfigOptions,
    where: Where,
) -> Printout:
    """Add a client, and print its key.

    The key is shown only now, and is accepted at once, without a restart. On a cluster, a file that the platform names
    says what clients may do, and only the key is made.
    """
    from stages.parts.base.settings import parse
    from stages.parts.endpoint import clients

    limits = {
        "models": tuple(model or ()),
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "requests_at_once": requests_at_once,
        "priority": priority,
    }
    if where.on_cluster:
        from pipeline.cluster import gateway

        if fields := [field for field, value in limits.items() if value]:
            flags = ", ".join(f"--{'model' if field == 'models' else field}" for field in fields)
            text = f"on a cluster clients.yaml says what a client may do: {flags.replace('_', '-')}"
            raise ConfigError(text, hint="write it there, then: slipway install")
        key = gateway.add(*_on_cluster(options, where), name)
    else:
        client = parse(clients.Client, {"name": name, "key_sha256": ""} | limits, "slipway clients add")
        key = clients.add(where.store.absolute(), client)
    return Printout({"name": name, "key": key}, key)


@commands.add("clients rotate search")
def rotate(name: NameArgument, *, options: ConfigOptions, where: Where) -> Printout:
    """Give a client another key, and print it.

    The old key is refused from now on.
    """
    keeper, *place = _keeper(options, where)
    key = keeper.rotate(*place, name)
    return Printout({"name": name, "key": key}, key)


@commands.add("clients rm search")
def rm(name: NameArgument, *, options: ConfigOptions, where: Where) -> Printout:
    """Remove a client: its key is refused from now on."""
    keeper, *place = _keeper(options, where)
    keeper.remove(*place, name)
    return Printout({"name": name}, f"removed {name}")


@commands.add("clients list --json", name="list")
def list_clients(*, options: ConfigOptions, where: Where) -> Printout:
    """List the clients and their limits; shows no key."""
    if where.on_cluster:
        from pipeline.cluster.gateway import holders

        cluster, clients = _on_cluster(options, where)
        keys = None if clients.tokens else holders(cluster, clients)
        document = [
            client.model_dump(mode="json")
            | {"cache_salt": client.cache_salt is not None, "key": None if keys is None else client.name in keys}
            for client in clients.clients
        ]
        return Printout(document, _table(clients.clients, keys=keys))
    from stages.parts.endpoint.clients import read_clients

    stored = read_clients(where.store.absolute())
    rows = stored.clients if stored else ()
    text: Any = _table(rows) if rows else "no clients; add one with: slipway clients add NAME"
    return Printout([client.model_dump(mode="json", exclude={"key_sha256"}) for client in rows], text)


def _keeper(options: ConfigOptions, where: Where) -> tuple[Any, ...]:
    """Return the module that changes the keys, and its first arguments, which say where they are."""
    if where.on_cluster:
        from pipeline.cluster import gateway

        return gateway, *_on_cluster(options, where)
    from stages.parts.endpoint import clients

    return clients, where.store.absolute()


def _on_cluster(options: ConfigOptions, where: Where) -> tuple[Cluster, ClusterClients]:
    """Return the cluster with its endpoints, and the clients that the platform names."""
    from pipeline.cluster.clients_file import read_clients

    settings = options.load()
    platform = settings.platform
    if platform.cluster is None or platform.cluster.clients is None:
        hint = "cluster.clients.file in its file (docs/endpoint.md), and --platform or SLIPWAY_PLATFORM"
        raise ConfigError(f"the platform {platform.name} names no clients", hint=hint)
    return where.cluster(settings), read_clients(platform.cluster.clients)


def _table(rows: Sequence[Allowed], keys: Collection[str] | None = None) -> Any:
    """Return a table of clients; with *keys*, the names of those that have one, it says who has."""
    headings = [*LIMITS.values(), "Priority"]
    table = plain_table("Client", "Models", *headings, *(["Key"] if keys is not None else []), right=headings)
    for client in rows:
        counts = [getattr(client, limit, None) for limit in LIMITS]  # some are of a cluster alone
        table.add_row(
            client.name,
            ", ".join(client.models) or "all",
            *(f"{count:,}" if count else "–" for count in counts),
            str(client.priority),
            *(["yes" if client.name in keys else "no"] if keys is not None else []),
        )
    return table
