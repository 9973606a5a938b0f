"""Several servers of one release behind the real Envoy: who gets which request, and what becomes of one that fails."""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest

from stages.parts.base.errors import ServerFailed
from stages.parts.endpoint.clients import Client, add
from stages.parts.endpoint.door import Door
from stages.parts.endpoint.endpoint import Wanted
from stages.parts.endpoint.envoy import EJECTED_AFTER, Proxy, proxying
from stages.parts.endpoint.routing import Backend, Balance, routing
from stages.parts.endpoint.supervised_server import failure_of
from stages.parts.vllm.client import credentials, http
from stages.parts.vllm.server import reserved_port
from tests.serving import wait_until

MODEL, RELEASE = "org/name", "0001-fp16-0123456789ab"
SESSIONS = [f"session {number}" for number in range(24)]


class Completions(BaseHTTPRequestHandler):
    """Answers with the number of its replica; the prompt ``wait`` once the test lets it."""

    protocol_version = "HTTP/1.1"
    server: Replica

    def do_GET(self) -> None:
        self.reply(200, {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked += 1
        if asked["prompt"] == "wait":
            self.server.go_on.wait(60)
        if asked.get("stream"):
            return self.stream()
        return self.reply(self.server.status, {"replica": self.server.number})

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        with contextlib.suppress(OSError):
            while not self.server.go_on.wait(0.1):
                self.wfile.write(b"data: {}\n\n")
                self.wfile.flush()
        self.close_connection = True

    def reply(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


class Replica(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True

    def __init__(self, number: int, path: str, go_on: threading.Event) -> None:
        super().__init__(path, Completions)
        self.number, self.go_on, self.path = number, go_on, path
        self.lock, self.asked, self.status = threading.Lock(), 0, 200
        self.connections: list[socket.socket] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def kill(self) -> None:
        self.shutdown()
        self.server_close()
        Path(self.path).unlink()
        for each in self.connections:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Front:
    """An endpoint with several replicas."""

    def __init__(self, folder: Path, url: str, proxy: Proxy, balance: Balance) -> None:
        self.folder, self.url, self.proxy, self.balance = folder, url, proxy, balance
        self.go_on = threading.Event()
        self.replicas: dict[int, Replica] = {}
        self.started = 0

    def start(self, *numbers: int) -> None:
        """Start replicas, each at a new socket, and tell Envoy."""
        for number in numbers:
            self.started += 1
            path = str(self.folder / f"{self.started}.sock")
            self.replicas[number] = Replica(number, path, self.go_on)
        self.apply()

    def kill(self, number: int) -> None:
        """End a replica; Envoy is not told."""
        self.replicas.pop(number).kill()

    def apply(self) -> None:
        up = [Backend(RELEASE, each.path, number) for number, each in sorted(self.replicas.items())]
        self.proxy.apply(routing([RELEASE], {RELEASE: up}, Wanted(stable=RELEASE), self.balance))

    def ask(self, session: str = "", key: str = "", **body: Any) -> httpx.Response:
        headers = credentials(key) | ({"x-session-id": session} if session else {})
        body = {"model": MODEL, "prompt": "x"} | body
        return http().post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60)

    def replica_of(self, session: str = "", key: str = "") -> int:
        return int(self.ask(session, key).raise_for_status().json()["replica"])

    def places(self) -> dict[str, int]:
        return {session: self.replica_of(session) for session in SESSIONS}

    def under_way(self, pool: ThreadPoolExecutor, count: int, session: str = "") -> list[int]:
        """How many of so many requests, one after another, each replica has once all are under way."""
        before = {number: each.asked for number, each in self.replicas.items()}

        def now() -> list[int]:
            return [each.asked - before[number] for number, each in sorted(self.replicas.items())]

        for _ in range(count):
            there = sum(now()) + 1
            pool.submit(self.ask, session, prompt="wait")
            wait_until(functools.partial(lambda there: sum(now()) == there, there), "the request")
        return now()


@contextlib.contextmanager
def serving(folder: Path, **balance: Any) -> Iterator[Front]:
    balanced = Balance(**({"replicas": 3} | balance))
    nothing = routing([RELEASE], {}, Wanted(stable=RELEASE), balanced)
    files, log = folder / "files", folder / "log"
    with (
        reserved_port("127.0.0.1", 0) as port,
        proxying(("127.0.0.1", port), nothing, Door(folder, MODEL, ""), folder=files, log=log) as proxy,
    ):
        front = Front(folder, f"http://127.0.0.1:{port}", proxy, balanced)
        front.start(*range(balanced.replicas))
        yield front
        front.go_on.set()
        for number in list(front.replicas):
            front.kill(number)


@pytest.fixture
def front(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Front]:
    with serving(tmp_path, **getattr(request, "param", {})) as made:
        yield made


def test_a_release_fails_if_one_of_its_servers_does_not_start_but_later_only_if_all_fail() -> None:
    first, second = servers = [cast(Any, SimpleNamespace(started=False, error=None)) for _ in range(2)]
    first.started, second.error = True, ServerFailed("out of kernels")
    assert failure_of(servers) is second.error
    second.started, second.error = True, None
    assert failure_of(servers) is None
    for server, failing in zip(servers, (False, True), strict=True):
        server.error = ServerFailed("five times in a row")
        assert (failure_of(servers) is not None) == failing


def test_a_session_stays_at_its_replica_until_that_dies_and_comes_back_with_it(front: Front) -> None:
    before = front.places()
    assert front.places() == before
    assert min(Counter(before.values()).values()) >= 3, "they are spread over all three"
    gone = {session for session in SESSIONS if before[session] == 1}

    def moved(now: dict[str, int]) -> set[str]:
        return {session for session in SESSIONS if now[session] != before[session]}

    front.kill(1)
    assert moved(front.places()) == gone, "at once, and no others"
    front.apply()
    without = front.places()
    assert front.places() == without
    assert moved(without) == gone
    assert {without[each] for each in gone} == {0, 2}
    front.start(1)
    assert front.places() == before


def test_without_a_session_a_request_goes_where_the_fewest_are_under_way(front: Front) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert front.under_way(pool, 12) == [4, 4, 4]
        assert front.proxy.in_flight(RELEASE) == 12
        front.go_on.set()


def test_a_session_that_asks_much_at_once_does_not_overload_its_replica(front: Front) -> None:
    with ThreadPoolExecutor(32) as pool:
        assert max(front.under_way(pool, 24, "hot")) < 14
        assert front.proxy.in_flight(RELEASE) == 24
        front.go_on.set()


@pytest.mark.parametrize("front", [{"affinity": "client"}], indirect=True)
def test_clients_stay_at_their_replicas_but_their_sessions_have_their_own(front: Front) -> None:
    keys = [add(front.folder, Client(name=f"client-{number}", key_sha256="")) for number in range(16)]
    before = [front.replica_of(key=key) for key in keys]
    assert [front.replica_of(key=key) for key in keys] == before
    assert set(before) == {0, 1, 2}
    assert {front.replica_of(session, keys[0]) for session in SESSIONS} == {0, 1, 2}
    assert front.replica_of("one", keys[0]) == front.replica_of("one", keys[1])


@pytest.mark.parametrize("front", [{"affinity": "none"}], indirect=True)
def test_without_affinity_a_session_is_nothing_special(front: Front) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert front.under_way(pool, 12, "hot") == [4, 4, 4]
        front.go_on.set()


def ejected(front: Front) -> list[int]:
    """How many servers get no requests now, in each cluster."""
    return list(front.proxy.admin.stats(r"^cluster\..*outlier_detection.ejections_active$").values())


@pytest.mark.parametrize("session", ["", "one"])
def test_a_replica_that_answers_with_errors_gets_no_requests_and_one_always_does(front: Front, session: str) -> None:
    front.replicas[front.replica_of(session)].status = 500
    assert sum(front.ask(session).is_server_error for _ in range(48)) == EJECTED_AFTER
    for each in front.replicas.values():
        each.status = 500
    assert {front.ask(session).status_code for _ in range(48)} == {500}
    assert max(ejected(front)) == 2


def test_a_replica_that_refuses_because_too_much_waits_keeps_its_requests(front: Front) -> None:
    for each in front.replicas.values():
        each.status = 503
    assert {front.ask().status_code for _ in range(12 * EJECTED_AFTER)} == {503}
    assert min(each.asked for each in front.replicas.values()) > EJECTED_AFTER
    assert ejected(front) == [0, 0]


@pytest.mark.parametrize("front", [{"replicas": 1}], indirect=True)
def test_a_single_server_is_asked_whatever_it_answers(front: Front) -> None:
    front.replicas[0].status = 500
    assert [front.ask().status_code for _ in range(3 * EJECTED_AFTER)] == [500] * 3 * EJECTED_AFTER
    assert ejected(front) == []


@pytest.mark.parametrize("front", [{"replicas": 1, "request_timeout_s": 1}], indirect=True)
def test_a_request_that_takes_too_long_ends_with_an_error_that_openais_client_does_not_repeat(front: Front) -> None:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="x") as client:
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model=MODEL, prompt="wait")
        assert (caught.value.status_code, caught.value.code) == (504, "timeout")
        assert front.replicas[0].asked == 1


@pytest.mark.parametrize("front", [{"replicas": 1, "request_timeout_s": 2}], indirect=True)
def test_a_stream_is_cut_by_the_time_of_the_whole_request_alone(front: Front) -> None:
    began = time.monotonic()
    with httpx.stream("POST", f"{front.url}/v1/completions", json={"prompt": "x", "stream": True}) as reply:
        with pytest.raises(httpx.RemoteProtocolError):
            list(reply.iter_lines())
        assert reply.status_code == 200
    assert 1.5 < time.monotonic() - began < 4.5
