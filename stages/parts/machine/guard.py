"""Run one command, and end all its descendants when it fails or when the caller stops or dies.

    python -I -S guard.py LIFELINE GRACE COMMAND [ARGUMENT ...]

``LIFELINE`` is the read end of a pipe; only the caller has the write end. The guard is the subreaper (prctl(2)) of its
descendants, so that none escapes by outliving its parent or by starting a session. When the caller sends SIGTERM, when
the caller dies (the pipe closes) or when the command fails, all descendants receive SIGTERM and, after ``GRACE``
seconds, SIGKILL. A command that succeeds may leave a daemon behind.

Exit status: the command's, or 128 + the signal that ended it. Imports only the standard library, to start in
milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.02


def main() -> int:
    lifeline, grace_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: asked.append(received))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = spawn(libc, command, close=(lifeline, wake_read, wake_write))
    status = None
    while status is None:
        ready, _, _ = select.select([lifeline, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 512)
        status = reap(child)
        if status is None and (asked or lifeline in ready):
            return end_all(child, grace_s)
    if status != 0:
        end_all(child, grace_s)
    return status


def spawn(libc: ctypes.CDLL, command: list[str], close: tuple[int, ...]) -> int:
    """Start the command; if the guard itself is killed, the kernel kills the command."""
    requests = {signal.SIGTERM, signal.SIGINT}
    # Blocked until the child has its own handlers: with the guard's handlers it would ignore these signals.
    signal.pthread_sigmask(signal.SIG_BLOCK, requests)
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, requests)
        return child
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, requests)
        for descriptor in close:
            os.close(descriptor)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def reap(child: int) -> int | None:
    """Wait for all descendants that have ended; return the status of *child* if it is among them."""
    status = None
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == child:
            code = os.waitstatus_to_exitcode(raw)
            status = code if code >= 0 else 128 - code


def end_all(child: int, grace_s: float) -> int:
    """End all descendants with SIGTERM, after *grace_s* with SIGKILL; then return the status of *child*."""
    status = None
    deadline = time.monotonic() + grace_s
    first = descendants()
    # First only the command, so that it can end its own children in its own order.
    for pid in [child] if child in first else first:
        send(pid, signal.SIGTERM)
    while True:
        ended = reap(child)
        if ended is not None:
            status = ended
            for pid in descendants():
                send(pid, signal.SIGTERM)
        remaining = descendants()
        if not remaining:
            status = reap(child) if status is None else status  # it may have ended just now
            return 143 if status is None else status
        if time.monotonic() > deadline:
            for pid in remaining:
                send(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def descendants() -> list[int]:
    """List the ids of all living descendants of this process, from /proc."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z":
                parents[int(name)] = int(fields[1])
    pids: list[int] = []
    wave = {os.getpid()}
    while wave:
        wave = {pid for pid, parent in parents.items() if parent in wave}
        pids.extend(wave)
    return pids


if __name__ == "__main__":
    sys.exit(main())
