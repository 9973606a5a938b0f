"""Envoy's access log: one line of JSON for each request that has ended, without a word of its text.

Files beside it (see ``leave``) report what does not pass through Envoy: our own requests to the servers, and what the
servers themselves count.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from stages.parts.base.files import write_text
from stages.parts.base.store import Record

NAME: Final = "access.jsonl"
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""What a database takes."""


class LoggedRequest(BaseModel):
    """One request that has ended: a line as ``templates/envoy.yaml.jinja`` defines it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    at: float
    """Seconds since 1970."""
    model: str = ""
    """The endpoint's."""
    answered: str | None = None
    """What the answer says: the model, or a LoRA adapter."""
    client: str | None = None
    """None if nobody was let in."""
    release: str | None = None
    """The one that answered."""
    server: str | None = None
    """The socket of the server that answered, which no other server and no other start of it has."""
    path: str | None = None
    status: Int64 = 0
    """0 if the client was gone before there was one."""
    flags: str | None = None
    """Why Envoy itself ended it; see its documentation of RESPONSE_FLAGS. ``DC``: the client went away."""
    ttft_ms: float | None = None
    """Until the first byte of an answer: of a stream, the first token."""
    duration_ms: float = 0
    prompt_tokens: Int64 | None = None
    cached_tokens: Int64 | None = None
    """How many of the prompt's tokens were in the prefix cache."""
    output_tokens: Int64 | None = None
    copy_of: str | None = None
    """The id of the request of which this is a copy, whose answer nobody got."""
    content_type: str | None = None
    server_ttft_us: Int64 | None = None
    """From the moment at which the server got the request. What the door and a slow client take is not among it."""
    server_answer_us: Int64 | None = None
    """From the first to the last byte of the server's answer."""


class Reading(Record):
    """What a server has counted from its start until now."""

    server: str
    """See ``LoggedRequest``."""
    at: float
    """Seconds since 1970."""
    model: str
    release: str
    prompt_tokens: Int64
    output_tokens: Int64


LINE: Final = TypeAdapter[LoggedRequest | Reading](LoggedRequest | Reading)


class LogReader:
    """Reads the log at *path* while Envoy writes it, and goes on with the next file once Envoy has begun one. *at_end*:
    without what is there already."""

    def __init__(self, path: Path, *, at_end: bool = False) -> None:
        self._path, self._rest = path, b""
        self._file: IO[bytes] | None = None
        if at_end:
            with contextlib.suppress(FileNotFoundError):
                self._file = path.open("rb")
                self._file.seek(0, 2)

    def requests(self) -> Iterator[LoggedRequest]:
        """Yield those that have ended since the last call. The beginning of another line is kept."""
        while True:
            moved = self._moved()  # before reading: Envoy writes nothing more to a file once it has opened the next
            if self._file:
                *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
                yield from (line for line in map(parsed, lines) if isinstance(line, LoggedRequest))
            if not moved:
                return
            if self._file:
                self._file.close()
            self._file, self._rest = self._path.open("rb"), b""

    def _moved(self) -> bool:
        try:
            current = self._path.stat()
        except FileNotFoundError:
            return False
        return self._file is None or current.st_ino != os.fstat(self._file.fileno()).st_ino


def parsed(line: bytes) -> LoggedRequest | Reading | None:
    """Parse a line; None if it was cut when Envoy was killed."""
    try:
        return LINE.validate_json(line)
    except ValidationError:
        return None


def files(folder: Path) -> list[Path]:
    """All that may still have to be read, the one that Envoy writes last."""
    current = folder / NAME
    return [*sorted(folder.glob(f"{current.stem}.*{current.suffix}")), current]


def another(folder: Path, at_ns: int) -> Path:
    """Draw a name for a finished file, by the time of its end."""
    current = folder / NAME
    return current.with_name(f"{current.stem}.{at_ns}-{uuid.uuid4().hex[:8]}{current.suffix}")


def leave(folder: Path, *lines: LoggedRequest | Reading) -> None:
    """Put *lines* beside Envoy's log, in a file of their own, which appears whole."""
    text = "".join(f"{line.model_dump_json(exclude_none=True)}\n" for line in lines)
    write_text(another(folder, time.time_ns()), text)
