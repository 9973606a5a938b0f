"""An S3 bucket for Argo's own uploads: as much of the protocol as its client needs, without checking signatures."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

import yaml

from stages.parts.cluster.kinds import Object

LOCATION = b'<?xml version="1.0"?><LocationConstraint xmlns="http://s3.amazonaws.com/doc/2006-03-01/"/>'
REFUSED = b'<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>no more today</Message></Error>'
SECRET = "reports"
DEFAULT = "workflows.argoproj.io/default-artifact-repository"


class Bucket:
    """Serves on *address*; ``kept`` has what was uploaded, by path."""

    def __init__(self, address: str) -> None:
        self.kept: dict[str, bytes] = {}
        self.refuses = False
        handler = type("Handler", (_Handler,), {"bucket": self})
        self._server = ThreadingHTTPServer((address, 0), handler)
        self.endpoint = f"{address}:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def objects(self, namespace: str) -> list[Object]:
        """What makes it the default repository of a namespace's workflows."""
        keys = {f"{name}Secret": {"name": SECRET, "key": name} for name in ("accessKey", "secretKey")}
        s3 = {"bucket": "runs", "endpoint": self.endpoint, "insecure": True, "region": "us-east-1", **keys}
        place = {"namespace": namespace}
        repositories = {"name": "artifact-repositories", "annotations": {DEFAULT: "reports"}, **place}
        return [
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": SECRET, **place},
                "stringData": {"accessKey": "tests", "secretKey": "not-checked"},
            },
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": repositories,
                "data": {"reports": yaml.safe_dump({"s3": s3})},
            },
        ]


class _Handler(BaseHTTPRequestHandler):
    bucket: Bucket
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(200, LOCATION if "location" in self.path else b"")

    def do_HEAD(self) -> None:
        self._answer(200 if self.path.strip("/") == "runs" else 404, b"")

    def do_PUT(self) -> None:
        body = self._body()
        if self.bucket.refuses:
            self._answer(403, REFUSED)
            return
        self.bucket.kept[self.path] = body
        self._answer(200, b"")

    def _body(self) -> bytes:
        """Without the signatures between the chunks, in which clients send a body over plain HTTP."""
        sent = self.rfile.read(int(self.headers["Content-Length"]))
        if "STREAMING" not in self.headers.get("x-amz-content-sha256", ""):
            return sent
        body = b""
        while sent:
            head, _, rest = sent.partition(b"\r\n")
            size = int(head.partition(b";")[0] or b"0", 16)
            body, sent = body + rest[:size], rest[size + 2 :] if size else b""
        return body

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"0"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return
