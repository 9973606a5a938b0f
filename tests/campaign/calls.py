"""Runs a program and sees each call by which it changes the store: ends it just before one of them, lets those of
some kinds fail from one on, or keeps them all.

python -m tests.campaign.calls (kill:NUMBER:SIGNAL | fail:NUMBER:ERRNO:KIND,… | keep:FILE) MODULE [ARGUMENT ...],
with SLIPWAY_STORE
"""

from __future__ import annotations

import builtins
import io
import itertools
import os
import pickle
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

MOVES: Final = ("rename", "replace", "link", "symlink")
"""The second argument is the name that appears."""
OTHERS: Final = ("fsync", "mkdir", "unlink", "remove", "rmdir")


class Call(NamedTuple):
    """One call."""

    kind: str
    """The function of ``os``; or create, append or rewrite, which open a file; write, in the middle of a text; or
    failed."""
    path: str
    source: str = ""
    """What was renamed or linked; of a symbolic link, where it leads."""
    content: bytes | None = None
    """Of the file that is made durable, renamed or linked."""


class Watch:
    """Counts, and ends the process before the call that was named, or refuses from there on."""

    def __init__(self, root: str, how: str) -> None:
        self.root = f"{root}/"
        self.calls: list[Call] = []
        self.action, *told = how.split(":")
        self.keeps = self.action == "keep"
        self.number, self.code = (0, 0) if self.keeps else map(int, told[:2])
        self.failing = told[2].split(",") if self.action == "fail" else []
        self.count = itertools.count(1)

    def inside(self, *paths: str) -> bool:
        return any(f"{path}/".startswith(self.root) for path in paths)

    def before(self, kind: str, path: str) -> None:
        number = next(self.count)
        if number >= self.number and kind in self.failing:
            raise OSError(self.code, os.strerror(self.code), path)
        if number == self.number and self.action == "kill":
            os.kill(os.getpid(), self.code)
            time.sleep(0)  # where a signal that is handled is handled

    @contextmanager
    def done(self, call: Call) -> Iterator[None]:
        """Keep the call that the block makes."""
        try:
            yield
        except OSError:
            call = call._replace(kind="failed")
            raise
        finally:
            if self.keeps:
                self.calls.append(call)

    def read(self, path: str) -> bytes | None:
        return Path(path).read_bytes() if self.keeps and Path(path).is_file() and not Path(path).is_symlink() else None


def absolute(path: Any, folder: int | None = None) -> str:
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")  # noqa: PTH115 - Path would call what is watched
    text = os.fsdecode(path)
    return os.path.abspath(text if folder is None else f"{absolute(folder)}/{text}")  # noqa: PTH100 - follows no link


def watch(seen: Watch) -> None:
    """Put the functions that are watched in the place of the usual ones."""
    for name in MOVES:
        setattr(os, name, moving(seen, name, getattr(os, name)))
    for name in OTHERS:
        setattr(os, name, acting(seen, name, getattr(os, name)))
    builtins.open = io.open = opening(seen, io.open)
    Path.write_text = writing(seen)  # type: ignore[method-assign]


def moving(seen: Watch, name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    def call(source: Any, path: Any, *more: Any, **given: Any) -> Any:
        to = absolute(path, given.get("dst_dir_fd"))
        come = os.fsdecode(source) if name == "symlink" else absolute(source, given.get("src_dir_fd"))
        if not seen.inside(to):
            return usual(source, path, *more, **given)
        seen.before(kind := "rename" if name == "replace" else name, to)
        content = seen.read(come) if name != "symlink" else None
        with seen.done(Call(kind, to, come, content)):
            return usual(source, path, *more, **given)

    return call


def acting(seen: Watch, name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, *more: Any, **given: Any) -> Any:
        at = absolute(path, given.get("dir_fd"))
        if not seen.inside(at):
            return usual(path, *more, **given)
        seen.before(kind := "unlink" if name == "remove" else name, at)
        content = seen.read(at) if name == "fsync" else None
        with seen.done(Call(kind, at, content=content)):
            return usual(path, *more, **given)

    return call


def opening(seen: Watch, usual: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, mode: str = "r", *more: Any, **given: Any) -> Any:
        if not set(mode) & set("wax+") or isinstance(path, int) or not seen.inside(at := absolute(path)):
            return usual(path, mode, *more, **given)
        kind = "create" if not os.path.lexists(at) else "append" if "a" in mode else "rewrite"
        seen.before(kind, at)
        with seen.done(Call(kind, at)):
            return usual(path, mode, *more, **given)

    return call


def writing(seen: Watch) -> Callable[..., int]:
    def write_text(path: Path, text: str, encoding: str | None = None, **given: Any) -> int:
        with path.open("w", encoding=encoding, **given) as file:
            file.write(text[: len(text) // 2])
            file.flush()
            if seen.inside(absolute(path)):
                seen.before("write", absolute(path))
                with seen.done(Call("write", absolute(path))):
                    pass
            return len(text[: len(text) // 2]) + file.write(text[len(text) // 2 :])

    return write_text


def main() -> None:
    how, module, *arguments = sys.argv[1:]
    seen = Watch(os.environ["SLIPWAY_STORE"], how)
    sys.argv = [module, *arguments]
    try:
        watch(seen)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        if seen.keeps:
            Path(how.removeprefix("keep:")).write_bytes(pickle.dumps([tuple(call) for call in seen.calls]))


if __name__ == "__main__":
    main()
