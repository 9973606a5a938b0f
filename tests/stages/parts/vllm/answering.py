"""A server that gives the answers of a test, over real HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

Asked = dict[str, Any]
Answer = Callable[[str, Asked], tuple[int, Any]]
"""From the path and the request's JSON to a status and a body: JSON, or bytes as they are."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    """Otherwise some of many clients at once wait a second for their connection."""


class Answering:
    """Serves while the block runs; ``asked`` holds the requests in order."""

    def __init__(self, answer: Answer) -> None:
        asked = self.asked = list[Asked]()
        headers = self.headers = list[dict[str, str]]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked.append(body)
                headers.append(dict(self.headers))
                status, content = answer(self.path, body)
                sent = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
