"""``clients.yaml``: who may ask a cluster's endpoints, for what, and how much. A platform team keeps it.

What Envoy Gateway can't do is refused here by its name, so that nobody relies on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, model_validator

from pipeline.settings.platform import ClientSettings
from pipeline.workflow.stage_templates import API_KEY, HUB_TOKEN
from stages.parts.base.errors import ConfigError, InvalidName, check_known
from stages.parts.base.settings import Settings, parse, read_yaml
from stages.parts.base.store import directory_name
from stages.parts.endpoint.clients import ANYBODY, DEFAULT, VALUE, Allowed, Limit, TokenPrices

MOST_RULES: Final = 256
"""Envoy Gateway takes no more limits in a policy, and no more names in a rule."""
MOST_COUNTED: Final = 2**32 - 1
"""Envoy's rate-limit service counts in 32 bits."""
MONEY_PARTS: Final = 10_000
"""Into which a unit of the currency is divided, because the service counts whole numbers."""


class Tokens(Settings):
    """Signed tokens (JWT) of an OpenID Connect issuer, by which clients come instead of by keys."""

    issuer: Annotated[str, Field(pattern=r"^https?://\S+$")]
    """The claim ``iss``."""
    jwks_uri: Annotated[str, Field(pattern=r"^https?://\S+$")]
    """Where its public keys are: ``jwks_uri`` in its ``/.well-known/openid-configuration``."""
    audiences: Annotated[tuple[str, ...], Field(min_length=1, max_length=8)]
    """The claim ``aud`` has one of them: without it, a token for any other service of the issuer would do."""
    claim: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] = "sub"
    """Whose value says which client it is; text, no list. Of nested ones ``realm.team``."""


class ClusterClient(Allowed):
    """One client in ``clients.yaml``."""

    secret: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")] | None = None
    """The Secret that holds its key, under its name."""
    value: Annotated[str, Field(pattern=VALUE)] | None = None
    """The value of the tokens' claim; by default its name."""
    requests_per_second: Limit | None = None
    """Spreads them, where those of a whole minute may come at once."""
    tokens_per_month: Limit | None = None
    """The same tokens as per minute. A month has 30 days, counted from 1970."""
    money_per_month: Annotated[float, Field(gt=0, le=MOST_COUNTED / MONEY_PARTS)] | None = None
    """In the platform's currency, by ``prices``."""
    cache_salt: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/=_-]{16,256}$")] | None = None
    """Keeps its prompts in vLLM's prefix cache apart from those of clients with other salts: how long an answer takes
    then tells nobody else what it has asked."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.name in (DEFAULT, ANYBODY):
            raise ValueError(f"{self.name!r} can't be the name of a client: Slipway itself uses it")
        if self.requests_at_once:
            raise ValueError("requests_at_once is for one machine: Envoy Gateway can't count them by client")
        if self.secret in (HUB_TOKEN.secret_name, API_KEY.secret_name):
            raise ValueError(f"the Secret {self.secret} is for something else: every entry would be a client's key")
        for field in ("requests_per_second", "requests_per_minute", "tokens_per_minute", "tokens_per_month"):
            if (getattr(self, field) or 0) > MOST_COUNTED:
                raise ValueError(f"{field} can't exceed {MOST_COUNTED:,}: Envoy's rate-limit service has 32 bits")
        for model in self.models:
            try:
                directory_name(model)
            except InvalidName as error:
                raise ValueError(str(error)) from error
        return self

    @property
    def identity(self) -> str:
        """By which the gateway knows it: the name of its key, or the value of the claim."""
        return self.value or self.name

    @property
    def limits(self) -> list[tuple[int, str, str]]:
        """As Envoy Gateway takes them: how many, in which unit of time, of requests, tokens or (parts of) money."""
        limits = (
            (self.requests_per_minute, "Minute", "requests"),
            (self.tokens_per_minute, "Minute", "tokens"),
            (self.tokens_per_month, "Month", "tokens"),
            (self.money_per_month and max(1, round(self.money_per_month * MONEY_PARTS)), "Month", "money"),
            # The last: of limits that are used up, Envoy tells of the first when it ends.
            (self.requests_per_second, "Second", "requests"),
        )
        return [(count, unit, counted) for count, unit, counted in limits if count]


class ClusterClients(Settings):
    """``clients.yaml``."""

    tokens: Tokens | None = None
    """Without them, clients have keys."""
    prices: TokenPrices | None = None
    clients: tuple[ClusterClient, ...]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for field in ("name", "identity"):
            values = [getattr(client, field) for client in self.clients]
            if twice := sorted({value for value in values if values.count(value) > 1}):
                raise ValueError(f"named twice: {', '.join(twice)}")
        for client in self.clients:
            if self.tokens and client.secret:
                raise ValueError(
                    f"{client.name} has a secret, and there are tokens: Envoy Gateway would demand both of each request"
                )
            if not self.tokens and (client.value or not client.secret):
                wrong = "a value, but there are no tokens" if client.value else "no secret"
                raise ValueError(f"{client.name} has {wrong}")
            if client.money_per_month and not self.prices:
                raise ValueError(f"money_per_month of {client.name} needs prices")
        if max(len(self.clients), len(self.limits)) > MOST_RULES:
            raise ValueError(f"Envoy Gateway takes {MOST_RULES} clients, and as many limits of all of them")
        return self

    @property
    def limits(self) -> list[tuple[ClusterClient, int, str, str]]:
        """Of all clients, in the order by which Envoy Gateway numbers them."""
        return [(client, *limit) for client in self.clients for limit in client.limits]

    @property
    def secrets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(client.secret for client in self.clients if client.secret))

    @property
    def models(self) -> tuple[str, ...]:
        """Those that are named; a client that names none may ask all."""
        return tuple(dict.fromkeys(model for client in self.clients for model in client.models))

    def check_keys(self) -> None:
        """Raise ConfigError if clients have no keys."""
        if self.tokens:
            text = f"clients have no keys: they come with tokens of {self.tokens.issuer}"
            raise ConfigError(text, hint="the issuer gives and withdraws them")

    def named(self, name: str) -> ClusterClient:
        """Return a client by its name. Raises: UnknownName; ConfigError: clients have no keys."""
        self.check_keys()
        clients = {client.name: client for client in self.clients}
        check_known("client", name, clients)
        return clients[name]


def read_clients(settings: ClientSettings) -> ClusterClients:
    """Read the clients' file. Raises: ConfigError: it is missing or wrong; every mistake at once."""
    path = Path(settings.file)
    clients = parse(ClusterClients, read_yaml(path), str(path))
    if not clients.clients:
        raise ConfigError(f"{path} names no client", hint="without cluster.clients, endpoints have one key for all")
    return clients
