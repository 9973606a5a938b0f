"""A process that has imported the product's libraries runs the programs that tests start, each in a fork of itself:
most programs take longer to import than to do what a test asks of them.

``install`` gives ``subprocess`` a ``Popen`` that starts ``python -m MODULE`` in this way for the modules of
``PROGRAMS``. To whoever starts it the program is as usual: a child process with its own arguments, environment,
directory, streams and exit status, which /proc shows under its own command line. These are started as ever: a program
with another interpreter option or ``PYTHON…`` variable, one whose ``PYTHONPATH`` replaces a library that is imported
already, and all that programs start themselves. ``sys.executable`` with ``-P`` is the way to ask for that.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Final, cast

PROGRAMS: Final = re.compile(
    r"pipeline|stages\.\w+|tests\.stages\.(rollout\.driver|evaluate\.program)|tests\.own_surroundings|tests\.campaign\.(calls|recorded)"
)
IMPORTED: Final = (
    "numpy",
    "pipeline.cli",
    "typer.rich_utils",
    *(
        f"stages.{stage}.__main__"
        for stage in ("acquire", "check", "ending", "evaluate", "optimize", "report", "resolve", "rollout", "select")
    ),
    "stages.serve.__main__",
    "tests.stages.rollout.disk_target",
)
NEVER: Final = ("torch", "vllm", "huggingface_hub", "kubernetes")
"""Those read the environment or start threads when they are imported."""
REPOSITORY: Final = Path(__file__).parent.parent
PR_SET_CHILD_SUBREAPER: Final = 36
PR_SET_MM: Final = 35
PR_SET_MM_MAP: Final = 14
MESSAGE_BYTES: Final = 1 << 17
HIGH: Final = 64
"""Descriptors from here on are free in the process that forks."""
AT_START: Final = re.compile(r"PYTHON(?!PATH$)|LC_|LANG|LD_|MALLOC_")
"""Variables that act when Python starts."""
_libc: Final = ctypes.CDLL(None, use_errno=True)


class Parent:
    """The process that forks, as those see it that ask it to."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._variables = start_variables(environment)
        with theirs:
            self._process = USUAL(
                [sys.executable, "-m", "tests.preloaded", str(theirs.fileno())],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        if not (names := self._socket.recv(MESSAGE_BYTES)):
            raise RuntimeError("the process that forks programs has ended; above it says why")
        self._names = frozenset(json.loads(names))

    @property
    def pid(self) -> int:
        return self._process.pid

    def suits(self, environment: Mapping[str, str]) -> bool:
        """Whether a program with these variables imports the libraries that are imported here, and in the same way."""
        if not self._names or start_variables(environment) != self._variables:
            return False
        return not any(top_level_names(folder) & self._names for folder in python_path(environment))

    def fork(self, message: bytes, streams: Sequence[int]) -> int:
        """Run a program; return its process id. It is a child of this process, as its next ancestor that asks for
        orphans: the process between them ends at once."""
        with self._lock:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._socket, [message], streams)
                return int(self._socket.recv(MESSAGE_BYTES))
            finally:
                _libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def stop(self) -> None:
        self._socket.close()
        self._process.wait()


USUAL: Final = subprocess.Popen
_usual: dict[str, str] = {}


def install() -> None:
    """Start programs in forks from now on."""
    _usual.update(os.environ)
    setattr(subprocess, "Popen", ForkingPopen)  # noqa: B010 - mypy lets nobody assign to a class


@cache
def parent() -> Parent:
    """The process that forks. It starts when it is first needed, with the variables there were at the beginning."""
    made = Parent(_usual)
    atexit.register(made.stop)
    return made


class ForkingPopen(subprocess.Popen):
    """``subprocess.Popen``, which forks where that does the same."""

    # The parameters of subprocess.Popen's own method, by place.
    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *more: Any) -> None:
        close_fds, pass_fds, directory, variables, _, _, shell, *ends = more
        ends, (_, gid, gids, uid, umask, new_session, group) = ends[:6], ends[6:]
        others = (executable, preexec_fn, bool(pass_fds), shell, gid, gids, uid, umask, group)
        if is_program(args) and close_fds and others == (None, None, False, False, None, None, None, -1, -1):
            variables = dict(os.environ if variables is None else variables)
            call = {
                "command": [os.fspath(each) for each in args],
                "environment": variables,
                "directory": os.fspath(directory or Path.cwd()),
                "new_session": bool(new_session),
            }
            if parent().suits(variables) and len(message := json.dumps(call).encode()) < MESSAGE_BYTES:
                given = (ends[0], ends[3], ends[5])
                self.pid = parent().fork(message, [end if end >= 0 else number for number, end in enumerate(given)])
                self._child_created = True
                self._close_pipe_fds(*ends)  # type: ignore[attr-defined]
                return
        super()._execute_child(args, executable, preexec_fn, *more)  # type: ignore[misc]


def is_program(command: Any) -> bool:
    own = isinstance(command, list | tuple) and len(command) > 2 and list(command[:2]) == [sys.executable, "-m"]
    return own and PROGRAMS.fullmatch(command[2]) is not None


def start_variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if AT_START.match(name)}


def python_path(environment: Mapping[str, str]) -> list[str]:
    return [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]


def top_level_names(folder: str) -> set[str]:
    """The modules that can be imported from *folder*, unless it is this repository."""
    if folder == str(REPOSITORY) or not Path(folder).is_dir():
        return set()
    return {path.name.partition(".")[0] for path in Path(folder).iterdir()}


def serve(asked: socket.socket) -> dict[str, Any]:
    """Fork for each call; return in the child, with its call."""
    while True:
        message, streams, _, _ = socket.recv_fds(asked, MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        reads, writes = os.pipe()
        if not (between := os.fork()):
            if child := os.fork():
                os.write(writes, str(child).encode())
                os._exit(0)
            call: dict[str, Any] = json.loads(message)
            become(call, streams)
            return call
        os.close(writes)
        pid = os.read(reads, 32)
        os.waitpid(between, 0)
        os.close(reads)
        for stream in streams:
            os.close(stream)
        asked.send(pid)


def become(call: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Take on what a process is given when it is started."""
    for number, stream in enumerate([os.dup2(stream, HIGH + number) for number, stream in enumerate(streams)]):
        os.dup2(stream, number)
    os.closerange(3, max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 1)
    if call["new_session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(call["directory"])
    libraries = sys.path[len(python_path(os.environ)) + 1 :]
    os.environ.clear()
    os.environ.update(call["environment"])
    named = python_path(os.environ)
    sys.path[:] = [str(Path.cwd()), *named, *(path for path in libraries if path not in named)]
    importlib.invalidate_caches()
    sys.argv = ["-m", *call["command"][3:]]
    sys.orig_argv = list(call["command"])
    show(call["command"], call["environment"])
    cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=sys.stdout.isatty())


def show(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Let /proc show this process under its own command line and environment. Whether the kernel does that."""
    global _shown
    arguments = b"".join(os.fsencode(each) + b"\0" for each in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    _shown = ctypes.create_string_buffer(arguments + variables)
    start = ctypes.addressof(_shown)
    middle, end = start + len(arguments), start + len(arguments) + len(variables)
    fields = ["", "", *Path("/proc/self/stat").read_text().rpartition(")")[2].split()]
    code, data = (int(fields[25]), int(fields[26])), (int(fields[44]), int(fields[45]))
    _libc.sbrk.restype = ctypes.c_void_p
    brk = (int(fields[46]), _libc.sbrk(0))
    layout = (ctypes.c_uint64 * 13)(
        *code, *data, *brk, int(fields[27]), start, middle, middle, end, 0, 0xFFFFFFFF << 32
    )
    return _libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(layout), ctypes.sizeof(layout), 0) == 0


_shown: Any = None


def main() -> None:
    asked = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in IMPORTED:
        importlib.import_module(module)
    if started := [name for name in NEVER if name in sys.modules]:
        raise SystemExit(f"{started} must not be imported before a fork")
    for module in [name for name in sys.modules if name.endswith(".__main__")]:
        del sys.modules[module]
    known = sorted({name.partition(".")[0] for name in sys.modules} | {"sitecustomize"})
    asked.send(json.dumps(known if show(sys.orig_argv, os.environ) else []).encode())
    gc.collect()
    gc.freeze()
    call = serve(asked)
    asked.detach()  # it is closed already
    runpy.run_module(call["command"][2], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
