"""A stand-in for MLflow's model registry, which answers as MLflow 3.17.2 did when it was asked the same."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

API: Final = "/api/2.0/mlflow/"
FILTER: Final = re.compile(r"^name='([^']+)' AND tags\.release='([^']+)'$")
Answer = tuple[int, dict[str, Any]]


class Registry(ThreadingHTTPServer):
    """Registered models by name: their versions, and their aliases."""

    def __init__(self, refused: Answer | None) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.refused = refused
        self.requests = list[tuple[str, str, Any]]()
        """Method, path and body, or query, of each request."""
        self.logins = set[str | None]()
        self.versions = dict[str, list[dict[str, Any]]]()
        self.aliases = dict[str, dict[str, str]]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, method: str, path: str, asked: Any) -> Answer:
        if self.refused:
            return self.refused
        match method, path.removeprefix(API):
            case "POST", "registered-models/create":
                return self._create_model(**asked)
            case "POST", "model-versions/create":
                return self._create_version(**asked)
            case "POST", "registered-models/alias":
                return self._set_alias(**asked)
            case "GET", "model-versions/search":
                return self._search(**asked)
        return 404, {}

    def _create_model(self, name: str) -> Answer:
        if "/" in name or ":" in name:
            return _invalid(f"Invalid model name '{name}'. Names cannot contain '/' or ':'.")
        if name in self.versions:
            message = f"Registered Model (name={name}) already exists."
            return 400, {"error_code": "RESOURCE_ALREADY_EXISTS", "message": message}
        self.versions[name], self.aliases[name] = [], {}
        return 200, {"registered_model": {"name": name}}

    def _create_version(self, name: str, source: str, tags: list[dict[str, str]]) -> Answer:
        if name not in self.versions:
            return _absent(name)
        if urlsplit(source).scheme in ("", "file"):
            return _invalid(f"Invalid model version source: '{source}'.")
        versions = self.versions[name]
        versions.insert(0, {"name": name, "version": str(len(versions) + 1), "source": source, "tags": tags})
        return 200, {"model_version": versions[0]}

    def _search(self, filter: str) -> Answer:  # noqa: A002
        match = FILTER.match(filter)
        assert match, filter
        tag = {"key": "release", "value": match[2]}
        found = [version for version in self.versions.get(match[1], []) if tag in version["tags"]]
        return 200, {"model_versions": found} if found else {}

    def _set_alias(self, name: str, alias: str, version: str) -> Answer:
        if name not in self.versions:
            return _absent(name)
        self.aliases[name][alias] = version
        return 200, {}


def _invalid(message: str) -> Answer:
    return 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": message}


def _absent(name: str) -> Answer:
    message = f"Registered Model with name={name} not found"
    return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": message}


class Asked(BaseHTTPRequestHandler):
    server: Registry

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def do_GET(self) -> None:
        self._answer({key: value for key, (value,) in parse_qs(urlsplit(self.path).query).items()})

    def _answer(self, asked: Any) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append((self.command, path, asked))
        self.server.logins.add(self.headers["Authorization"])
        status, document = self.server.answer(self.command, path, asked)
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def model_registry(refused: Answer | None = None) -> Iterator[Registry]:
    """Serve a registry; one that refuses gives every request the same answer."""
    with Registry(refused) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
