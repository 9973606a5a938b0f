"""The receiver of registries' webhooks. It checks each one's secret, and forwards what was pushed in one form for all.

    Hugging Face --X-Webhook-Secret-------+
                                          +-> receiver --Authorization: Bearer--> EventSource -> Sensor -> Workflow
    Harbor       --Authorization: Bearer--+

docs/triggers.md lists its answers.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import math
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn
from weakref import WeakValueDictionary

import httpx
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from pipeline.events.forwarding import ForwardedPushes, Forwarder, PushAdmission, optional_secret, secret
from pipeline.events.push import PROVIDERS, Push
from stages.parts.base.errors import ClusterRefused, ClusterUnavailable, ConfigError, EventRefused, PortInUse
from stages.parts.base.log import say

TOKEN_VARIABLE: Final = "SLIPWAY_EVENTS_TOKEN"  # noqa: S105
LARGEST_BODY_BYTES: Final = 256 * 1024
"""A webhook's body has a few thousand bytes."""
BODY_S: Final = 10.0
RETRY_S: Final = 60


@dataclass(frozen=True)
class WebhookAnswer:
    status: int
    outcome: str
    reason: str
    wait_s: int | None = None


class Malformed(Exception):
    """The body is not an event."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.answer = WebhookAnswer(status, "malformed", reason)


@dataclass
class Receiver:
    secrets: Mapping[str, str]
    """The secret of each provider that is accepted, by the provider's name."""
    admission: PushAdmission
    forwarder: Forwarder

    def __post_init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.registry = CollectorRegistry()
        self._webhooks = Counter("slipway_webhooks", "Webhooks, by outcome", ["outcome"], registry=self.registry)

    def application(self) -> Starlette:
        @asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            yield
            await self.forwarder.close()

        routes = [
            *(Route(f"/{name}", functools.partial(self.webhook, name), methods=["POST"]) for name in self.secrets),
            Route("/healthz", lambda _: PlainTextResponse("ok")),
            Route("/metrics", lambda _: Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    async def webhook(self, provider: str, request: Request) -> Response:
        answer = await self._answer(provider, request)
        self._webhooks.labels(answer.outcome).inc()
        say(f"{answer.status} {answer.outcome}: {answer.reason}")
        headers = {} if answer.wait_s is None else {"Retry-After": str(answer.wait_s)}
        return JSONResponse({"outcome": answer.outcome, "reason": answer.reason}, answer.status, headers)

    async def _answer(self, name: str, request: Request) -> WebhookAnswer:
        provider = PROVIDERS[name]
        headers, expected = request.headers.getlist(provider.header), provider.prefix + self.secrets[name]
        if len(headers) != 1 or not hmac.compare_digest(headers[0].encode(), expected.encode()):
            return WebhookAnswer(401, "unauthorized", f"{provider.header} is missing or wrong")
        try:
            push = provider.push(parsed(await body(request)))
        except Malformed as error:
            return error.answer
        except EventRefused as error:
            return WebhookAnswer(200, "ignored", str(error))
        # A second delivery of the same push waits for the outcome of the first.
        async with self._locks.setdefault(str(push), asyncio.Lock()):
            return self._refusal(push) or await self._forward(push)

    def _refusal(self, push: Push) -> WebhookAnswer | None:
        if not self.admission.allows(push.model):
            return WebhookAnswer(403, "foreign", f"{push.model} is not among the allowed models")
        if push in self.admission.forwarded:
            return WebhookAnswer(200, "replayed", f"{push} was forwarded before")
        if wait_s := self.admission.wait_s(push.model):
            reason = f"{push}: more than {self.admission.per_hour} pushes of {push.model} in an hour"
            return WebhookAnswer(429, "limited", reason, math.ceil(wait_s))
        return None

    async def _forward(self, push: Push) -> WebhookAnswer:
        try:
            await self.forwarder.send(push)
        except ClusterUnavailable as error:
            return WebhookAnswer(503, "unavailable", f"{push}: {error}", RETRY_S)
        except ClusterRefused as error:
            return WebhookAnswer(502, "refused", f"{push}: {error}")
        self.admission.record(push)
        return WebhookAnswer(202, "forwarded", str(push))


async def body(request: Request) -> bytes:
    """Read a request's body. Raises: Malformed: it is too large, too slow, or cut off."""
    content = b""
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                content += chunk
                if len(content) > LARGEST_BODY_BYTES:
                    raise Malformed(413, f"the body has more than {LARGEST_BODY_BYTES} bytes")
    except TimeoutError as error:
        raise Malformed(408, f"the body took more than {BODY_S:.0f} s") from error
    except ClientDisconnect as error:
        raise Malformed(400, "the body was cut off") from error
    return content


def parsed(content: bytes) -> Any:
    """Parse a body. Raises: Malformed: it is not a JSON object."""
    try:
        event = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Malformed(400, "the body is not JSON") from error
    if not isinstance(event, dict):
        raise Malformed(400, "the body is not a JSON object")
    return event


def _no_constant(text: str) -> NoReturn:
    raise ValueError(text)  # NaN and Infinity are not JSON


def serve(
    forward_to: str,
    allowed: Sequence[str],
    *,
    host: str,
    port: int,
    per_hour: int,
    memory: Path | None,
    patience_s: float,
) -> None:
    """Answer until SIGTERM or Ctrl-C, then finish the requests in progress. Secrets come from the environment.

    Args:
        forward_to: the EventSource's URL.
        memory: file that keeps what was forwarded over a restart.

    Raises:
        ConfigError: a secret is missing or weak, or an option is invalid.
        PortInUse: another process listens there.
    """
    url = httpx.URL(forward_to)
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(f"{forward_to!r} is not the URL of an EventSource", hint="http://host:port/path")
    if not allowed or not all(pattern.count("/") == 1 for pattern in allowed):
        hint = "--allow 'org/*'"
        raise ConfigError("the models that may start runs must be given as patterns with one '/' each", hint=hint)
    secrets = {name: value for name, provider in PROVIDERS.items() if (value := optional_secret(provider.variable))}
    if not secrets:
        variables = " and ".join(provider.variable for provider in PROVIDERS.values())
        text = f"no provider's secret is set: {variables} are empty"
        raise ConfigError(text, hint="set one of them, or with _FILE a file")
    forwarder = Forwarder(forward_to, secret(TOKEN_VARIABLE), patience_s)
    admission = PushAdmission(allowed, per_hour, ForwardedPushes(memory))
    config = uvicorn.Config(
        Receiver(secrets, admission, forwarder).application(),
        http="h11",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=64,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=20,  # seconds for requests in progress
    )
    listening = _listen(host, port)
    host, port = listening.getsockname()[:2]
    paths = ", ".join(f"/{provider}" for provider in secrets)
    say(f"listening on http://{host}:{port} for webhooks at {paths}; allowed models: {', '.join(allowed)}")
    # After its shutdown uvicorn raises the signal again, which would end this process as failed.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    uvicorn.Server(config).run(sockets=[listening])
    say("stopped")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        text = f"cannot listen on {host}:{port}: {error.strerror}"
        raise PortInUse(text, hint="choose another --port") from error
