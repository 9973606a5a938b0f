"""The repositories of the server, with branches, tags and commits. A commit is a set of files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import yaml

LFS_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")
LFS_THRESHOLD_BYTES: Final = 10_000_000
"""Larger files are LFS files with any name, as on the Hub."""
READ_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Blob:
    """The content of a file, in memory or on disk, with the digests that the Hub gives it."""

    path: str
    content: bytes | Path
    lfs_threshold: int = LFS_THRESHOLD_BYTES

    @cached_property
    def size(self) -> int:
        return self.content.stat().st_size if isinstance(self.content, Path) else len(self.content)

    @cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for block in self.read(0, self.size):
            digest.update(block)
        return digest.hexdigest()

    @cached_property
    def git_sha1(self) -> str:
        """The file's git blob id; for an LFS file, the id of its pointer."""
        digest = hashlib.sha1(usedforsecurity=False)
        if self.is_lfs:
            pointer = self.pointer.encode()
            digest.update(b"blob %d\0" % len(pointer) + pointer)
        else:
            digest.update(b"blob %d\0" % self.size)
            for block in self.read(0, self.size):
                digest.update(block)
        return digest.hexdigest()

    @property
    def is_lfs(self) -> bool:
        return self.path.endswith(LFS_SUFFIXES) or self.size > self.lfs_threshold

    @property
    def pointer(self) -> str:
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {self.size}\n"

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_lfs else self.git_sha1

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes from *start* to before *end*, in blocks."""
        if isinstance(self.content, bytes):
            for at in range(start, end, READ_BYTES):
                yield self.content[at : min(at + READ_BYTES, end)]
            return
        with self.content.open("rb") as file:
            file.seek(start)
            while start < end:
                block = file.read(min(READ_BYTES, end - start))
                if not block:
                    return
                start += len(block)
                yield block


Commit = Mapping[str, Blob]


@dataclass
class Repository:
    name: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes | Path], branch: str, lfs_threshold: int) -> str:
        """Put *files* on *branch*. The commit's name depends only on their content."""
        blobs = {path: Blob(path, content, lfs_threshold) for path, content in sorted(files.items())}
        digest = hashlib.sha1(usedforsecurity=False)
        for path, blob in blobs.items():
            digest.update(f"{path}\0{blob.size}\0{blob.sha256}\n".encode())
        name = digest.hexdigest()
        self.commits[name] = blobs
        self.branches[branch] = name
        return name

    def find(self, revision: str) -> str | None:
        """The commit of a branch, a tag, or a commit's first 7 or more digits."""
        if found := self.branches.get(revision) or self.tags.get(revision):
            return found
        if re.fullmatch("[0-9a-f]{7,40}", revision):
            return next((name for name in self.commits if name.startswith(revision)), None)
        return None

    def card(self, commit: str) -> dict[str, Any]:
        """The front matter of README.md."""
        blob = self.commits[commit].get("README.md")
        text = b"".join(blob.read(0, blob.size)).decode() if blob else ""
        found = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
        return yaml.safe_load(found[1]) if found else {}

    def refs(self) -> dict[str, Any]:
        def listed(kind: str, names: Mapping[str, str]) -> list[dict[str, str]]:
            return [
                {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": commit} for name, commit in names.items()
            ]

        return {"branches": listed("heads", self.branches), "tags": listed("tags", self.tags), "converts": []}

    def info(self, commit: str, *, blobs: bool) -> dict[str, Any]:
        card = self.card(commit)
        license_tags = [f"license:{card['license']}"] if "license" in card else []
        return {
            "_id": commit[:24],
            "id": self.name,
            "modelId": self.name,
            "author": self.name.partition("/")[0],
            "sha": commit,
            "private": self.private,
            "gated": "manual" if self.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "lastModified": "2026-01-01T00:00:00.000Z",
            "createdAt": "2026-01-01T00:00:00.000Z",
            "tags": [*card.get("tags", []), *license_tags],
            "cardData": card,
            "siblings": [self._sibling(blob, detailed=blobs) for blob in self.commits[commit].values()],
        }

    def tree(self, commit: str, folder: str, *, recursive: bool) -> list[dict[str, Any]] | None:
        """Entries below *folder* ('' for the root), or None if there is no such folder."""
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, Any]] = {}
        for path, blob in self.commits[commit].items():
            if not path.startswith(prefix):
                continue
            parts = path.removeprefix(prefix).split("/")
            for depth in range(1, len(parts)):
                inner = prefix + "/".join(parts[:depth])
                if depth == 1 or recursive:
                    oid = hashlib.sha1(inner.encode(), usedforsecurity=False).hexdigest()
                    entries[inner] = {"type": "directory", "oid": oid, "size": 0, "path": inner}
            if len(parts) == 1 or recursive:
                entries[path] = self._entry(blob)
        return list(entries.values()) if entries or not folder else None

    def _entry(self, blob: Blob) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "oid": blob.git_sha1, "size": blob.size, "path": blob.path}
        if blob.is_lfs:
            entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": len(blob.pointer)}
        return entry

    def _sibling(self, blob: Blob, *, detailed: bool) -> dict[str, Any]:
        sibling: dict[str, Any] = {"rfilename": blob.path}
        if detailed:
            sibling |= {"size": blob.size, "blobId": blob.git_sha1}
            if blob.is_lfs:
                sibling["lfs"] = {"sha256": blob.sha256, "size": blob.size, "pointerSize": len(blob.pointer)}
        return sibling


def files_below(folder: Path) -> dict[str, bytes | Path]:
    """All files of a folder by their paths in a repository."""
    return {
        path.relative_to(folder).as_posix(): path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }
