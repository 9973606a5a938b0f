"""The clients of a store's endpoints: who may ask, for what, and how much. ``clients.json`` holds no key, only hashes.

A key is 256 random bits, so that nobody finds it by trying: a slow hash, as passwords need it, would protect nothing
more, and would have to be computed for each request.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from stages.parts.base.errors import ConfigError, check_known
from stages.parts.base.files import exclusive, write_json
from stages.parts.base.store import Record

FILE: Final = "clients.json"
PREFIX: Final = "sk-slipway-"
"""How a key begins, so that programs that look for secrets in files find it."""
KEY_BYTES: Final = 32
DEFAULT: Final = "default"
"""The client whose key is ``SLIPWAY_API_KEY``: whoever runs the endpoint. It has no limits."""
ANYBODY: Final = "anybody"
"""Who asks an endpoint that requires no key."""
NOBODY: Final = "nobody"
"""The client of requests that were not let in."""
OWN: Final = "slipway"
"""The client of our own requests, which go to the servers themselves."""
UNATTRIBUTED: Final = "unattributed"
"""The client of tokens that vLLM has counted and no request reports."""
NAME: Final = r"^[a-z0-9]([a-z0-9._-]{0,62})$"
VALUE: Final = r"^[A-Za-z0-9._:@/|+=-]{1,256}$"
"""What stands unquoted in headers and in Lua."""
Limit = Annotated[int, Field(ge=1)]


class TokenPrice(Record):
    """What a million tokens cost."""

    prompt: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    output: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TokenPrices(Record):
    """What clients pay for tokens, in the platform's currency."""

    default: TokenPrice
    """Of models, and of adapters, that have none of their own."""
    models: dict[Annotated[str, Field(pattern=VALUE)], TokenPrice] = Field(default={})

    def cost(self, model: str, prompt_tokens: int, output_tokens: int) -> float:
        price = self.models.get(model, self.default)
        return (prompt_tokens * price.prompt + output_tokens * price.output) / 1e6


class Allowed(Record):
    """What one client may do."""

    name: Annotated[str, Field(pattern=NAME)]
    models: tuple[str, ...] = ()
    """Names of the models that it may ask. Empty: all."""
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    """Tokens of prompts and answers. They are counted when an answer ends, so that what is under way may exceed it."""
    requests_at_once: Limit | None = None
    priority: int = 0
    """Among waiting requests, vLLM takes the one with the lowest number first, and of these the one that came first."""


class Client(Allowed):
    """One client of the endpoints on this machine."""

    key_sha256: str


class Clients(Record):
    """``clients.json`` in the store."""

    clients: tuple[Client, ...] = ()


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def unlimited(name: str, key: str = "") -> Client:
    return Client(name=name, key_sha256=hash_of(key))


def read_clients(root: Path) -> Clients | None:
    """Read the clients of the store at *root*; None if it has no file of them; DamagedModel if it is not valid."""
    return Clients.read(root / FILE)


def add(root: Path, client: Client) -> str:
    """Add *client*, whatever its hash, and return its key, which is kept nowhere; ConfigError if the name is taken."""
    if client.name in (DEFAULT, ANYBODY, NOBODY, OWN, UNATTRIBUTED):
        raise ConfigError(f"{client.name!r} can't be the name of a client", hint="Slipway itself uses it")
    with _changing(root) as clients:
        if client.name in clients:
            hint = f"for a new key: slipway clients rotate {client.name}"
            raise ConfigError(f"there is a client {client.name!r}", hint=hint)
        clients[client.name], key = _with_new_key(client)
    return key


def rotate(root: Path, name: str) -> str:
    """Give a client another key, and return it. The old one is no longer accepted. UnknownName: there is none."""
    with _changing(root) as clients:
        clients[name], key = _with_new_key(_named(clients, name))
    return key


def remove(root: Path, name: str) -> None:
    """Remove a client; UnknownName if there is none of that name."""
    with _changing(root) as clients:
        del clients[_named(clients, name).name]


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def _with_new_key(client: Client) -> tuple[Client, str]:
    key = new_key()
    return client.model_copy(update={"key_sha256": hash_of(key)}), key


def _named(clients: Mapping[str, Client], name: str) -> Client:
    check_known("client", name, clients)
    return clients[name]


@contextmanager
def _changing(root: Path) -> Iterator[dict[str, Client]]:
    """Yield the clients by name, to be changed in place, and write them when the block is left without an error."""
    root.mkdir(parents=True, exist_ok=True)
    with exclusive(root / f".{FILE}.lock", "the clients"):
        clients = {client.name: client for client in (read_clients(root) or Clients()).clients}
        yield clients
        path = root / FILE
        write_json(path, Clients(clients=tuple(clients.values())))
        path.chmod(0o600)
