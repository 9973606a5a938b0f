"""The real receiver as a process, an EventSource to forward to, and webhooks as the registries document them."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

SECRET = "the-webhooks-own-secret"
HARBOR_TOKEN = "the-token-that-harbor-sends"
TOKEN = "the-event-sources-token"
COMMIT = "575db8b7a51b6f85eb06eee540738584589f131c"
PUSH: dict[str, Any] = {
    "event": {"action": "update", "scope": "repo.content"},
    "repo": {
        "type": "model",
        "name": "some-user/some-repo",
        "id": "6366c000a2abcdf2fd69a080",
        "private": False,
        "url": {
            "web": "https://huggingface.co/some-user/some-repo",
            "api": "https://huggingface.co/api/models/some-user/some-repo",
        },
        "headSha": "c379e821c9c95d613899e8c4343e4bfee2b0c600",
        "owner": {"id": "61d2000c3c2083e1c08af22d"},
    },
    "updatedRefs": [
        {"ref": "refs/tags/test", "oldSha": None, "newSha": COMMIT},
        {"ref": "refs/heads/main", "oldSha": "ce9a4674fa833a68d5a73ec355f0ea95eedd60b7", "newSha": COMMIT},
    ],
    "webhook": {"id": "6390e855e30d9209411de93b", "version": 3},
}
"""The values of https://huggingface.co/docs/hub/webhooks, the tag before the branch."""
HARBOR_PUSH: dict[str, Any] = {
    "type": "PUSH_ARTIFACT",
    "occur_at": 1680501893,
    "operator": "robot$models+push",
    "event_data": {
        "resources": [
            {
                "digest": "sha256:954b378c375d852eb3c63ab88978f640b4348b01c1b3456a024a81536dafbbf4",
                "tag": COMMIT,
                "resource_url": f"harbor.example.com/models/some-user/some-repo:{COMMIT}",
            }
        ],
        "repository": {
            "date_created": 1680501893,
            "name": "some-user/some-repo",
            "namespace": "models",
            "repo_full_name": "models/some-user/some-repo",
            "repo_type": "private",
        },
    },
}
"""The example of https://goharbor.io/docs/latest/working-with-projects/project-configuration/configure-webhooks, with
the names of a model."""
WEBHOOKS = {"huggingface": PUSH, "harbor": HARBOR_PUSH}
DIGEST = hashlib.sha256(f'["","some-user/some-repo","{COMMIT}"]'.encode()).hexdigest()


def normalized(provider: str) -> dict[str, str]:
    """What the receiver makes of both webhooks above."""
    return {
        "provider": provider,
        "name": f"slipway-push-{DIGEST[:16]}",
        "model": "some-user/some-repo",
        "revision": COMMIT,
        "model_directory": "some-user--some-repo",
        "resolve_key": DIGEST,
    }


NO_MAIN = "updatedRefs does not name refs/heads/main"
NOT_OURS: dict[str, tuple[dict[str, Any], str]] = {
    "a data set": ({"repo.type": "dataset"}, "repo.type is 'dataset'"),
    "a space": ({"repo.type": "space"}, "repo.type is 'space'"),
    "another branch": ({"updatedRefs": [{"ref": "refs/heads/dev", "oldSha": None, "newSha": COMMIT}]}, NO_MAIN),
    "a tag": ({"updatedRefs": [{"ref": "refs/tags/v1", "oldSha": None, "newSha": COMMIT}]}, NO_MAIN),
    "a pull request": ({"updatedRefs": [{"ref": "refs/pr/7", "oldSha": None, "newSha": COMMIT}]}, NO_MAIN),
    "a branch with a name like main": ({"updatedRefs": [{"ref": "refs/heads/main2", "newSha": COMMIT}]}, NO_MAIN),
    "main deleted": ({"updatedRefs": [{"ref": "refs/heads/main", "oldSha": COMMIT, "newSha": None}]}, "was deleted"),
    "no refs": ({"updatedRefs": {}}, NO_MAIN),
    "refs that are no objects": ({"updatedRefs": ["refs/heads/main", None]}, NO_MAIN),
    "a discussion": ({"event.scope": "discussion"}, "event.scope is 'discussion'"),
    "a change of settings": ({"event.scope": "repo.config"}, "event.scope is 'repo.config'"),
    "a scope that only looks alike": ({"event.scope": "repoXcontent"}, "event.scope is 'repoXcontent'"),
    "a line break after the scope": ({"event.scope": "repo.content\n"}, "event.scope is"),
    "a deleted repository": ({"event.action": "delete"}, "event.action is 'delete'"),
    "a name that leads elsewhere": ({"repo.name": "../../etc/passwd"}, "'../../etc/passwd' is not a model's name"),
    "a name with a line break": ({"repo.name": "org/name\n"}, "'org/name\\n' is not a model's name"),
    "a name with the separator of directories": ({"repo.name": "some-user/a--b"}, "is not a model's name"),
    "a name that is a list": ({"repo.name": ["some-user/some-repo"]}, "repo.name is not text"),
    "a name without an owner": ({"repo.name": "gpt2"}, "without an owner"),
    "a commit that is a branch": (
        {"updatedRefs": [{"ref": "refs/heads/main", "newSha": "main"}]},
        "'main' is not a commit",
    ),
    "a commit with a line break": (
        {"updatedRefs": [{"ref": "refs/heads/main", "newSha": COMMIT + "\n"}]},
        "not a commit",
    ),
    "a repo that is a list": ({"repo": []}, "repo.type is missing"),
}
"""Changes to PUSH, and the reason for which the result starts no run."""
NOT_HARBORS: dict[str, tuple[dict[str, Any], str]] = {
    "the example of the documentation": (
        {
            "event_data.repository": {"name": "alpine", "namespace": "harbor", "repo_full_name": "harbor/alpine"},
            "event_data.resources": [
                {"tag": "sha256:954b378c375d852eb3c63ab88978f640b4348b01c1b3456a024a81536dafbbf4"}
            ],
        },
        "event_data.repository.namespace is 'harbor'",
    ),
    "a pull": ({"type": "PULL_ARTIFACT"}, "type is 'PULL_ARTIFACT'"),
    "a deletion": ({"type": "DELETE_ARTIFACT"}, "type is 'DELETE_ARTIFACT'"),
    "another project": ({"event_data.repository.namespace": "library"}, "event_data.repository.namespace is 'library'"),
    "a repository that names no model": ({"event_data.repository.name": "alpine"}, "without an owner"),
    "a deeper repository": ({"event_data.repository.name": "a/b/c"}, "'a/b/c' is not a model's name"),
    "a tag that is no commit": ({"event_data.resources": [{"tag": "latest"}]}, "'latest' is not a commit"),
    "no artifact": ({"event_data.resources": []}, "event_data.resources.0.tag is missing"),
    "no event data": ({"event_data": None}, "event_data.repository.namespace is missing"),
}
"""The same of HARBOR_PUSH."""
IGNORED = [
    *(pytest.param("huggingface", changes, reason, id=case) for case, (changes, reason) in NOT_OURS.items()),
    *(pytest.param("harbor", changes, reason, id=f"harbor: {case}") for case, (changes, reason) in NOT_HARBORS.items()),
]


def changed(payload: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """*payload* with other values at some paths."""
    whole = copy.deepcopy(payload)
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = whole
        for part in parents:
            place = place[part]
        place[last] = value
    return whole


def push(name: str = "some-user/some-repo", commit: str = COMMIT) -> dict[str, Any]:
    return changed(PUSH, {"repo.name": name, "updatedRefs": [{"ref": "refs/heads/main", "newSha": commit}]})


@dataclass
class EventSource:
    """Keeps what Argo Events' webhook would put into its bus, and asks for the token as that does."""

    token: str = TOKEN
    statuses: list[int] = field(default_factory=list)
    """The answers to the next requests. Then all are answered with 200."""
    hold: threading.Event | None = None
    """If set, requests wait for this event."""
    events: list[Any] = field(default_factory=list)
    seen: list[dict[str, str]] = field(default_factory=list)
    """The headers of each request."""
    reached: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    def __post_init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/pushes"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        source = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                source.seen.append({name.lower(): value for name, value in self.headers.items()})
                source.reached.set()
                if source.hold:
                    source.hold.wait(60)
                status = source.statuses.pop(0) if source.statuses else 200
                if self.headers["Authorization"] != f"Bearer {source.token}":
                    status = 401
                if status == 200:
                    source.events.append(json.loads(content))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        return Handler


@dataclass
class Receiver:
    process: subprocess.Popen[str]
    url: str
    lines: list[str]

    def post(
        self, payload: Any, provider: str = "huggingface", *, secret: str | None = None, **options: Any
    ) -> httpx.Response:
        """Post as *provider* does, with its own secret unless another is given."""
        if provider == "harbor":
            headers = {"Authorization": f"Bearer {secret or HARBOR_TOKEN}"}
        else:
            headers = {"X-Webhook-Secret": secret or SECRET}
        return self.request(provider, headers=headers, json=payload, **options)

    def request(self, provider: str, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/{provider}", timeout=60, trust_env=False, **options)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, trust_env=False)

    def said(self, text: str) -> str:
        """Wait for a line of its log with *text*, and return the first one."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if found := next((line for line in self.lines if text in line), None):
                return found
            time.sleep(0.01)
        raise AssertionError(f"{text!r} was not said, but {self.lines}")


def environment(**variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLIPWAY_")}
    secrets = {
        "SLIPWAY_WEBHOOK_SECRET": SECRET,
        "SLIPWAY_HARBOR_TOKEN": HARBOR_TOKEN,
        "SLIPWAY_EVENTS_TOKEN": TOKEN,
    }
    return clean | secrets | variables


@contextlib.contextmanager
def receiver(
    forward_to: str, *arguments: str, allow: str = "org/one some-user/*", **variables: str
) -> Iterator[Receiver]:
    """``slipway receive`` on a free port. It must end with exit code 0 and log none of its secrets."""
    command = [sys.executable, "-m", "pipeline", "receive", "--port", "0", "--forward-to", forward_to, *arguments]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment(SLIPWAY_ALLOW=allow, **variables)
    )
    lines: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
    reader.start()
    made = Receiver(process, "", lines)
    try:
        listening = re.search(r"listening on (\S+)", made.said("listening on"))
        assert listening
        made.url = listening[1]
        yield made
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)
        reader.join(60)
        process.stderr.close()
    assert process.returncode == 0
    assert not [line for line in lines for word in (SECRET, HARBOR_TOKEN, TOKEN, "Traceback") if word in line]


def written(folder: Path, payload: Any) -> Path:
    path = folder / "event.json"
    path.write_text(json.dumps(payload))
    return path
