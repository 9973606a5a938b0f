"""How the Hub answers huggingface_hub when it makes a repository, a branch and a commit; without Xet."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from tests.hub.repository import LFS_THRESHOLD_BYTES, Blob, Repository

if TYPE_CHECKING:
    from tests.hub.server import HubServer

OF_REPOSITORY: Final = re.compile(
    r"(?:/api/models)?/(?P<repo>[\w.-]+/[\w-]+)(?:\.git/info)?/(?P<what>\w+)/(?P<rest>.+)"
)


def answer(hub: HubServer, token: str, path: str, body: bytes) -> tuple[int, Any]:
    """The status and the document that answer a POST, or a PUT of an LFS file."""
    if path.startswith("/uploads/"):
        hub.uploaded[path.rpartition("/")[2]] = body
        return 200 if hashlib.sha256(body).hexdigest() == path.rpartition("/")[2] else 400, {}
    if path == "/api/validate-yaml":
        return 200, {"errors": [], "warnings": []}
    lines = [json.loads(line) for line in body.splitlines()]
    if path == "/api/repos/create":
        name = f"{lines[0]['organization']}/{lines[0]['name']}"
        if name in hub.repositories:
            return 409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"}
        hub.add_repo(name, {".gitattributes": b""}, private=lines[0]["visibility"] == "private")
        hub.tokens[token].add(name)
        return 200, {"url": f"{hub.url}/{name}"}
    asked = OF_REPOSITORY.fullmatch(path)
    assert asked is not None, path
    repository, rest = hub.repositories[asked["repo"]], unquote(asked["rest"])
    if asked["repo"] not in hub.tokens[token]:
        return 403, {"error": "Forbidden: you must use a token with write access to this repo"}
    if asked["what"] == "branch":
        is_new = rest not in repository.branches
        repository.branches.setdefault(rest, repository.branches["main"])
        return 201 if is_new else 409, {}
    if asked["what"] == "preupload":
        modes = {each["path"]: Blob(each["path"], bytes(each["size"])).is_lfs for each in lines[0]["files"]}
        listed = [{"path": path, "uploadMode": "lfs" if is_lfs else "regular"} for path, is_lfs in modes.items()]
        return 200, {"files": [each | {"shouldIgnore": False} for each in listed]}
    if asked["what"] == "lfs":
        objects = [
            each | {"actions": {"upload": {"href": f"{hub.url}/uploads/{each['oid']}"}}} for each in lines[0]["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}
    assert asked["what"] == "commit", path
    commit = _commit(hub, repository, rest, lines)
    return 200, {"commitOid": commit, "commitUrl": f"{hub.url}/{repository.name}/commit/{commit}"}


def _commit(hub: HubServer, repository: Repository, branch: str, lines: list[dict[str, Any]]) -> str:
    files: dict[str, bytes | Path] = {
        path: blob.content for path, blob in repository.commits[repository.branches[branch]].items()
    }
    for line in lines[1:]:
        value = line["value"]
        if line["key"] == "deletedFile":
            del files[value["path"]]
        else:
            content = hub.uploaded[value["oid"]] if line["key"] == "lfsFile" else base64.b64decode(value["content"])
            files[value["path"]] = content
    return repository.commit(files, branch, LFS_THRESHOLD_BYTES)
