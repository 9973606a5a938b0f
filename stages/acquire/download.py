"""Bring a model's files into a directory: from the Hub in parallel, resumed and verified; or from a local directory."""

from __future__ import annotations

import contextlib
import hashlib
import io
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from scoring.units import readable
from stages.parts.base.errors import DamagedModel, NotEnoughSpace
from stages.parts.base.files import place, sha256_of
from stages.parts.base.log import say
from stages.parts.model import hub
from stages.parts.model.description import local_sizes
from stages.parts.records.acquired import ACQUIRED, Acquired, File

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PARALLEL_FILES: Final = 8
PARTIAL: Final = ".partial"
"""The folder, in the target directory, of files that are not complete yet."""
SPARE_BYTES: Final = 64 << 20
"""Kept free in addition to the model, for records, logs and directories."""
LINE_EVERY_S: Final = 5.0
BAR_EVERY_S: Final = 0.2


class HubSource:
    """A commit on the Hub. Correct files of *base*, of another commit or damaged, are used again.

    ``sizes`` are in bytes, by path; ``commit`` is what the revision means now.
    """

    def __init__(self, model: str, revision: str, base: Path) -> None:
        record = Acquired.read_if_intact(base / ACQUIRED)
        self._old = {file.path: file for file in record.files if (base / file.path).is_file()} if record else {}
        listing = hub.describe(model, revision)
        self.origin, self._model, self.commit, self._base = hub.endpoint(), model, listing.commit, base
        self._files = {file.path: file for file in listing.files}
        self.sizes = {file.path: file.size_bytes for file in listing.files}

    def missing_bytes(self, paths: Sequence[str], into: Path) -> int:
        """Sum the bytes of *paths* that are not yet in the directory *into*."""
        files = [self._files[path] for path in paths]
        return sum(file.size_bytes - _there(file, into)[1] for file in files if not self._kept(file))

    def fetch(self, paths: Sequence[str], into: Path) -> dict[str, File]:
        """Bring *paths* into the directory *into*, complete and verified. Correct files that are there are kept.

        Raises:
            DamagedModel: the content of a file has another digest than the Hub says.
            HubUnavailable, AccessDenied and others: see ``hub.download``.
        """
        files = [self._files[path] for path in paths]
        (into / PARTIAL).mkdir(exist_ok=True)
        for file in files:
            if self._kept(file) and not (into / file.path).exists():
                place(self._base / file.path, into / file.path)

        def measure() -> tuple[int, int]:
            states = [_there(file, into) for file in files]
            return sum(complete for complete, _ in states), sum(size for _, size in states)

        with progress("downloading", len(files), sum(file.size_bytes for file in files), measure):
            return _in_parallel(files, lambda file, gate: self._ensure(file, into, gate))

    def _kept(self, file: hub.HubFile) -> bool:
        """Whether the old base has the file according to its record. The file itself is verified later."""
        old = self._old.get(file.path)
        return old is not None and old.size_bytes == file.size_bytes and file.sha256 in (None, old.sha256)

    def _ensure(self, file: hub.HubFile, into: Path, gate: threading.Lock) -> File:
        """Bring the file into *into* and verify it, whatever was there before."""
        target, partial = into / file.path, _partial(file, into)
        if target.exists():
            if (record := _verified(file, target)) is not None:
                return record
            with gate:
                target.unlink()  # a link to a damaged old file, or a write that never reached the disk
        for _ in range(2):
            partial.parent.mkdir(exist_ok=True)
            with _GatedFile(partial, gate) as opened:
                if opened.tell() > file.size_bytes:
                    opened.truncate(0)
                if opened.tell() < file.size_bytes:
                    hub.download(self._model, self.commit, file.path, opened)
            record = _verified(file, partial)
            with gate:
                if record is not None:
                    target.parent.mkdir(exist_ok=True)
                    partial.replace(target)
                    return record
                size, digest = partial.stat().st_size, _digest(file, partial)
                partial.unlink()
        raise DamagedModel(
            f"{file.path} was downloaded altered, twice: the Hub says {file.size_bytes} bytes with digest "
            f"{file.sha256 or file.git_sha1}, the download has {size} bytes with digest {digest}",
            hint=f"check for a proxy or mirror in front of {hub.endpoint()}; all other files are kept",
        )


class LocalSource:
    """The user's own directory, as a source like ``HubSource``. Its files are copied or reflinked, never hard-linked,
    because the user may edit them in place."""

    def __init__(self, directory: Path) -> None:
        self.origin, self.directory = f"local:{directory}", directory
        self.sizes = local_sizes(directory)

    def missing_bytes(self, paths: Sequence[str], into: Path) -> int:  # noqa: ARG002 — every file is copied again
        return sum(self.sizes[path] for path in paths)

    def fetch(self, paths: Sequence[str], into: Path) -> dict[str, File]:
        for path in paths:
            (into / path).unlink(missing_ok=True)

        def measure() -> tuple[int, int]:
            sizes = [(into / path).stat().st_size for path in paths if (into / path).exists()]
            return len(sizes), sum(sizes)

        with progress("copying", len(paths), self.missing_bytes(paths, into), measure):
            for path in paths:
                place(self.directory / path, into / path, link=False)
            return {path: File.of(into, path) for path in paths}


@contextlib.contextmanager
def progress(verb: str, files: int, size_bytes: int, measure: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Show on stderr, until the block ends, what *measure* returns, which are complete files and bytes that are there:
    as a bar on a terminal, as a line every few seconds in a log."""
    ended, started_s, (_, first_bytes) = threading.Event(), time.monotonic(), measure()

    def measured(every_s: float) -> Iterator[tuple[int, int]]:
        while not ended.wait(every_s):
            yield measure()
        yield measure()

    def show_lines() -> None:
        for complete, transferred in measured(LINE_EVERY_S):
            seconds = time.monotonic() - started_s
            rate = f", {readable((transferred - first_bytes) / seconds)}/s" if seconds > 1 else ""
            say(f"{verb}: {complete}/{files} files, {readable(transferred)} of {readable(size_bytes)}{rate}")

    def show_bar() -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as SpeedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), SpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task(verb, total=size_bytes, completed=first_bytes)
            for complete, transferred in measured(BAR_EVERY_S):
                bar.update(task, completed=transferred, description=f"{verb} {complete}/{files} files")

    thread = threading.Thread(target=show_bar if sys.stderr.isatty() else show_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def require_space(directory: Path, needed_bytes: int) -> None:
    """Refuse with NotEnoughSpace, which says how much is needed and how much is free."""
    free = shutil.disk_usage(directory).free
    if needed_bytes + SPARE_BYTES > free:
        raise NotEnoughSpace(
            f"the model needs {readable(needed_bytes + SPARE_BYTES)}, but {readable(free)} are free on {directory}",
            hint="free some space, or move the store to a larger volume; nothing was changed",
        )


class _GatedFile(io.FileIO):
    """A file to append to, without a buffer in this process, so that a killed process loses no byte."""

    def __init__(self, path: Path, gate: threading.Lock) -> None:
        super().__init__(path, "ab")
        self._gate = gate

    def write(self, data: ReadableBuffer) -> int:
        rest = memoryview(data)
        with self._gate:
            while rest:  # a full disk takes a part before it refuses the rest
                rest = rest[super().write(rest) :]
        return len(memoryview(data))


def _in_parallel(
    files: Sequence[hub.HubFile], ensure: Callable[[hub.HubFile, threading.Lock], File]
) -> dict[str, File]:
    """Call *ensure* for every file, in several threads. The first error ends all of them at once.

    They are daemon threads, so one that waits for the network does not keep a program alive that was asked to end. A
    thread holds the *gate* while it changes a file; after the end nobody gets it any more.
    """
    gate = threading.Lock()
    # The largest files come first, so that none is left alone at the end.
    waiting = iter(sorted(files, key=lambda file: -file.size_bytes))
    ended: queue.SimpleQueue[File | BaseException] = queue.SimpleQueue()

    def work() -> None:
        for file in waiting:
            try:
                ended.put(ensure(file, gate))
            except BaseException as error:  # raised in the caller's thread
                ended.put(error)

    for _ in range(min(PARALLEL_FILES, len(files))):
        threading.Thread(target=work, daemon=True).start()
    records: dict[str, File] = {}
    try:
        while len(records) < len(files):
            result = ended.get()
            if isinstance(result, BaseException):
                raise result
            records[result.path] = result
    finally:
        gate.acquire()
    return records


def _partial(file: hub.HubFile, into: Path) -> Path:
    """Name an unfinished file. Its name has the digest, so that it never continues a file with other content."""
    return into / PARTIAL / f"{file.path.replace('/', '--')}.{file.sha256 or file.git_sha1}"


def _there(file: hub.HubFile, into: Path) -> tuple[bool, int]:
    """Whether the file is complete in *into*, and how many of its bytes are there."""
    for path in (into / file.path, _partial(file, into)):
        with contextlib.suppress(FileNotFoundError):
            return path.parent != into / PARTIAL, path.stat().st_size
    return False, 0


def _verified(file: hub.HubFile, path: Path) -> File | None:
    """Return the record of the file if the content of *path* has the Hub's size and digest."""
    if path.stat().st_size != file.size_bytes:
        return None
    record = File(path=file.path, size_bytes=file.size_bytes, sha256=sha256_of(path))
    right = record.sha256 == file.sha256 if file.sha256 else _digest(file, path) == file.git_sha1
    return record if right else None


def _digest(file: hub.HubFile, path: Path) -> str:
    """Compute the digest of *path* by the algorithm that the Hub uses for the file: sha256, or git's sha1."""
    if file.sha256:
        return sha256_of(path)
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
