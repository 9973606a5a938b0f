"""The part of the Hub's HTTP API with which huggingface_hub finds, downloads and uploads a model, and a file of a data
set, with faults on request.

It does not offer Xet, so every download uses plain HTTP, and so does an upload with ``HF_HUB_DISABLE_XET=1``.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub import uploads
from tests.hub.repository import LFS_THRESHOLD_BYTES, Blob, Repository, files_below

REPO: Final = r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)"
INFO: Final = re.compile(rf"/api/models/{REPO}(?:/revision/(?P<revision>[^/]+))?")
TREE: Final = re.compile(rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?")
REFS: Final = re.compile(rf"/api/models/{REPO}/refs")
RESOLVE: Final = re.compile(rf"/(?P<cdn>cdn/)?(?:datasets/)?{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
RANGE: Final = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass
class HubRequest:
    """A request and its response. ``path`` is unquoted and without the query; ``sent`` counts the bytes of the body."""

    method: str
    path: str
    query: str
    range: str | None
    authorized: bool
    status: int = 0
    sent: int = 0


@dataclass
class Fault:
    """A fault for the next *times* requests (None: all) whose path matches *pattern*."""

    pattern: str
    times: int | None
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    reset: bool = False
    corrupt: bool = False
    shorter_by: int = 0
    bytes_per_s: float | None = None
    stall_after: int | None = None


NO_FAULT: Final = Fault("", times=0)


class HubServer:
    """Serves repositories in a background thread while the ``with`` block lasts.

    The methods that cause faults match their *pattern*, as a shell does, with a file's path in its repository or with
    the path of the URL.
    """

    def __init__(
        self, root: Path | None = None, *, address: str = "127.0.0.1", port: int = 0, cdn: bool = False
    ) -> None:
        """*cdn*: redirect downloads of LFS files to another host name, as the Hub does."""
        self.repositories: dict[str, Repository] = {}
        self.requests: list[HubRequest] = []
        self.tokens: dict[str, set[str]] = {}
        self.uploaded: dict[str, bytes] = {}
        self.cdn = cdn
        self.healed = threading.Event()
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer((address, port), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self.url = f"http://{address}:{self.port}"
        if root is not None:
            self.add_root(root)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def serve_forever(self) -> None:
        self._server.serve_forever()

    def add_root(self, root: Path) -> None:
        """Add every ``<org>/<name>/`` with files as a branch main, every ``<org>/<name>/<revision>/`` as a branch."""
        for folder in sorted(path for path in root.glob("*/*") if path.is_dir()):
            name = f"{folder.parent.name}/{folder.name}"
            if any(path.is_file() for path in folder.iterdir()):
                self.add_repo(name, folder)
            else:
                for branch in sorted(path for path in folder.iterdir() if path.is_dir()):
                    self.add_repo(name, branch, revision=branch.name)

    def add_repo(
        self,
        name: str,
        files: Mapping[str, bytes | Path] | Path,
        *,
        revision: str = "main",
        private: bool = False,
        gated: bool = False,
        license: str | None = None,  # noqa: A002 — its name on the model card
        lfs_threshold: int = LFS_THRESHOLD_BYTES,
    ) -> str:
        """Put *files* on a branch of a new or existing repository, a model's or a data set's; return the commit."""
        content = dict(files_below(files) if isinstance(files, Path) else files)
        if license is not None:
            content["README.md"] = f"---\nlicense: {license}\n---\n# {name}\n".encode()
        repository = self.repositories.setdefault(name, Repository(name))
        repository.private, repository.gated = private, gated
        return repository.commit(content, revision, lfs_threshold)

    def pin(self, name: str, commit: str, files: Mapping[str, bytes | Path]) -> None:
        """Put *files* at the commit of this name, which is not what a commit of theirs would be called."""
        repository = self.repositories.setdefault(name, Repository(name))
        repository.commits[commit] = {path: Blob(path, content) for path, content in files.items()}

    def tag(self, name: str, tag: str, commit: str) -> None:
        self.repositories[name].tags[tag] = commit

    def allow(self, token: str, *repositories: str) -> None:
        """Let *token* read these private and gated repositories."""
        self.tokens[token] = set(repositories)

    def cut(self, pattern: str, after: int, *, times: int | None = 1, reset: bool = False) -> None:
        """Close the connection after *after* bytes of each response; with *reset*, as a crashed machine does."""
        self._faults.append(Fault(pattern, times, cut_after=after, reset=reset))

    def corrupt(self, pattern: str, *, times: int | None = 1) -> None:
        """Alter the first byte of each block of the response."""
        self._faults.append(Fault(pattern, times, corrupt=True))

    def shorten(self, pattern: str, by: int, *, times: int | None = None) -> None:
        """Respond as if the file were *by* bytes shorter than the listing says."""
        self._faults.append(Fault(pattern, times, shorter_by=by))

    def slow(self, pattern: str, bytes_per_s: float, *, times: int | None = None) -> None:
        self._faults.append(Fault(pattern, times, bytes_per_s=bytes_per_s))

    def stall(self, pattern: str, after: int, *, times: int | None = None) -> None:
        """Stop after *after* bytes of each response, until ``heal``."""
        self.healed.clear()
        self._faults.append(Fault(pattern, times, stall_after=after))

    def fail(self, pattern: str, status: int, *, times: int | None = 1, retry_after: int | None = None) -> None:
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        self._faults.append(Fault(pattern, times, status=status, headers=headers))

    def redirect(self, pattern: str, where: str, *, times: int | None = 1) -> None:
        self._faults.append(Fault(pattern, times, status=302, headers={"Location": where}))

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()
            self.healed.set()

    def requests_for(self, pattern: str, method: str = "GET") -> list[HubRequest]:
        with self._lock:
            return [each for each in self.requests if each.method == method and _matches(pattern, each.path)]

    def fault_for(self, path: str, *, content: bool) -> Fault:
        """The first fault that applies to a path, for the whole response or for its *content*; counts it down."""
        with self._lock:
            for fault in self._faults:
                if fault.times != 0 and (fault.status is None) is content and _matches(fault.pattern, path):
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        return NO_FAULT

    def log(self, request: HubRequest) -> None:
        with self._lock:
            self.requests.append(request)


def _matches(pattern: str, path: str) -> bool:
    found = RESOLVE.fullmatch(path)
    return fnmatch(path, pattern) or (found is not None and fnmatch(found["path"], pattern))


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Print nothing: ``HubServer.requests`` has the requests."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.request_log = HubRequest(
            self.command, path, url.query, self.headers.get("Range"), "Authorization" in self.headers
        )
        self.hub.log(self.request_log)
        fault = self.hub.fault_for(path, content=False)
        try:
            if fault.status is not None:
                self._send(fault.status, b"", fault.headers)
            elif self.command in ("POST", "PUT"):
                self._take(path)
            else:
                self._route(url.path, parse_qs(url.query))
        except _Refused as refusal:
            body = json.dumps({"error": str(refusal)}).encode()
            self._send(refusal.status, body, refusal.headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _take(self, path: str) -> None:
        """Answer an upload, for which the Hub wants a token, but for the file that it has named a place for itself."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if token not in self.hub.tokens and self.command == "POST":
            raise _Refused(401, "", "Invalid username or password.")
        status, document = uploads.answer(self.hub, token, path, body)
        self._send(status, json.dumps(document).encode(), {"Content-Type": "application/json; charset=utf-8"})

    def _route(self, path: str, query: dict[str, list[str]]) -> None:
        if found := RESOLVE.fullmatch(path):
            repository, commit = self._revision(
                found["repo"], found["revision"], content=True, signed=bool(found["cdn"])
            )
            self._resolve(repository, commit, unquote(found["path"]), bool(found["cdn"]))
        elif found := TREE.fullmatch(path):
            repository, commit = self._revision(found["repo"], found["revision"])
            recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
            entries = repository.tree(commit, unquote(found["folder"] or ""), recursive=recursive)
            if entries is None:
                raise _Refused(404, "EntryNotFound", f"{found['folder']} does not exist on {found['revision']!r}")
            self._send_json(entries)
        elif found := REFS.fullmatch(path):
            self._send_json(self._repository(found["repo"]).refs())
        elif found := INFO.fullmatch(path):
            repository, commit = self._revision(found["repo"], found["revision"] or "main")
            self._send_json(repository.info(commit, blobs="blobs" in query))
        else:
            raise _Refused(404, "", "Sorry, we can't find the page you are looking for.")

    def _revision(
        self, repo: str, revision: str, *, content: bool = False, signed: bool = False
    ) -> tuple[Repository, str]:
        """*signed*: the address comes from a redirect of the Hub and needs no token."""
        repository = self.hub.repositories[repo] if signed else self._repository(repo, content=content)
        name = unquote(revision)
        commit = repository.find(name)
        if commit is None:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {name}")
        return repository, commit

    def _repository(self, name: str, *, content: bool = False) -> Repository:
        """A repository that the client may read. A gated one is visible to all, but its *content* only with access."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            raise _Refused(401, "", "Invalid credentials in Authorization header")
        repository = self.hub.repositories.get(name)
        allowed: Collection[str] = self.hub.tokens.get(token, ())
        if repository is None or (repository.private and name not in allowed):
            # Without a login, a private repository looks like a missing one.
            if token:
                raise _Refused(404, "RepoNotFound", "Repository not found")
            raise _Refused(401, "RepoNotFound", "Invalid username or password.")
        if content and repository.gated and name not in allowed:
            message = f"Access to model {name} is restricted. You must have access to it and be authenticated."
            raise _Refused(403 if token else 401, "GatedRepo", message)
        return repository

    def _resolve(self, repository: Repository, commit: str, path: str, from_cdn: bool) -> None:
        blob = repository.commits[commit].get(path)
        if blob is None:
            raise _Refused(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes"}
        if blob.is_lfs and not from_cdn:
            headers |= {"X-Linked-Size": str(blob.size), "X-Linked-ETag": f'"{blob.sha256}"'}
            if self.hub.cdn:
                where = f"http://localhost:{self.hub.port}/cdn{urlsplit(self.path).path}"
                self._send(302, b"", headers | {"Location": where})
                return
        fault = self.hub.fault_for(self.request_log.path, content=True) if self.command == "GET" else NO_FAULT
        size = blob.size - fault.shorter_by
        asked = RANGE.fullmatch(self.headers.get("Range", ""))
        start, end = (int(asked[1]), min(int(asked[2] or size) + 1, size)) if asked else (0, size)
        if asked and start >= size:
            self._send(416, b"", headers | {"Content-Range": f"bytes */{size}"})
            return
        if asked:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        self._start(206 if asked else 200, end - start, headers)
        if self.command == "GET":
            self._send_content(blob, start, end, fault)

    def _send_content(self, blob: Blob, start: int, end: int, fault: Fault) -> None:
        last = end if fault.cut_after is None else min(end, start + fault.cut_after)
        for block in blob.read(start, last):
            if fault.corrupt:
                block = bytes([block[0] ^ 0xFF]) + block[1:]
            if fault.bytes_per_s is not None:
                time.sleep(len(block) / fault.bytes_per_s)
            if fault.stall_after is not None and self.request_log.sent >= fault.stall_after:
                self.hub.healed.wait()
            self.wfile.write(block)
            self.request_log.sent += len(block)
        if last < end:
            self._hang_up(reset=fault.reset)

    def _hang_up(self, *, reset: bool) -> None:
        self.close_connection = True
        if reset:  # closing a socket that lingers for 0 seconds sends RST
            while self._unread():  # the kernel would discard it
                time.sleep(0.01)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        else:
            self.connection.shutdown(socket.SHUT_RDWR)

    def _unread(self) -> bool:
        """Whether the kernel still has bytes that the client, on this machine, has not read."""
        ends = {f"{port:04X}" for _, port in (self.connection.getsockname(), self.connection.getpeername())}
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, remote, _, queues, *_ = line.split()
            if {local[-4:], remote[-4:]} == ends and queues != "00000000:00000000":
                return True
        return False

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json; charset=utf-8"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self._start(status, len(body), headers)
        if self.command != "HEAD":
            self.wfile.write(body)
            self.request_log.sent += len(body)

    def _start(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.request_log.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
