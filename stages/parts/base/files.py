"""The functions that read, write and lock files of the store, which may lie on a volume that several hosts share.

A file appears complete or not at all: it is written beside its target, then fsynced and renamed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

import psutil
from pydantic import BaseModel

from stages.parts.base.errors import Busy, ConfigError, InvalidName, disk_errors
from stages.parts.base.log import say

_NO_LINK: Final = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_BESIDE: Final = re.compile(r"[0-9a-f]{32}")
LEFT_S: Final = 3600
"""Writing a file beside another takes milliseconds: one that has lain there for an hour belongs to nobody."""
LOCKS: Final = ".locks"
REPLACED: Final = ".replaced-"
FICLONE: Final = 0x40049409  # linux/fs.h: share the blocks of one file with another (reflink)

Placement = Literal["hardlink", "reflink", "copy"]


def safe_relative(path: str) -> PurePosixPath:
    """Refuse, with InvalidName, the path of a file in a repository that could lead out of it: one that is absolute or
    empty, or contains ``..``, a backslash or a control character."""
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\\" in path or not path.isprintable():
        hint = "the file could be written outside the store, so nothing of this model is downloaded"
        raise InvalidName(f"the repository contains a file with an unsafe name: {path!r}", hint=hint)
    return pure


def canonical_json(value: Any) -> str:
    """Write the one JSON text of a value, for digests: sorted keys, no spaces."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def from_json(text: str | bytes) -> Any:
    """Parse JSON. Raises: ValueError, also for what is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def content_of(path: Path) -> bytes:
    """Read a file; once more if another host replaced it between its open and its reading, which NFS calls ESTALE."""
    try:
        return path.read_bytes()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return path.read_bytes()


def read_object(path: Path) -> dict[str, Any] | None:
    """Read the JSON object in a file; None if it can't be read, or is none."""
    with contextlib.suppress(OSError, ValueError):
        value = from_json(content_of(path))
        return value if isinstance(value, dict) else None
    return None


def digest_of(value: Any) -> str:
    """Compute the sha256 (hexadecimal) of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Compute the sha256 (hexadecimal) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_in(*places: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield each file and symbolic link at or below *places*, in order, with its own status. Links are not followed;
    what vanishes meanwhile is left out."""
    for place in places:
        walk = () if place.is_symlink() else os.walk(place)  # rglob of Python 3.11 fails at a folder that vanishes
        for path in (place, *sorted(Path(top, name) for top, *names in walk for name in chain(*names))):
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISDIR((status := path.lstat()).st_mode):
                    yield path, status


def write_json(path: Path, value: BaseModel | dict[str, Any] | list[Any]) -> None:
    """Replace the content of *path* with *value* as indented JSON, atomically and durably."""
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    write_text(path, json.dumps(plain, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace the content of *path* with *text*, atomically and durably; NotEnoughSpace leaves it unchanged."""
    with disk_errors(path.parent):
        make_folder(path.parent)
        work = beside(path)
        try:
            work.write_text(text, encoding="utf-8")
            fsync(work)
            os.replace(work, path)
        finally:
            work.unlink(missing_ok=True)
        fsync(path.parent)


def beside(path: Path) -> Path:
    """Name a file that becomes *path*, in the same folder, and remove those that killed processes left there."""
    start = f".{path.name}."
    for left in path.parent.iterdir():
        if left.name.startswith(start) and _BESIDE.fullmatch(left.name, len(start)):
            with contextlib.suppress(FileNotFoundError):
                if left.lstat().st_mtime < time.time() - LEFT_S:
                    left.unlink()
    return path.with_name(f"{start}{uuid.uuid4().hex}")


def make_folder(folder: Path) -> None:
    """Make a directory and those above it, durably."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        fsync(folder.parent)


def place(source: Path, target: Path, *, link: bool = True) -> Placement:
    """Create *target* with the content of *source*: as a hard link, else as a reflink, else as a copy.

    A hard link shares the inode, which is safe because nothing in the store is ever changed in place. Set *link* to
    False if *source* may change, such as a user's own file. *target* must not exist.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        if link:
            os.link(source, target)
            return "hardlink"
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
    with source.open("rb") as original, target.open("xb") as clone, contextlib.suppress(OSError):
        fcntl.ioctl(clone, FICLONE, original.fileno())
        return "reflink"
    shutil.copyfile(source, target)
    return "copy"


def place_tree(source: Path, target: Path, files: Iterable[str]) -> Placement:
    """Place *files* (relative paths) of *source* in *target*; return the most expensive way that was needed."""
    order: list[Placement] = ["hardlink", "reflink", "copy"]
    used = {place(source / name, target / name) for name in files}
    return max(used, key=order.index, default="hardlink")


def look_anew(folder: Path) -> None:
    """Ask for the names in *folder*, and in those in it. Of what other hosts do on a shared volume this one may hear
    seconds later, also of what was not there; but NFS asks for what is in a directory when that is opened."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY))


@contextlib.contextmanager
def exclusive(lock: Path, what: str, *, wait: bool = True) -> Iterator[None]:
    """Hold an advisory lock, which the kernel releases however the process ends.

    If another process holds it, a line on stderr says so while this one waits; or it ends with Busy, without *wait*.
    What its former holder did is seen, also from another host, in the model's folder and those in it.
    """
    make_folder(lock.parent)
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if not wait:
                raise Busy(f"{what} is in use by another process") from error
            say(f"waiting: {what} is in use by another process")
            fcntl.flock(file, fcntl.LOCK_EX)
        look_anew(_guarded(lock))
        yield


def holder(lock: Path) -> int | None:
    """Find the process that holds a lock, by the id that it has written there: 0 if it wrote none. None if nobody holds
    it."""
    look_anew(_guarded(lock))
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), lock.open() as file:
        try:
            # A shared lock: two readers at a time must not take each other for the holder.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = file.read()
            return int(text) if text.isdigit() else 0
    return None


def end_holder(lock: Path, pid: int, what: str) -> None:
    """Ask the process that holds a lock to end (SIGTERM). Raises: ConfigError: it runs on another host, and the process
    with its id on this one is another; PermissionError."""
    files = [lock.resolve()]
    with contextlib.suppress(psutil.AccessDenied, psutil.NoSuchProcess):
        files = [Path(file.path) for file in psutil.Process(pid).open_files()] if psutil.pid_exists(pid) else []
    if lock.resolve() in files:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    elif holder(lock) == pid:
        raise ConfigError(f"{what} runs on another host", hint="stop it there")


def _guarded(lock: Path) -> Path:
    """Locate the folder of what a lock is for."""
    return lock.parent.parent if lock.parent.name == LOCKS else lock.parent


def swap_link(link: Path, target: Path) -> None:
    """Point the symbolic *link* at *target* (relative to the link's folder), atomically."""
    work = beside(link)
    work.symlink_to(target)
    os.replace(work, link)
    fsync(link.parent)


def swap(work: Path, target: Path) -> None:
    """Move *work* to *target*, in place of what is there. A crash between the two renames leaves no target, never a
    half-written one."""
    make_folder(target.parent)
    old = work.with_name(f"{work.name}{REPLACED}{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(FileNotFoundError):
        os.replace(target, old)
    os.replace(work, target)
    fsync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def fsync_tree(folder: Path) -> None:
    """Make a directory and all that is in it durable."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            fsync(path)


def fsync(path: Path) -> None:
    """Make a file's content, or a directory's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
