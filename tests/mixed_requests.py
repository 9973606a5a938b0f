"""Requests of every kind that clients send to an endpoint, and whether what was used is what its servers counted."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import httpx
import psutil

from stages.parts.base.store import ModelStore
from stages.parts.endpoint import usage
from stages.parts.endpoint.clients import NOBODY, Client, add, remove
from stages.parts.endpoint.database import opened
from stages.parts.endpoint.endpoint import SERVERS, Endpoint, endpoint
from stages.parts.endpoint.envoy import Admin
from stages.parts.vllm.client import credentials, healthy, http
from stages.parts.vllm.prometheus import read_tokens
from tests.serving import wait_until

AT_ONCE: Final = 8
TOKENS: Final = 6
LONG: Final = 200
"""More than is computed before the client goes away."""
SAID: Final = "What is a list?"
PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MANNERS: Final = ("plain", "streamed", "cut", "plain", "streamed", "gone", "refused")
REFUSED: Final = (400, 401, 403, 429)
KILLED: Final = 6
CLIENTS: Final[dict[str, dict[str, Any]]] = {
    "mixed": {},
    "leaving": {},
    "elsewhere": {"models": ("another/model",)},
    "seldom": {"requests_per_minute": 1},
}


@dataclass(frozen=True)
class Outcome:
    """What the client saw of one request."""

    manner: str
    status: int
    prompt: int = 0
    output: int = 0


class Mixed:
    """Clients of an endpoint that send everything that there is, one kind after another."""

    def __init__(self, found: Endpoint, keys: dict[str, str]) -> None:
        self._url, self._model, self._keys = found.url, found.model, keys
        self._ended: list[Outcome] = []

    def send(self, numbers: Sequence[int]) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            self._ended += pool.map(self._one, numbers)

    def completed(self) -> tuple[int, int, int]:
        """Requests, and the tokens that their answers told."""
        ended = [each for each in self._ended if each.manner in ("plain", "streamed")]
        assert {each.status for each in ended} == {200}
        return len(ended), sum(each.prompt for each in ended), sum(each.output for each in ended)

    def refused(self) -> int:
        return sum(each.manner == "refused" for each in self._ended)

    def count(self) -> Counter[tuple[str, int]]:
        return Counter((each.manner, each.status) for each in self._ended)

    def _one(self, number: int) -> Outcome:
        path, manner = PATHS[number % 3], MANNERS[number // 3 % len(MANNERS)]
        if manner == "refused":
            return self._refused(path, REFUSED[number // 21 % len(REFUSED)])
        goes = manner in ("cut", "gone")
        body = asked(self._model, path, LONG if goes else TOKENS, stream=manner in ("streamed", "cut"))
        key = self._keys["leaving" if goes else "mixed"]
        with httpx.Client(trust_env=False, timeout=60, headers=credentials(key)) as client:
            if manner == "plain":
                reply = client.post(f"{self._url}{path}", json=body)
                return Outcome(manner, reply.status_code, *told(reply.json()))
            if manner == "gone":
                with contextlib.suppress(httpx.ReadTimeout):
                    client.post(f"{self._url}{path}", json=body, timeout=0.2)
                return Outcome(manner, 0)
            with client.stream("POST", f"{self._url}{path}", json=body) as reply:
                events = list(_events(reply, 3 if manner == "cut" else None))
                return Outcome(manner, reply.status_code, *told(events[-1]))

    def _refused(self, path: str, status: int) -> Outcome:
        keys = {400: "leaving", 403: "elsewhere", 429: "seldom"}
        key = self._keys[keys[status]] if status in keys else "wrong"
        body = asked(self._model, path, -1, stream=False)
        return Outcome("refused", http().post(f"{self._url}{path}", json=body, headers=credentials(key)).status_code)

    def under_way(self, then: Any) -> None:
        """Do something while some streams are under way, which it ends."""
        body = asked(self._model, PATHS[1], LONG, stream=True)
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(httpx.Client(trust_env=False, headers=credentials(self._keys["leaving"])))
            for _ in range(KILLED):
                reply = stack.enter_context(client.stream("POST", f"{self._url}{PATHS[1]}", json=body))
                list(_events(reply, 1))
            then()


def asked(model: str, path: str, tokens: int, *, stream: bool) -> dict[str, Any]:
    most = {"max_output_tokens": tokens} if path.endswith("responses") else {"max_tokens": tokens, "ignore_eos": True}
    said: dict[str, Any] = {"messages": [{"role": "user", "content": SAID}]}
    if not path.endswith("chat/completions"):
        said = {"input": SAID} if path.endswith("responses") else {"prompt": SAID}
    return {"model": model, "stream": stream, **said, **most}


def told(answer: dict[str, Any]) -> tuple[int, int]:
    """The tokens of prompt and answer."""
    found = answer.get("usage") or (answer.get("response") or {}).get("usage") or {}
    return (
        found.get("prompt_tokens", found.get("input_tokens", 0)),
        found.get("completion_tokens", found.get("output_tokens", 0)),
    )


def _events(reply: httpx.Response, most: int | None) -> Iterator[dict[str, Any]]:
    data = (line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: {"))
    for number, each in enumerate(data, 1):
        yield json.loads(each)
        if number == most:
            return


@contextlib.contextmanager
def clients(store: ModelStore) -> Iterator[dict[str, str]]:
    """The keys of ``CLIENTS``."""
    yield {name: add(store.root, Client(name=name, key_sha256="", **limits)) for name, limits in CLIENTS.items()}
    for name in CLIENTS:
        remove(store.root, name)


def check_usage(store: ModelStore, count: int) -> dict[str, usage.Sum]:
    """Send *count* requests of all kinds, rotate the log and kill Envoy meanwhile, and compare what the database has
    with what the clients were told and with what the servers have counted. Returns the sums by client."""
    since, before = datetime.now(UTC), counted(store)
    found = endpoint(store)
    assert found
    with clients(store) as keys:
        mixed = Mixed(found, keys)
        mixed.send(range(count // 3))
        assert usage.rotate(store.path / SERVERS, 0)
        Admin(store.path / SERVERS).ask("POST", "/reopen_logs")
        mixed.send(range(count // 3, 2 * count // 3))
        mixed.under_way(lambda: kill_envoy(store))
        wait_until(lambda: healthy(found.url), "Envoy")
        mixed.send(range(2 * count // 3, count))
    requests, prompt, output = mixed.completed()
    used = [after - earlier for after, earlier in zip(counted(store), before, strict=True)]

    sums: dict[str, usage.Sum] = {}
    whole: list[int] = []

    def all_counted() -> bool:
        nonlocal sums, whole
        sums = sums_since(store, since)
        whole = [sum(each.prompt_tokens for each in sums.values()), sum(each.output_tokens for each in sums.values())]
        return whole == used

    with contextlib.suppress(AssertionError):  # the next one says more
        wait_until(all_counted, "the usage", 30)
    assert whole == used, (mixed.count(), sums)
    exact = sums["mixed"]
    assert (exact.requests, exact.prompt_tokens, exact.output_tokens) == (requests, prompt, output)
    assert (exact.refused, exact.failed, exact.unknown) == (0, 0, 0)
    assert sum(sums[each].refused for each in ("leaving", "elsewhere", "seldom", NOBODY)) == mixed.refused()
    assert {status for _, status in mixed.count()} == {0, 200, 400, 401, 403, 429}
    return sums


def sums_since(store: ModelStore, since: datetime) -> dict[str, usage.Sum]:
    with opened(store.root) as database:
        usage.take_in(database, store.path / SERVERS)
        return {str(each.group["client"]): each for each in usage.sums(database, since, ["client"])}


def counted(store: ModelStore) -> tuple[int, int]:
    """Tokens of prompts and of answers, as the stable release's server itself counts them once it has nothing to do."""
    found = endpoint(store)
    server = found.server(found.release) if found else None
    assert server

    def idle() -> tuple[int, int] | None:
        text = http().get(f"{server.url}/metrics").raise_for_status().text
        waiting = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
        return read_tokens(text) if all(line.endswith(" 0.0") for line in waiting) else None

    return wait_until(idle, "the end of what is computed")


def kill_envoy(store: ModelStore) -> None:
    found = endpoint(store)
    assert found
    (envoy,) = [each for each in psutil.Process(found.pid).children(recursive=True) if "envoy" in each.name()]
    envoy.kill()
    envoy.wait(10)
