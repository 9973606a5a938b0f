"""Which requests get past Envoy: it stands before a server that would answer every one of them."""

from __future__ import annotations

import http.client
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stages.parts.endpoint.clients import Client, add
from stages.parts.endpoint.door import Door
from stages.parts.endpoint.endpoint import Wanted
from stages.parts.endpoint.envoy import proxying
from stages.parts.endpoint.routing import OFFERED, Backend, routing
from stages.parts.vllm.server import reserved_port
from tests import routes
from tests.routes import METHODS, UPGRADE, answered, registered, spellings, unexpected_answers

REACHED = "x-reached"


class Anything(socketserver.StreamRequestHandler):
    """Answers whatever reaches it, a WebSocket too."""

    def handle(self) -> None:
        request = self.rfile.readline()
        headers = http.client.parse_headers(self.rfile)
        self.rfile.read(int(headers.get("content-length", 0)))
        upgraded = "upgrade" in headers
        status = "101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade" if upgraded else "200 OK"
        rest = "" if upgraded else "connection: close\r\ncontent-length: 0\r\n"
        self.wfile.write(f"HTTP/1.1 {status}\r\n{REACHED}: {request.decode().split()[1]}\r\n{rest}\r\n".encode())


class Upstream(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of an Envoy as the supervisor starts it, which lets in anybody."""
    with listening(tmp_path_factory.mktemp("open")) as found:
        yield found


@contextmanager
def listening(folder: Path) -> Iterator[int]:
    backend = Backend("r1", str(folder / "vllm.sock"))
    door = Door(folder, "org/name", "")
    asked = routing(["r1"], {"r1": [backend]}, Wanted(stable="r1"))
    with Upstream(backend.socket, Anything) as upstream:
        threading.Thread(target=upstream.serve_forever, daemon=True).start()
        with (
            reserved_port("127.0.0.1", 0) as free,
            proxying(("127.0.0.1", free), asked, door, folder=folder / "files", log=folder / "log"),
        ):
            yield free
        upstream.shutdown()


def ask(port: int, method: str, path: str, *headers: str) -> tuple[int, str]:
    """The status, and the path that the server behind Envoy was asked for, if it was."""
    status, said = routes.ask(port, method, path, *headers)
    return status, said.get(REACHED, "")


def test_what_is_offered_is_what_a_model_that_generates_text_answers() -> None:
    assert set(OFFERED.items()) <= answered()
    assert ("/v1/embeddings", "POST") not in answered()


def test_what_is_offered_reaches_the_server_with_its_method_and_query(port: int) -> None:
    for path, method in OFFERED.items():
        assert ask(port, method, path) == (200, path)
        assert ask(port, method, f"{path}?x=/y") == (200, f"{path}?x=/y")


def test_no_other_route_of_vllm_is_reached_by_any_method(port: int) -> None:
    for path in set(registered()) - set(OFFERED):
        assert {ask(port, method, path) for method in METHODS} == {(404, "")}, path


def test_what_is_offered_is_reached_by_no_other_method(port: int) -> None:
    for path, offered in OFFERED.items():
        others = {ask(port, method, path) for method in (*METHODS, "get", "XPOST") if method != offered}
        assert {reached for _, reached in others} == {""}, path
        assert {status for status, _ in others} <= {400, 404}, path


@pytest.mark.parametrize("path", ["/invocations", "/metrics", *OFFERED])
def test_another_spelling_of_a_path_reaches_nothing(port: int, path: str) -> None:
    for spelled in spellings(path):
        answered = {ask(port, method, spelled) for method in ("GET", "POST")}
        assert {reached for _, reached in answered} == {""}, spelled
        assert {status for status, _ in answered} <= {400, 404}, spelled


@pytest.mark.parametrize("kind", ["websocket", "h2c", "CONNECT"])
def test_no_connection_is_turned_into_another_protocol(port: int, kind: str) -> None:
    headers = (*UPGRADE, f"Upgrade: {kind}")
    for path in ("/v1/realtime", "/metrics", *OFFERED):
        if kind == "CONNECT":
            status, reached = ask(port, "CONNECT", path)
            assert (status >= 400, reached) == (True, ""), path
        else:
            answered = {ask(port, method, path, *headers) for method in ("GET", "POST")}
            assert not {status for status, _ in answered} & {101}, path
            if path not in OFFERED:
                assert {reached for _, reached in answered} == {""}, path


def test_nobody_without_a_right_to_it_gets_any_other_answer(tmp_path: Path) -> None:
    another = add(tmp_path, Client(name="another", key_sha256="", models=("another/model",)))
    with listening(tmp_path) as found:
        assert unexpected_answers(f"http://127.0.0.1:{found}", another) == []
