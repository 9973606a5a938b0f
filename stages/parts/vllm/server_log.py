"""Reads vLLM's log: how it serves, and why it failed.

There is no other source: its HTTP interface reports neither the kernel nor the reason why it ended.

It names the engine's processes, too, such as ``(EngineCore pid=6523)``; vLLM restarts none of them. A server whose
engine is dead although its API process lives may neither answer nor end.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import psutil

from stages.parts.base.errors import MeasurementFailed
from stages.parts.records.evaluation import ColdStart

TAIL_BYTES: Final = 1 << 20
"""How much of the log's end is searched for a cause: an endpoint's log grows with its requests."""
CAUSE_CHARACTERS: Final = 300

# (EngineCore pid=1) ERROR 11-21 03:41:09 [core.py:1510] ValueError: …
PREFIX: Final = re.compile(r"^(?:\([^)]* pid=\d+\) )*(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]+\] )?")
EXCEPTION: Final = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Failure|Interrupt)): (.+)$")
TRACEBACK: Final = "Traceback (most recent call last):"
RAISED: Final = re.compile(r"^(?:[A-Za-z_]\w*\.)*(\w*[a-z]\w*)(?:: (.+))?$")
"""An exception of any name, which ends a traceback."""
CRASHES: Final = {
    "Segfault": signal.SIGSEGV,
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
}
"""Signals that a program's own fault raises, as its handlers name them."""
CRASH: Final = re.compile(rf"^(?:Fatal Python error: |!+ )({'|'.join(CRASHES)})\b")
"""Python's faulthandler writes it, which ``environment`` turns on, or TVM's handler, which may replace it."""
PYDANTIC: Final = re.compile(r"^  (?:Value|Assertion) error, (.+)$")
USAGE: Final = re.compile(r"^\S.*: (error: .+)$")
FALLBACK: Final = re.compile(r"\bfall(?:s|ing)?[ -]?back\b|not fully optimized|slow and unoptimized", re.IGNORECASE)
CONSEQUENCES: Final = (
    *("Engine core initialization failed", "Engine process failed", "EngineCore encountered an issue"),
    *("Worker failed", "WorkerProc", "Executor failed", "cancelled", "[Errno 32] Broken pipe"),
)
"""Raised because another process failed, whose own error is above it, or was ended by a signal."""
ENDED_BY: Final = re.compile(
    r"died unexpectedly \(exit code: -(\d+)\)|Failed core proc\(s\): \{'\w+': -(\d+)|trigger received signal=(SIG\w+)"
)
BEGINS: Final = re.compile(r"(\d\d-\d\d \d\d:\d\d:\d\d) \[[^\]]+\] Initializing a V\d LLM engine")
LISTENS: Final = re.compile(r"(\d\d-\d\d \d\d:\d\d:\d\d) \[[^\]]+\] Starting vLLM server")
LOADED: Final = re.compile(r"(?:Loading weights|Model loading) took (?:\S+ GiB memory and )?([\d.]+) s")
"""The second, on GPUs, includes the first, and the repacking of quantized weights."""
COMPILED: Final = re.compile(r"init engine .*took [\d.]+ s \(compilation: ([\d.]+) s")
NAMED: Final = re.compile(rb"^\(([\w-]+) pid=(\d+)\) ", re.MULTILINE)
DEAD: Final = re.compile(rb"EngineDeadError|EngineCore (?:failed to start|encountered a fatal error)")


@dataclass(frozen=True)
class Facts:
    """How the engine serves, from its own log: the fields that ``stages.parts.records.evaluation.Engine`` describes."""

    version: str
    dtype: str
    quantization: str | None
    kernel: str | None
    kv_cache_tokens: int
    fallbacks: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class ServerLog:
    """One server's part of a log file: from byte *start* on, since restarts append; all of it if it was rotated."""

    path: Path
    start: int = 0

    def text(self) -> str:
        """Read the server's output; at most its last MiB."""
        try:
            with self.path.open("rb") as file:
                end = file.seek(0, 2)
                file.seek(max(self.start if self.start <= end else 0, end - TAIL_BYTES))
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def cause(self) -> str:
        """Why the server ended; if there is no error, its last line."""
        text = self.text()
        return error_in(text) or last_line(text)

    def cold_start(self, seconds: float, first_answer_s: float) -> ColdStart | None:
        return cold_start(self.text(), seconds, first_answer_s)

    def facts(self) -> Facts:
        """Read the figures. Raises: MeasurementFailed: the log lacks a line that every supported vLLM writes."""
        try:
            return facts(self.text())
        except LookupError as error:
            raise MeasurementFailed(f"vLLM's log does not show its {error.args[0]}", hint=f"see {self.path}") from error


def error_in(text: str) -> str | None:
    """Find the line of a log that says why a program failed: that of the first exception, which causes the later ones,
    or else of a usage error. None if the log has neither."""
    lines = [PREFIX.sub("", line).rstrip() for line in text.splitlines()]
    in_traceback = False
    for index, line in enumerate(lines):
        if CRASH.match(line):
            return _shortened(line)
        match = EXCEPTION.match(line)
        if line == TRACEBACK:
            in_traceback = True
        elif in_traceback and line and not line[0].isspace():
            match, in_traceback = match or RAISED.match(line), False
        if not match or (match[2] or "").startswith(CONSEQUENCES):
            continue
        detail = PYDANTIC.match(lines[index + 1]) if index + 1 < len(lines) else None
        return _shortened(detail[1] if detail else ": ".join(filter(None, match.groups())))
    return next((_shortened(match[1]) for line in lines if (match := USAGE.match(line))), None)


def signal_in(text: str) -> signal.Signals | None:
    """Find the signal that ended one of the server's processes, if the log says so."""
    if crash := next(filter(None, map(CRASH.match, text.splitlines())), None):
        return CRASHES[crash[1]]
    if not (ending := ENDED_BY.search(text)):
        return None
    number, name = ending[1] or ending[2], ending[3]
    return signal.Signals(int(number)) if number else signal.Signals[name]


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _shortened(PREFIX.sub("", lines[-1]).strip()) if lines else "it printed nothing"


def facts(text: str) -> Facts:
    """Find the figures. Raises: LookupError: it names what the log does not contain."""
    quantization = _first(r"\bquantization=([\w-]+)", text)
    kernels = dict.fromkeys(re.findall(r"(?:Using|Selected) (\w+Kernel) for ", text))
    return Facts(
        version=_required("version", r"LLM engine \(v([^)]+)\)", text),
        dtype=_required("dtype", r"\bdtype=torch\.(\w+)", text),
        quantization=None if quantization == "None" else quantization,
        kernel=", ".join(kernels) or None,
        fallbacks=fallbacks(text),
        cores=tuple(
            int(core)
            for cores in re.findall(r"local_rank=\d+, core ids=\[([\d, ]+)\]", text)
            for core in cores.split(",")
        ),
        kv_cache_tokens=int(_required("KV cache size", r"KV cache size: ([\d,]+) tokens", text).replace(",", "")),
    )


def cold_start(text: str, seconds: float, first_answer_s: float) -> ColdStart | None:
    """Divide the *seconds* from the start of a server's process to its first answer, which took *first_answer_s*, by
    the last start in its log. The log tells the times of day, which divide the imports from the engine, in whole
    seconds, and the rest exactly. None if it lacks a time."""
    begun = [*BEGINS.finditer(text)]
    text = text[begun[-1].start() :] if begun else ""
    if not (listens := LISTENS.search(text)):
        return None
    # The log has no year; a leap year has all days, and a start may end in another one.
    times = [datetime.fromisoformat(f"2000-{time[1].replace(' ', 'T')}") for time in (begun[-1], listens)]
    weights_s = max(map(float, LOADED.findall(text)), default=0.0)
    compilation_s = float(compiled[1]) if (compiled := COMPILED.search(text)) else 0.0
    parts = {"weights_s": weights_s, "compilation_s": compilation_s, "first_answer_s": first_answer_s}
    left_s = max(0.0, seconds - sum(parts.values()))
    engine_s = min(left_s, max(0.0, (times[1] - times[0]).seconds - weights_s - compilation_s))
    parts |= {"engine_s": engine_s, "imports_s": left_s - engine_s}
    return ColdStart(**{name: round(part, 3) for name, part in parts.items()})


def fallbacks(text: str) -> tuple[str, ...]:
    """Each different line once, in order."""
    lines = (PREFIX.sub("", line).strip() for line in text.splitlines() if FALLBACK.search(line))
    return tuple(dict.fromkeys(map(_shortened, lines)))


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None


def _required(subject: str, pattern: str, text: str) -> str:
    value = _first(pattern, text)
    if value is None:
        raise LookupError(subject)
    return value


def _shortened(line: str) -> str:
    line = line.partition(" [type=")[0]  # pydantic appends the whole input
    return line if len(line) <= CAUSE_CHARACTERS else line[: CAUSE_CHARACTERS - 1] + "…"


@dataclass(frozen=True)
class Lost:
    """A process of the engine that has ended."""

    name: str
    """As vLLM's log names it, such as ``EngineCore`` or ``Worker_TP0``."""
    signal: signal.Signals | None
    """What ended it, if that could be seen before its parent took note of the end."""


class EngineWatch:
    """The processes that vLLM's log names from byte *start* on. A check reads only what the log gained since."""

    def __init__(self, log: Path, start: int) -> None:
        self.lost: Lost | None = None
        """The first that ended."""
        self._log, self._read = log, start
        self._processes: dict[int, tuple[str, psutil.Process]] = {}
        self._dead = False

    def dead(self) -> bool:
        """Whether a process of the engine has ended, or the log says that the engine has failed."""
        self._read_log()
        if self.lost is None:
            # A child that ended together with its parent ended first.
            self.lost = next(filter(None, (_lost(*process) for process in reversed(self._processes.values()))), None)
        return self._dead or self.lost is not None

    def _read_log(self) -> None:
        """Read the complete lines that were added."""
        try:
            with self._log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                start = file.seek(self._read if self._read <= end else 0)  # it may have been truncated
                added = file.read().rpartition(b"\n")[0]
        except FileNotFoundError:
            return
        self._read = start + len(added)
        self._dead = self._dead or bool(DEAD.search(added))
        for name, pid in ((name.decode(), int(digits)) for name, digits in NAMED.findall(added)):
            try:
                process = self._processes.get(pid)
                self._processes[pid] = name, process[1] if process else psutil.Process(pid)
            except psutil.NoSuchProcess:
                self.lost = self.lost or Lost(name, None)


def _lost(name: str, process: psutil.Process) -> Lost | None:
    """See whether a process has ended. If its parent has not taken note of it yet, the last field of its stat(5) says
    how."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return None
        with contextlib.suppress(OSError, ValueError):
            status = int(Path(f"/proc/{process.pid}/stat").read_text().split()[-1])
            return Lost(name, signal.Signals(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else None)
    return Lost(name, None)
