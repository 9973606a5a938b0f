"""Copies of clients' requests to a canary: the real Envoy and its door before servers that answer in an instant."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from stages.parts.endpoint import access_log
from stages.parts.endpoint.access_log import LoggedRequest, LogReader
from stages.parts.endpoint.clients import OWN, Client, add
from stages.parts.endpoint.database import opened
from stages.parts.endpoint.door import Door
from stages.parts.endpoint.endpoint import Wanted
from stages.parts.endpoint.envoy import COPY_BYTES, MOST_COPIES, Proxy, proxying
from stages.parts.endpoint.routing import Backend, Balance, routing
from stages.parts.endpoint.sides import MOST_BODY_BYTES, SESSION_HEADER
from stages.parts.endpoint.usage import sums, take_in
from stages.parts.vllm.client import RELEASE_HEADER, http
from stages.parts.vllm.server import reserved_port
from tests.serving import wait_until
from tests.stages.parts.endpoint.test_clients import LONG_AGO, MODEL, Upstream

STABLE, CANARY = "r1", "r2"


class Split:
    """An endpoint with a stable release and a canary."""

    def __init__(self, root: Path, url: str, proxy: Proxy, servers: dict[str, Upstream]) -> None:
        self.root, self.files, self.url, self.proxy, self.servers = root, root / "files", url, proxy, servers
        self.reader = LogReader(self.files / access_log.NAME)
        self.lines: list[LoggedRequest] = []

    def shift(self, percent: int, copied: int = 0, affinity: Any = "session") -> None:
        wanted = Wanted(stable=STABLE, canary=CANARY, percent=percent, copied=copied)
        up = {name: [Backend(name, str(self.root / f"{name}.sock"))] for name in self.servers}
        self.proxy.apply(routing(up, up, wanted, Balance(affinity=affinity)))

    def chat(self, first: str, turns: int = 1, session: str = "") -> str:
        """Ask as a conversation does with all of its turns so far. Returns the release that answered."""
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": first}]
        for turn in range(turns - 1):
            messages += [{"role": "assistant", "content": f"{turn}"}, {"role": "user", "content": "go on"}]
        body, headers = {"messages": messages, "model": MODEL}, {SESSION_HEADER: session} if session else {}
        reply = http().post(f"{self.url}/v1/chat/completions", json=body, headers=headers)
        return str(reply.raise_for_status().headers[RELEASE_HEADER])

    def logged(self, clients: int, copies: int) -> tuple[list[LoggedRequest], list[LoggedRequest]]:
        def complete() -> bool:
            self.lines += self.reader.requests()
            return (len(self.of_clients()), len(self.copies())) >= (clients, copies)

        wait_until(complete, f"{clients} lines of clients and {copies} of copies")
        return self.of_clients(), self.copies()

    def of_clients(self) -> list[LoggedRequest]:
        return [line for line in self.lines if line.copy_of is None]

    def copies(self) -> list[LoggedRequest]:
        return [line for line in self.lines if line.copy_of is not None]


@pytest.fixture
def split(tmp_path: Path) -> Iterator[Split]:
    with contextlib.ExitStack() as stack:
        servers = {}
        for name in (STABLE, CANARY):
            servers[name] = stack.enter_context(Upstream(str(tmp_path / f"{name}.sock")))
            threading.Thread(target=servers[name].serve_forever, daemon=True).start()
        up = {name: [Backend(name, str(tmp_path / f"{name}.sock"))] for name in servers}
        alone = routing(up, up, Wanted(stable=STABLE, canary=CANARY))
        port = stack.enter_context(reserved_port("127.0.0.1", 0))
        door = Door(tmp_path, MODEL, "")
        proxy = proxying(("127.0.0.1", port), alone, door, folder=tmp_path / "files", log=tmp_path / "log")
        yield Split(tmp_path, f"http://127.0.0.1:{port}", stack.enter_context(proxy), servers)
        for server in servers.values():
            server.go_on.set()
            server.shutdown()


def test_a_conversation_stays_with_its_release_while_the_share_grows(split: Split) -> None:
    names = [str(number) for number in range(30)]
    former: set[str] = set()
    for percent in (0, 10, 50, 90, 100):
        split.shift(percent)
        at_canary = {name for name in names if split.chat(name) == CANARY}
        assert at_canary == {name for name in names if split.chat(name, turns=3) == CANARY}, "in every turn"
        assert at_canary >= former, "growing the share takes no conversation back"
        assert abs(len(at_canary) - 0.3 * percent) < 10
        former = at_canary
    split.shift(50)
    sessions = [[split.chat(str(turn), session=name) for turn in range(4)] for name in names]
    assert all(len(set(turns)) == 1 for turns in sessions)
    assert {turns[0] for turns in sessions} == {STABLE, CANARY}
    split.shift(49, affinity="none")
    assert len({split.chat("the same") for _ in range(40)}) == 2


def test_a_large_body_is_on_a_side_too(split: Split) -> None:
    split.shift(50)
    names = [str(number) for number in range(12)]
    bodies = {name: name.ljust(2 * MOST_BODY_BYTES, "x") for name in names}
    sides = {name: split.chat(bodies[name]) for name in names}
    assert set(sides.values()) == {STABLE, CANARY}
    assert sides == {name: split.chat(bodies[name], turns=2) for name in names}


def test_clients_notice_nothing_of_copies_and_the_log_has_both_sides_of_each(split: Split) -> None:
    key = add(split.root, Client(name="app", key_sha256="", requests_per_minute=40, tokens_per_minute=400))
    split.shift(0, copied=100)
    client = openai.OpenAI(base_url=f"{split.url}/v1", api_key=key, max_retries=0)
    for _ in range(20):
        events = list(client.completions.create(model=MODEL, prompt="x", stream=True))
        assert "".join(event.choices[0].text for event in events) == "!!!"
    originals, copies = split.logged(20, 20)
    assert sorted(copy.copy_of or "" for copy in copies) == sorted(line.id for line in originals)
    assert {line.release for line in originals} == {STABLE}
    assert {line.client for line in originals} == {"app"}
    assert {(copy.release, copy.client, copy.status, copy.output_tokens) for copy in copies} == {(CANARY, OWN, 200, 3)}
    assert all(line.server_ttft_us and line.server_answer_us is not None for line in (*originals, *copies))
    assert {line.content_type for line in copies} == {"text/event-stream"}
    assert "authorization" not in {name.lower() for name in split.servers[CANARY].asked[0]}
    with opened(split.root) as database:
        take_in(database, split.files)
        used = {group.group["client"]: group for group in sums(database, LONG_AGO, ("client",))}
    assert (used["app"].requests, used["app"].prompt_tokens, used["app"].output_tokens) == (20, 140, 60)
    assert (used[OWN].requests, used[OWN].output_tokens) == (20, 60)
    # 20 answers of 10 tokens are half of what the client may use in a minute, and 20 requests half of its requests.
    for _ in range(20):
        client.completions.create(model=MODEL, prompt="x")
    with pytest.raises(openai.RateLimitError, match="40 requests"):
        client.completions.create(model=MODEL, prompt="x")


def test_a_share_of_the_conversations_is_copied_and_nothing_but_requests_for_answers(split: Split) -> None:
    names = [str(number) for number in range(30)]
    split.shift(0, copied=50)
    for name in names:
        assert {split.chat(name), split.chat(name, turns=2)} == {STABLE}
    http().get(f"{split.url}/v1/models").raise_for_status()
    split.logged(61, 2)
    time.sleep(1)  # others would have come by now
    _, copies = split.logged(61, 2)
    assert 10 < len(copies) < 50
    assert len(copies) % 2 == 0, "all turns of a conversation, or none"
    split.shift(50)
    first = {name for name in names if split.chat(name) == CANARY}
    assert len(first) == len(copies) / 2, "those that are copied are those that move first"


def test_large_bodies_are_copied_up_to_a_limit(split: Split) -> None:
    split.shift(0, copied=100)
    for size in (COPY_BYTES // 2, 2 * COPY_BYTES):
        body = {"model": MODEL, "prompt": "x" * size}
        assert http().post(f"{split.url}/v1/completions", json=body, timeout=60).is_success
    _, copies = split.logged(2, 2)
    assert sorted(copy.status for copy in copies) == [200, 413]
    assert len(split.servers[CANARY].asked) == 1


def test_a_canary_that_hangs_costs_the_client_nothing(split: Split) -> None:
    def ask(prompt: str) -> float:
        began = time.monotonic()
        body = {"model": MODEL, "prompt": prompt}
        assert http().post(f"{split.url}/v1/completions", json=body, timeout=60).is_success
        return time.monotonic() - began

    envoy = next(process for process in psutil.Process().children(recursive=True) if process.name() == "envoy")
    long = "x" * (COPY_BYTES // 2)
    before, held = statistics.median(ask(long) for _ in range(4)), envoy.memory_info().rss
    split.servers[CANARY].hangs = True
    split.shift(0, copied=100)
    took = [ask(long) for _ in range(MOST_COPIES + 8)]
    assert statistics.median(took) < 2 * before + 0.05
    assert max(took) < 10, "no client waits until a copy is given up"
    assert envoy.memory_info().rss - held < 3 * MOST_COPIES * len(long)
    assert len(split.servers[CANARY].asked) <= MOST_COPIES
    began = time.monotonic()
    split.shift(0)
    assert time.monotonic() - began < 5, "copies that hang are not waited for"
    split.logged(MOST_COPIES + 12, 1)
    assert all(copy.status != 200 for copy in split.copies())


def test_a_dead_canary_costs_the_client_nothing_and_the_stable_release_answers_no_copies(split: Split) -> None:
    split.servers[CANARY].shutdown()
    split.servers[CANARY].server_close()
    split.shift(0, copied=100)
    assert [split.chat(str(number)) for number in range(5)] == [STABLE] * 5
    _, copies = split.logged(5, 5)
    assert {copy.status for copy in copies} == {503}
    assert len(split.servers[STABLE].asked) == 5
