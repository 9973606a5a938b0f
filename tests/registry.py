"""A registry of images in memory, whose answers are those that github.com/distribution/distribution 3.0.0 was seen to
give to skopeo."""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

ACCOUNT = base64.b64encode(b"ci:secret").decode()
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Registry(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *, wants_login: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.wants_login, self.host = wants_login, f"127.0.0.1:{self.server_port}"
        self.content: dict[str, bytes] = {}
        """Each blob and manifest, by its path, such as ``/v2/org/name/manifests/3``."""
        self.uploaded = b""
        self.answers, self.asked = threading.Event(), threading.Event()
        self.answers.set()


class Handler(BaseHTTPRequestHandler):
    server: Registry
    protocol_version = "HTTP/1.1"

    def respond(self) -> None:
        url, body = urlsplit(self.path), self.body()
        self.server.asked.set()
        self.server.answers.wait()
        status, content, headers = self.answer(url.path, parse_qs(url.query), body)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        with suppress(ConnectionError):  # the client was ended
            self.end_headers()
            self.wfile.write(content if self.command != "HEAD" else b"")

    do_GET = do_HEAD = do_POST = do_PATCH = do_PUT = respond  # noqa: N815

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def answer(self, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        server = self.server
        if server.wants_login and self.headers.get("Authorization") != f"Basic {ACCOUNT}":
            refusal = b'{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}'
            return 401, refusal, {"WWW-Authenticate": 'Basic realm="tests"', "Content-Type": "application/json"}
        if self.command in ("POST", "PATCH"):
            server.uploaded = body
            return 202, b"", {"Location": "/v2/org/name/blobs/uploads/1"}
        if self.command == "PUT":
            body = body or server.uploaded
            digest = f"sha256:{hashlib.sha256(body).hexdigest()}"
            if query.get("digest", [digest]) != [digest]:
                return 400, b"", {}
            folder = path.rpartition("/")[0].replace("blobs/uploads", "blobs")
            server.content |= {f"{folder}/{digest}": body} | ({} if "digest" in query else {path: body})
            return 201, b"", {"Docker-Content-Digest": digest}
        if path == "/v2/":
            return 200, b"{}", {}
        if path not in server.content:
            code = "MANIFEST_UNKNOWN" if "/manifests/" in path else "BLOB_UNKNOWN"
            return 404, f'{{"errors":[{{"code":"{code}","message":"unknown"}}]}}'.encode(), {}
        return (
            200,
            server.content[path],
            {"Content-Type": MANIFEST if "/manifests/" in path else "application/octet-stream"},
        )

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def registry(*, wants_login: bool = False) -> Iterator[Registry]:
    with Registry(wants_login=wants_login) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.answers.set()
        server.shutdown()
