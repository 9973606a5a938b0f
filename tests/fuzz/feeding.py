"""Feeds a target, and tells what no input may do: end in another error than ours, hang, or touch other files."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from stages.parts.base.errors import SlipwayError
from tests.fuzz.targets import TARGETS, Files, Target
from tests.serving import REPOSITORY

TURN_S: Final = 0.5
"""How long one target is fed before the next."""
LONGEST_S: Final = 5.0
"""Of the processor, for one input; they take milliseconds."""
ROOM_BYTES: Final = 1 << 30
"""What an input may take beyond what the process has."""
LONGEST_MESSAGE: Final = 20_000
WRITES: Final = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.truncate"}
NEVER: Final = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect"}
INSTALLED: Final = (sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"))
READ: Final = (str(REPOSITORY), *INSTALLED, "/proc", "/sys", os.devnull)


class Forbidden(BaseException):
    """Something that no input may cause, which no handler of errors takes for one of its own."""


class _Watch:
    """What the process opens, writes and starts while an input is parsed; an audit hook can't be taken away."""

    folder: str = ""
    names_files = False
    thread = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.folder or threading.get_ident() != self.thread:
            return
        if event in NEVER:
            raise Forbidden(f"{event} {arguments}")
        if event == "open" or event in WRITES:
            path = arguments[0]
            if not isinstance(path, str | bytes | os.PathLike):
                return
            place = os.path.realpath(os.fsdecode(path))
            writes = event != "open" or bool(arguments[2] and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            allowed = place.startswith(self.folder) or (
                "__pycache__" in place or place == os.devnull if writes else self.names_files or place.startswith(READ)
            )
            if not allowed:
                raise Forbidden(f"{event} {place}")


_WATCH: Final = _Watch()
_HOOKED: Final[list[bool]] = []


@contextlib.contextmanager
def watched(folder: Path, *, names_files: bool) -> Iterator[None]:
    """Raise Forbidden in the block if it takes too long, or touches what is not in *folder*."""
    if not _HOOKED:
        sys.addaudithook(_WATCH)
        _HOOKED.append(True)

    def too_long(*_: object) -> None:
        raise Forbidden(f"longer than {LONGEST_S} s")

    former = signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
    _WATCH.folder, _WATCH.names_files, _WATCH.thread = os.path.realpath(folder), names_files, threading.get_ident()
    try:
        yield
    finally:
        _WATCH.folder = ""
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, former)


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Let the block take no more than ``ROOM_BYTES`` of address space beyond what the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    former = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_BYTES, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, former)


def feed(target: Target, files: Files, folder: Path) -> None:
    """Give *files* to all parsers of a target, and put back what they replaced. Raises what no input may raise."""
    former = {name: (folder / name).read_bytes() if (folder / name).exists() else None for name in files}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    try:
        for parse in target.parsers:
            try:
                with watched(folder, names_files=target.names_files):
                    parse(folder)
            except SlipwayError as error:
                check_message(error)
            except target.refusals:
                pass
    finally:
        for name, before in former.items():
            if before is None:
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(before)


def check_message(error: SlipwayError) -> None:
    """A message is short, and has nothing in it that a terminal obeys."""
    message = error.render()
    assert len(message) < LONGEST_MESSAGE, message[:1000]
    assert all(each.isprintable() for each in message.replace("\t", "").split("\n")), repr(message)


class Fed(NamedTuple):
    """What one process did."""

    inputs: Counter[str]
    defects: tuple[str, ...]


def feed_all(names: tuple[str, ...], seed: int, minutes: float) -> Fed:
    """Feed the targets by turns; of each one the first defect is kept, and it is not fed any more."""
    inputs, defects, left = Counter[str](), list[str](), list(names)
    end = time.monotonic() + minutes * 60
    with tempfile.TemporaryDirectory(prefix="slipway-fuzz-") as folder, bounded_memory():
        for name in names:
            (Path(folder) / name).mkdir()
            TARGETS[name].prepare(Path(folder) / name)
        while left and time.monotonic() < end:
            for name in tuple(left):
                turn = time.monotonic() + TURN_S
                while time.monotonic() < turn:
                    number = seed + inputs[name]
                    inputs[name] += 1
                    try:
                        feed(TARGETS[name], TARGETS[name].make(Random(number)), Path(folder) / name)
                    except KeyboardInterrupt:
                        raise
                    except BaseException:  # whatever it is, it is a defect
                        defects.append(f"{name}, input {number}:\n{traceback.format_exc()}")
                        left.remove(name)
                        break
    return Fed(inputs, tuple(defects))
