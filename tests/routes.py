"""Every route that vLLM's application registers, and what an endpoint answers there to those who may not ask."""

from __future__ import annotations

import functools
import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from stages.parts.endpoint.routing import HEALTH, OFFERED

METHODS: Final = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")
UPGRADE: Final = (
    "Connection: Upgrade",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    "Sec-WebSocket-Version: 13",
)
DEVELOPMENT: Final = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
REGISTERED: Final = """
import json, typing
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.tasks import SupportedTask
from vllm.utils.argparse_utils import FlexibleArgumentParser

def names(kind):
    return [kind] if isinstance(kind, str) else [each for part in typing.get_args(kind) for each in names(part)]

def paths(routes, prefix=""):
    for route in routes:
        yield type(route).__name__, prefix + getattr(route, "path", "")
        yield from paths(getattr(route, "routes", None) or [], prefix + getattr(route, "path", ""))

def methods(route):
    return [(getattr(route, "path", ""), method) for method in getattr(route, "methods", None) or ()]

arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
every = list(paths(build_app(arguments, tuple(names(SupportedTask))).routes))
generating = [answered for route in build_app(arguments, ("generate",)).routes for answered in methods(route)]
print(json.dumps([every, generating]))
"""


@functools.cache
def _routes() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The kinds and paths of all of vLLM's routes, and the paths and methods of those for models that generate."""
    command = [sys.executable, "-c", REGISTERED]
    said = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | DEVELOPMENT)
    assert said.returncode == 0, said.stderr[-2000:]
    every, generating = json.loads(said.stdout.splitlines()[-1])
    return every, generating


def answered() -> set[tuple[str, str]]:
    """The paths and methods that the installed vLLM answers for a model that generates text."""
    return {(path, method) for path, method in _routes()[1]}


def registered() -> tuple[str, ...]:
    """The paths of all routes of the installed vLLM: for every kind of model, in its development mode, with its
    documentation, its mounts and its WebSockets."""
    routes, _ = _routes()
    assert {"APIRoute", "Route", "Mount", "APIWebSocketRoute"} <= {kind for kind, _ in routes}
    below = [f"{path}{rest}" for kind, path in routes if kind == "Mount" for rest in ("/", "/x")]
    found = {path.replace("{", "").replace("}", "") for _, path in routes}
    assert {"/invocations", "/docs/oauth2-redirect", "/metrics", "/v1/realtime", "/collective_rpc"} <= found
    return tuple(sorted({*found, *below, "/", "/v1", "/v1/", "/static/index.html"}))


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


def ask(port: int, method: str, path: str, *headers: str) -> tuple[int, Mapping[str, str]]:
    """The status and the headers. The path is sent as it is."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Length: 0", *headers, "", ""]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall("\r\n".join(lines).encode())
        reply = http.client.HTTPResponse(connection, method=method)
        reply.begin()
        return reply.status, {name.lower(): value for name, value in reply.headers.items()}


def unexpected_answers(url: str, another: str) -> list[str]:
    """What the endpoint at *url* answers to those who may not ask it, other than 404 to what is not offered, and 401 or
    403 to what is and to a WebSocket: by every method and by other spellings.

    Args:
        another: the key of a client who may not ask this model.
    """
    port, wrong = int(urlsplit(url).port or 0), []
    refusals = {"": 401, "Authorization: Bearer of-nobody": 401, f"Authorization: Bearer {another}": 403}
    for header, refused in refusals.items():
        headers = [header] if header else []
        for path in {*registered(), *OFFERED}:
            expected = {method: _expected(path, method, refused) for method in METHODS}
            wrong += _others(port, path, expected, headers)
            wrong += _others(port, path, {"GET": 403}, [*headers, *UPGRADE, "Upgrade: websocket"])
    for path in {*registered(), *OFFERED}:
        for spelled in spellings(path):
            if spelled not in OFFERED:
                wrong += _others(port, spelled, {"GET": 404, "POST": 404}, [f"Authorization: Bearer {another}"])
    return wrong


def _expected(path: str, method: str, refused: int) -> int:
    if OFFERED.get(path) != method:
        return 404
    return 200 if path == HEALTH else refused


def _others(port: int, path: str, expected: Mapping[str, int], headers: Iterable[str]) -> list[str]:
    answered = {method: ask(port, method, path, *headers)[0] for method in expected}
    also: dict[Any, int] = {404: 400}  # Envoy's own for what is no path
    return [
        f"{method} {path}: {status}"
        for method, status in answered.items()
        if status not in (expected[method], also.get(expected[method]))
    ]
