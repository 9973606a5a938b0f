"""Decides for Envoy who may ask: it answers Envoy's ``ext_authz`` filter (HTTP) and reads Envoy's access log.

Envoy's own ``local_ratelimit`` forgets its counts whenever the routes change, which a rollout does; its circuit
breakers count by release, not by client; and tokens are known only when an answer has ended. One question for each
request answers all of it. If this service does not answer, Envoy refuses the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import hmac
import math
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from stages.parts.base.errors import DamagedModel
from stages.parts.base.files import from_json
from stages.parts.base.log import say
from stages.parts.endpoint.access_log import LoggedRequest, LogReader
from stages.parts.endpoint.clients import ANYBODY, DEFAULT, FILE, Client, Clients, hash_of, read_clients, unlimited
from stages.parts.endpoint.routing import OFFERED, SHARED_HEADER
from stages.parts.endpoint.sides import SESSION_HEADER, SIDE_HEADER, side

CLIENT_HEADER: Final = "x-slipway-client"
"""Tells Envoy the client's name, for its log."""
MODEL_HEADER: Final = "x-slipway-model"
"""Tells Envoy to ask once more, at the path of this name, with the request's body, which names the model."""
UNDER_WAY: Final = "/x-slipway-under-way"
"""Where the door's socket says how many requests each client has under way. Envoy does not ask there."""
NO_SUCH_MODEL: Final = "there is no model of this name, or you may not use it"
REMOVE_HEADER: Final = "x-envoy-auth-headers-to-remove"
"""Tells Envoy what not to forward: the key."""
PRIORITY_HEADER: Final = "x-vllm-priority"
"""Tells vLLM the client's priority, before what the request itself says."""
WINDOW_S: Final = 60.0
AT_ONCE_S: Final = 1.0
"""When a request may be tried again that was one too many at once."""
BUSY_POLL_S: Final = 0.02
IDLE_POLL_S: Final = 0.2
LOG_LAG_S: Final = 0.2
"""The longest time after an answer has ended until it is in the log."""
REMEMBERED: Final = 10_000
START_TIMEOUT_S: Final = 10.0
CODES: Final = {401: "invalid_api_key", 403: "model_not_allowed", 404: "model_not_found", 429: "rate_limit_exceeded"}
KINDS: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass(frozen=True)
class DoorAnswer:
    """The decision on a request: 200, or what the client gets instead."""

    status: int
    client: str = ""
    message: str = ""
    wait_s: float = 0.0
    """After which a refused request may be tried again."""
    priority: int = 0
    limited: bool = False
    """Whether it depends on the model that the request names."""
    side: int | None = None
    """See ``sides``."""

    def response(self) -> Response:
        """Tell Envoy to let the request in, or the client why not: by an error as OpenAI's."""
        headers = {CLIENT_HEADER: self.client} if self.client else {}
        headers |= {MODEL_HEADER: "asked"} if self.limited else {}
        if self.status == 200:
            # Whatever the client itself says of its priority and its side: these replace it.
            headers |= {SIDE_HEADER: str(self.side)} if self.side is not None else {}
            return Response(headers=headers | {PRIORITY_HEADER: str(self.priority), REMOVE_HEADER: "authorization"})
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status == 429:
            headers["retry-after"] = str(max(1, math.ceil(self.wait_s)))
        kind, code = KINDS.get(self.status, "invalid_request_error"), CODES.get(self.status)
        message = self.message.encode(errors="backslashreplace").decode()  # a model's name may have half a character
        error = {"message": message, "type": kind, "param": None, "code": code}
        return JSONResponse({"error": error}, self.status, headers)


class LastMinute:
    """A sum over the last minute."""

    def __init__(self) -> None:
        self._events: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, amount: int, now: float) -> None:
        self._events.append((now, amount))
        self._sum += amount

    def wait_s(self, limit: int, now: float) -> float:
        """Compute the time until the sum is below *limit*; 0 if it is."""
        while self._events and self._events[0][0] <= now - WINDOW_S:
            self._sum -= self._events.popleft()[1]
        remaining = self._sum
        if remaining < limit:
            return 0.0
        for at, amount in self._events:
            remaining -= amount
            if remaining < limit:
                return at + WINDOW_S - now
        return WINDOW_S


@dataclass
class ClientUse:
    """What a client does and did within the last minute."""

    requests: LastMinute = field(default_factory=LastMinute)
    tokens: LastMinute = field(default_factory=LastMinute)
    at_once: int = 0


class Door:
    """The decisions for one model's endpoint. *root*, the store's, has its clients; *key* is that of the client
    ``DEFAULT``: if it is empty, there is no such client."""

    def __init__(self, root: Path, model: str, key: str) -> None:
        self.model = model
        self.adapters: frozenset[str] = frozenset()
        """Names under which LoRA adapters are served beside the model."""
        self.shared: Iterable[str] | None = None
        """The names of all models, if it is the door of the address that they share."""
        self._file, self._root = root / FILE, root
        self._default = unlimited(DEFAULT, key) if key else None
        self._seen: tuple[int, int] | None = None
        self._by_hash: dict[str, Client] = {}
        self._guarded = bool(key)
        """There is a key, or there were clients: without their file nobody is let in, instead of everybody."""
        self._use: dict[str, ClientUse] = {}
        self.under_way: dict[str, str] = {}
        """The client of each request that was let in, by the id that Envoy gave it."""
        self._ended: dict[str, None] = {}
        """The ids of the last requests that have ended, in order."""

    def decide(self, authorization: str, request: str, now: float) -> DoorAnswer:
        """Args: request: the id that Envoy gave it."""
        if (client := self._client(authorization)) is None:
            reason = "the API key is wrong" if authorization else "an API key is required: Authorization: Bearer KEY"
            return DoorAnswer(401, message=reason)
        if client.models and not {self.model, *self.adapters}.intersection(client.models):
            return DoorAnswer(403, client.name, f"{client.name} may not ask {self.model}")
        use = self._use.setdefault(client.name, ClientUse())
        if refusal := _beyond(client, use, now):
            return refusal
        use.requests.add(1, now)
        if request not in self._ended:  # a client may be gone before it is let in
            use.at_once += 1
            self.under_way[request] = client.name
        limited = bool(client.models and self.adapters)
        return DoorAnswer(200, client.name, priority=client.priority, limited=limited)

    def decide_model(self, name: str, body: bytes) -> DoorAnswer:
        """Decide on the model that the request of a ``limited`` client names; without a name it is the endpoint's."""
        models = next((client.models for client in self._by_hash.values() if client.name == name), ())
        try:  # as vLLM reads it
            model = (from_json(body).get("model") or self.model) if body else None
        except (ValueError, AttributeError):
            model = "what is not a JSON object"
        if model is None or model in models:
            return DoorAnswer(200, name)
        return DoorAnswer(403, name, f"{name} may not ask {model}")

    def answer_shared(self, method: str, authorization: str, body: bytes) -> Response:
        """Answer at the address that all models share what no endpoint does: which models there are for a client, and
        what names none of them."""
        if (client := self._client(authorization)) is None:
            return self.decide(authorization, "", 0.0).response()
        names = [name for name in self.shared or () if not client.models or name in client.models]
        if method == "GET":
            entry = {"object": "model", "created": int(time.time()), "owned_by": "slipway"}
            return JSONResponse({"object": "list", "data": [{"id": name} | entry for name in names]})
        try:
            close = difflib.get_close_matches(from_json(body)["model"], names, n=1)
        except (ValueError, LookupError, TypeError):
            return DoorAnswer(400, message="the request is not a JSON object that names a model").response()
        message = NO_SUCH_MODEL + "".join(f"; did you mean {name!r}?" for name in close)
        return DoorAnswer(404, message=message).response()

    def note(self, request: LoggedRequest, now: float) -> None:
        """Count what the log says of a request that has ended."""
        self._ended[request.id] = None
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]
        if (name := self.under_way.pop(request.id, None)) is not None:
            use = self._use[name]
            use.at_once -= 1
            if tokens := (request.prompt_tokens or 0) + (request.output_tokens or 0):
                use.tokens.add(tokens, now)

    def _client(self, authorization: str) -> Client | None:
        self._read_again()
        if not self._guarded:
            return unlimited(ANYBODY)
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            return None
        key_hash = hash_of(key.strip())
        if self._default and hmac.compare_digest(self._default.key_sha256, key_hash):
            return self._default
        return self._by_hash.get(key_hash)  # the time that comparing hashes takes reveals nothing

    def _read_again(self) -> None:
        """Read the clients again if their file has changed. If it can't be read, no client is admitted."""
        try:
            status = self._file.stat()
            version = (status.st_mtime_ns, status.st_ino)
        except OSError:
            version = (0, 0)
        if version == self._seen:
            return
        try:
            clients = read_clients(self._root)
        except DamagedModel as error:
            say(f"no client is let in: {error}")
            clients = Clients()
        self._by_hash = {client.key_sha256: client for client in clients.clients} if clients else {}
        self._guarded = self._guarded or clients is not None
        self._seen = version


def _beyond(client: Client, use: ClientUse, now: float) -> DoorAnswer | None:
    """Refuse a request beyond the client's limits; None if it is within them."""
    if client.requests_at_once and use.at_once >= client.requests_at_once:
        message = f"{client.name} may have {client.requests_at_once} requests at once"
        return DoorAnswer(429, client.name, message, AT_ONCE_S)
    for window, limit, unit in (
        (use.requests, client.requests_per_minute, "requests"),
        (use.tokens, client.tokens_per_minute, "tokens"),
    ):
        if limit and (wait_s := window.wait_s(limit, now)):
            return DoorAnswer(429, client.name, f"{client.name} may use {limit} {unit} per minute", wait_s)
    return None


class _Service:
    """The ASGI application, and what follows the log beside it."""

    def __init__(self, door: Door, log: Path) -> None:
        self._door, self._log = door, LogReader(log, at_end=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (await self._respond(scope, receive))(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive) -> Response:
        headers, path = Headers(scope=scope), scope["raw_path"].decode("latin-1")
        authorization = headers.get("authorization", "")
        if self._door.shared is not None:  # this one is asked whatever names no model
            if OFFERED.get(path) != scope["method"]:
                return Response(status_code=404)
            return self._door.answer_shared(scope["method"], authorization, await Request(scope, receive).body())
        if path == UNDER_WAY:
            return JSONResponse(Counter(self._door.under_way.values()))
        if path.startswith(f"/{MODEL_HEADER}/"):
            answer = self._door.decide_model(headers.get(CLIENT_HEADER, ""), await Request(scope, receive).body())
        else:
            request, session = headers.get("x-request-id", ""), headers.get(SESSION_HEADER, "")
            body = b"" if session else await Request(scope, receive).body()  # Envoy sends it while it matters
            answer = await self._answer(authorization, request)
            answer = replace(answer, side=side(answer.client, session, body, request))
        if answer.status == 403 and SHARED_HEADER in headers:
            answer = replace(answer, status=404, message=NO_SUCH_MODEL)
        return answer.response()

    async def _answer(self, authorization: str, request: str) -> DoorAnswer:
        deadline = time.monotonic() + LOG_LAG_S
        while True:
            answer = self._door.decide(authorization, request, time.monotonic())
            # A client that asks again at once is not refused for an answer that has just ended.
            if answer.wait_s != AT_ONCE_S or time.monotonic() > deadline:
                return answer
            await asyncio.sleep(BUSY_POLL_S)

    async def follow(self) -> None:
        while True:
            for request in self._log.requests():
                self._door.note(request, time.monotonic())
            await asyncio.sleep(BUSY_POLL_S if self._door.under_way else IDLE_POLL_S)


@contextlib.contextmanager
def answering(door: Door, path: Path, log: Path) -> Iterator[threading.Thread]:
    """Answer Envoy, whose access log is *log*, at the socket *path*, in the thread that is yielded, until the block is
    left."""
    import uvicorn

    service = _Service(door, log)
    config = uvicorn.Config(service, lifespan="off", log_level="warning", access_log=False, interface="asgi3")
    server = uvicorn.Server(config)

    async def serve(listener: socket.socket) -> None:
        following = asyncio.create_task(service.follow())
        following.add_done_callback(lambda _: setattr(server, "should_exit", True))  # no answers without counting
        await server.serve([listener])
        following.cancel()

    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with short_path(path) as address:
            listener.bind(address)
        path.chmod(0o600)  # only its user can open it
        thread = threading.Thread(target=lambda: asyncio.run(serve(listener)), name="door", daemon=True)
        thread.start()
        try:
            yield thread
        finally:
            server.should_exit = True
            thread.join(START_TIMEOUT_S)


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield another path of *path*: that of a socket is limited to 107 bytes, that of the store is not."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
