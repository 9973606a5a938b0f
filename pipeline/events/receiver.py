"""The receiver of Hugging Face's webhooks: their secret comes in a header of its own, which Argo Events does not know.

    Hub --X-Webhook-Secret--> receiver --Authorization: Bearer--> EventSource -> Sensor -> Workflow

What it answers, and the Hub shows in the webhook's activity:

    202 forwarded      the event is in the event bus
    200 ignored        an event that starts no run: another branch, a tag, a data set, a discussion
    200 replayed       this commit of this model went on before
    400 malformed      no JSON object
    401 unauthorized   the secret is missing or wrong; nothing of the body was read
    403 foreign        the repository is not in the list of those allowed
    408, 413           the body came too slowly, or is too large
    429 limited        too many pushes of this repository in an hour; Retry-After says how long
    502 refused        the EventSource does not accept our token or address
    503 unavailable    the EventSource does not answer; Retry-After: send it again
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
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

from pipeline.argo.status import arguments_of
from pipeline.events.doorkeeper import Doorkeeper, Memory, Push
from pipeline.events.forwarding import Forwarder
from pipeline.events.secret import secret
from pipeline.events.sensor import Sensor
from stages.parts.base.errors import ClusterRefused, ClusterUnavailable, ConfigError, EventRefused, PortInUse

PROVIDER: Final = "huggingface"
SECRET_VARIABLE: Final = "SLIPWAY_WEBHOOK_SECRET"  # noqa: S105
TOKEN_VARIABLE: Final = "SLIPWAY_EVENTS_TOKEN"  # noqa: S105
LARGEST_BODY: Final = 256 * 1024
"""Bytes. The Hub's events have a few thousand."""
BODY_S: Final = 10.0
CONNECTIONS: Final = 64
LEFT_TO_FINISH_S: Final = 20
"""For what is being forwarded when the receiver is asked to stop."""
RETRY_S: Final = 60


@dataclass(frozen=True)
class Options:
    """Besides the two secrets, which come from the environment."""

    forward_to: str
    """The EventSource's URL."""
    allowed: Sequence[str]
    """Patterns of model names: ``org/*``."""
    host: str = "127.0.0.1"
    port: int = 8080
    per_hour: int = 12
    """Pushes of one repository."""
    memory: Path | None = None
    """A file that remembers what went on over a restart. None: a restart forgets."""
    patience_s: float = 8.0
    """How long an EventSource that does not answer is tried again."""

    def check(self) -> None:
        """Raises: ConfigError."""
        url = httpx.URL(self.forward_to)
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"{self.forward_to!r} is not the URL of an EventSource", hint="http://host:port/path")
        if not self.allowed or not all(pattern.count("/") == 1 for pattern in self.allowed):
            raise ConfigError(
                "which models may start runs is not said as patterns of names with one '/'", hint="--allow 'org/*'"
            )


@dataclass(frozen=True)
class Answer:
    status: int
    outcome: str
    reason: str
    wait_s: int | None = None

    def response(self) -> Response:
        headers = {} if self.wait_s is None else {"Retry-After": str(self.wait_s)}
        return JSONResponse({"outcome": self.outcome, "reason": self.reason}, self.status, headers)


class Unusable(Exception):
    """A body that is no event."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.reason)
        self.answer = answer


@dataclass
class Receiver:
    secret: str
    doorkeeper: Doorkeeper
    forwarder: Forwarder
    sensor: Sensor = field(default_factory=Sensor.read)

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
            Route(f"/{PROVIDER}", self.webhook, methods=["POST"]),
            Route("/healthz", lambda _: PlainTextResponse("ok")),
            Route("/metrics", lambda _: Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)),
        ]
        return Starlette(routes=routes, lifespan=lifespan)

    async def webhook(self, request: Request) -> Response:
        answer = await self._answer(request)
        self._webhooks.labels(answer.outcome).inc()
        say(f"{answer.status} {answer.outcome}: {answer.reason}")
        return answer.response()

    async def _answer(self, request: Request) -> Answer:
        given = request.headers.getlist("X-Webhook-Secret")
        if len(given) != 1 or not hmac.compare_digest(given[0].encode(), self.secret.encode()):
            return Answer(401, "unauthorized", "X-Webhook-Secret is missing or wrong")
        try:
            event = parsed(await body(request))
            given_to_run = arguments_of(self.sensor.workflow(PROVIDER, event))
        except Unusable as error:
            return error.answer
        except EventRefused as error:
            return Answer(200, "ignored", str(error))
        push = Push(given_to_run["model"], given_to_run["revision"])
        # A second delivery of the same push waits for what comes of the first.
        async with self._locks.setdefault(str(push), asyncio.Lock()):
            return self._refusal(push) or await self._forward(push, event)

    def _refusal(self, push: Push) -> Answer | None:
        if not self.doorkeeper.allows(push.model):
            return Answer(403, "foreign", f"{push.model} is not in the list of those allowed")
        if push in self.doorkeeper.memory:
            return Answer(200, "replayed", f"{push} went on before")
        if wait_s := self.doorkeeper.wait_s(push.model):
            reason = f"{push}: more than {self.doorkeeper.per_hour} pushes of {push.model} in an hour"
            return Answer(429, "limited", reason, math.ceil(wait_s))
        return None

    async def _forward(self, push: Push, event: Any) -> Answer:
        try:
            await self.forwarder.send(event)
        except ClusterUnavailable as error:
            return Answer(503, "unavailable", f"{push}: {error}", RETRY_S)
        except ClusterRefused as error:
            return Answer(502, "refused", f"{push}: {error}")
        self.doorkeeper.went_on(push)
        return Answer(202, "forwarded", str(push))


async def body(request: Request) -> bytes:
    """Raises: Unusable: too large, too slow, or cut off."""
    content = b""
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                content += chunk
                if len(content) > LARGEST_BODY:
                    raise Unusable(Answer(413, "malformed", f"the body has more than {LARGEST_BODY} bytes"))
    except TimeoutError as error:
        raise Unusable(Answer(408, "malformed", f"the body took more than {BODY_S:.0f} s")) from error
    except ClientDisconnect as error:
        raise Unusable(Answer(400, "malformed", "the body was cut off")) from error
    return content


def parsed(content: bytes) -> Any:
    """Raises: Unusable: it is no JSON object."""
    try:
        event = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Unusable(Answer(400, "malformed", "the body is not JSON")) from error
    if not isinstance(event, dict):
        raise Unusable(Answer(400, "malformed", "the body is not a JSON object"))
    return event


def _no_constant(text: str) -> NoReturn:
    raise ValueError(text)  # NaN and Infinity are not JSON


def serve(options: Options) -> None:
    """Answer until SIGTERM or Ctrl-C, and let what is being forwarded finish.

    Raises:
        ConfigError: a secret is missing or weak, or an option makes no sense.
        PortInUse: somebody else listens there.
    """
    options.check()
    expected = secret(SECRET_VARIABLE)
    forwarder = Forwarder(options.forward_to, secret(TOKEN_VARIABLE), options.patience_s)
    receiver = Receiver(expected, Doorkeeper(options.allowed, options.per_hour, Memory(options.memory)), forwarder)
    config = uvicorn.Config(
        receiver.application(),
        http="h11",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=LEFT_TO_FINISH_S,
    )
    listening = _listening(options.host, options.port)
    host, port = listening.getsockname()[:2]
    say(f"listening on http://{host}:{port}/{PROVIDER} for {', '.join(options.allowed)}")
    # uvicorn raises the signal that ended it once more; this process has ended well.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    uvicorn.Server(config).run(sockets=[listening])
    say("stopped")


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise PortInUse(f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another --port") from error


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
