"""A web hook that keeps what is posted to it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hook(ThreadingHTTPServer):
    def __init__(self, status: int, host: str) -> None:
        super().__init__((host, 0), Receiver)
        self.host, self.status, self.posted = host, status, list[dict[str, Any]]()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.server_port}/services/T0/B0/secret"


class Receiver(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        self.server.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hook(status: int = 200, host: str = "127.0.0.1") -> Iterator[Hook]:
    with Hook(status, host) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
