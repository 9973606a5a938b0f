"""What does not pass through Envoy: our own requests to the servers, and what the servers themselves count."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import httpx

from stages.parts.base.errors import SlipwayError, TransientError
from stages.parts.base.log import say
from stages.parts.base.store import ModelStore
from stages.parts.endpoint import usage
from stages.parts.endpoint.access_log import LoggedRequest, Reading, leave
from stages.parts.endpoint.clients import OWN
from stages.parts.endpoint.database import opened
from stages.parts.endpoint.endpoint import SERVERS, endpoint
from stages.parts.endpoint.envoy import Admin
from stages.parts.endpoint.routing import OFFERED
from stages.parts.vllm.client import SOCKET_EXTENSION, http, read_metrics, socket_of
from stages.parts.vllm.prometheus import read_tokens

INTERVAL_S: Final = 5.0
LAST_TIMEOUT_S: Final = 10.0
REOPEN: Final = "/reopen_logs"
"""Where Envoy's administration interface is asked to open another file."""


def reading_of(server: str, model: str, release: str, tokens: tuple[int, int]) -> Reading:
    prompt, output = tokens
    return Reading(
        server=server, at=time.time(), model=model, release=release, prompt_tokens=prompt, output_tokens=output
    )


class Meter:
    """Leaves in *folder* what one start of a server has counted. What it counts until the first reading is our own: the
    completion that shows that it is up."""

    def __init__(self, folder: Path, model: str, release: str, url: str) -> None:
        self._folder, self._model, self._release, self._url = folder, model, release, url
        self._last: list[tuple[int, int]] = []
        """What the last two readings say: one more follows a change, because the proxy may have written down the end of
        what was counted in it only after that reading."""

    def read(self) -> None:
        """Leave the present counts. If that fails, the next reading has them too: they only grow."""
        with contextlib.suppress(ValueError, OSError, SlipwayError):
            tokens = read_tokens(read_metrics(self._url, self._release))
            if self._last == [tokens, tokens]:
                return
            reading = reading_of(socket_of(self._url), self._model, self._release, tokens)
            request = LoggedRequest(
                id=uuid.uuid4().hex, client=OWN, path="/v1/completions", status=200, **reading.model_dump()
            )
            leave(self._folder, *([] if self._last else [request]), reading)
            self._last = [*self._last[-1:], tokens]


def count_own(store: ModelStore) -> None:
    """From now on, count as the client ``OWN`` what this process asks of the store's servers past Envoy. Whoever is
    counted by Envoy, too, would be counted twice. Unanswered requests are not attributed."""
    http().event_hooks = {"response": [functools.partial(_note, store)]}


def _note(store: ModelStore, response: httpx.Response) -> None:
    path, socket = response.request.url.path, response.request.extensions.get(SOCKET_EXTENSION)
    if socket is None or not response.is_success or OFFERED.get(path) != "POST":
        return
    with contextlib.suppress(httpx.HTTPError, ValueError, LookupError, TypeError, OSError, SlipwayError):
        used, running = _used(response), endpoint(store)
        servers = running.servers if running else ()
        request = LoggedRequest(
            id=uuid.uuid4().hex,
            at=time.time(),
            model=json.loads(response.request.content)["model"],
            client=OWN,
            release={socket_of(server.url): server.release for server in servers if server.url}[socket],
            server=socket,
            path=path,
            status=response.status_code,
            prompt_tokens=used["prompt_tokens"],
            output_tokens=used["completion_tokens"],
        )
        leave(store.path / SERVERS, request)


def _used(response: httpx.Response) -> dict[str, int]:
    """Count the tokens of a request of our own. A stream is not read here, since its reader times it: it answers token
    ids with as many tokens as were asked for."""
    if response.headers.get("Content-Type", "").startswith("text/event-stream"):
        body = json.loads(response.request.content)
        return {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
    response.read()
    used: dict[str, int] = response.json()["usage"]
    return used


def import_lines(
    root: Path, url: str, folder: Path, reopen: Callable[[], object], complete: usage.Complete = usage.unchanged
) -> str:
    """Take into the database of *root* or at *url* what there is in *folder*, and let Envoy *reopen* its log once that
    is long. Returns why that was not possible; empty if it was."""
    try:
        with opened(root, url) as database:
            usage.take_in(database, folder, remove=True, complete=complete)
    except (OSError, SlipwayError) as error:
        return str(error)
    finally:
        with contextlib.suppress(OSError, httpx.HTTPError, TransientError):
            if usage.rotate(folder):
                reopen()
    return ""


def keep_importing(take_in: Callable[[], str], ended: threading.Event) -> str:
    """Take in what there is every few seconds, and once more after the end. *take_in* returns why that was not
    possible, if it was not; returns why the last time failed."""
    problem, stopping = "", False
    while not stopping:
        stopping = ended.wait(INTERVAL_S)
        former, problem = problem, take_in()
        if problem not in ("", former):
            say(f"the usage is not taken in at the moment: {problem}")
    return problem


@contextlib.contextmanager
def importing(store: ModelStore, url: str) -> Iterator[None]:
    """Put into the database what is in an endpoint's log, every few seconds and at the end of the block, in a thread of
    its own: a database that does not answer holds nothing up. Failed imports are retried later; until then the lines
    stay in their files."""
    folder, ended = store.path / SERVERS, threading.Event()
    reopen = functools.partial(Admin(folder).ask, "POST", REOPEN)
    take_in = functools.partial(import_lines, store.root, url, folder, reopen)
    thread = threading.Thread(target=keep_importing, args=(take_in, ended), name="usage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(LAST_TIMEOUT_S)
