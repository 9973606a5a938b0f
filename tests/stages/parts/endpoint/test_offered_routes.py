"""Which requests get past Envoy: it stands before a server that would answer every one of them."""

from __future__ import annotations

import http.client
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stages.parts.endpoint.clusters import Backend, plan
from stages.parts.endpoint.door import Door
from stages.parts.endpoint.envoy import proxying
from stages.parts.endpoint.offered import OFFERED
from stages.parts.engine.server import reserved_port

REACHED = "x-reached"
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")
OF_VLLM = (
    "/invocations",
    "/ping",
    "/metrics",
    "/metrics/",
    "/metrics/x",
    "/docs",
    "/docs/oauth2-redirect",
    "/redoc",
    "/openapi.json",
    "/load",
    "/version",
    "/server_info",
    "/tokenize",
    "/detokenize",
    "/classify",
    "/pooling",
    "/score",
    "/rerank",
    "/generative_scoring",
    "/inference/v1/generate",
    "/cohere/v2/chat",
    "/v2/embed",
    "/v1/rerank",
    "/v1/score",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/responses/1",
    "/v1/responses/1/cancel",
    "/v1/models/org/name",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/realtime",
    "/reset_prefix_cache",
    "/collective_rpc",
    "/sleep",
    "/wake_up",
    "/pause",
    "/update_weights",
    "/abort_requests",
    "/start_profile",
    "/static/index.html",
    "/scale_elastic_ep",
    "/fault_tolerance/status",
)
"""The routes of vLLM 0.32 for every kind of model, its development mode, its mounts and its WebSocket."""


def spellings(path: str) -> list[str]:
    """What some servers take for *path*, or for a way from it to another one."""
    encoded = path[0] + path[1:].replace("/", "%2F")
    letter = f"{path[:-1]}%{ord(path[-1]):02x}"
    spelled = [
        f"/{path}",
        path.replace("/", "//"),
        encoded,
        encoded.replace("%2F", "%5c"),
        letter,
        f"{path}/",
        f"{path}//",
        f"{path}/.",
        f"/.{path}",
        f"/x/..{path}",
        f"/x/%2e%2e{path}",
        f"/v1/models/..{path}",
        f"{path}/../../invocations",
        f"{path}/..%2f..%2finvocations",
        f"{path};x",
        f"{path}%00",
        f"{path}%20",
        path.upper(),
        f"http://localhost/x{path}",
    ]
    return [each for each in spelled if each != path]


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
    """The port of an Envoy as the supervisor starts it."""
    folder: Path = tmp_path_factory.mktemp("envoy")
    backend = Backend("r1", str(folder / "vllm.sock"))
    door = Door(folder, "org/name", "")
    asked = plan(["r1"], {"r1": [backend]}, "r1", None, 0, None)
    with Upstream(backend.socket, Anything) as upstream:
        threading.Thread(target=upstream.serve_forever, daemon=True).start()
        with (
            reserved_port("127.0.0.1", 0) as free,
            proxying(("127.0.0.1", free), asked, door, folder=folder / "files", log=folder / "log"),
        ):
            yield free
        upstream.shutdown()


def ask(port: int, method: str, path: str, *headers: str) -> tuple[int, str]:
    """The status, and the path that the server behind Envoy was asked for, if it was. The path is sent as it is."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Length: 0", *headers, "", ""]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall("\r\n".join(lines).encode())
        reply = http.client.HTTPResponse(connection, method=method)
        reply.begin()
        return reply.status, reply.headers.get(REACHED, "")


def test_what_is_offered_reaches_the_server_with_its_method_and_query(port: int) -> None:
    for path, method in OFFERED.items():
        assert ask(port, method, path) == (200, path)
        assert ask(port, method, f"{path}?x=/y") == (200, f"{path}?x=/y")


def test_no_other_route_of_vllm_is_reached_by_any_method(port: int) -> None:
    for path in ("/", "/v1", "/v1/", *OF_VLLM):
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
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    headers = ("Connection: Upgrade", f"Upgrade: {kind}", key, "Sec-WebSocket-Version: 13")
    for path in ("/v1/realtime", "/metrics", *OFFERED):
        if kind == "CONNECT":
            status, reached = ask(port, "CONNECT", path)
            assert (status >= 400, reached) == (True, ""), path
        else:
            answered = {ask(port, method, path, *headers) for method in ("GET", "POST")}
            assert not {status for status, _ in answered} & {101}, path
            if path not in OFFERED:
                assert {reached for _, reached in answered} == {""}, path
