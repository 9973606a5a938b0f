"""Who used what: one row for each request, taken from Envoy's access log into a database.

Each line is taken once into a database, whoever takes it and however often they are interrupted: the place up to which
a file was read is stored in the same transaction as its rows, under the file's first line, which no other has on any
machine. So nothing is lost while the database can't be reached: the lines wait in their files.

Tokens that vLLM has counted and no line tells are the client ``UNATTRIBUTED``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

from scoring.percentiles import p95
from stages.parts.base.record import Record
from stages.parts.endpoint import access_log
from stages.parts.endpoint.clients import NOBODY, UNATTRIBUTED
from stages.parts.endpoint.database import Database
from stages.parts.endpoint.offered import OFFERED

LOG_BYTES: Final = 16 << 20
"""The length at which Envoy begins another file."""
CHUNK_BYTES: Final = 4 << 20
SECONDS_PER_HOUR: Final = 3600
Basis = Literal["tokens", "time"]
COLUMNS: Final = (
    "at",
    "client",
    "model",
    "release",
    "server",
    "path",
    "status",
    "flags",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "ttft_ms",
    "duration_ms",
)
GROUPS: Final = ("client", "model", "release", "path", "status")
SUMMED: Final = (*GROUPS, "prompt_tokens", "cached_tokens", "output_tokens", "ttft_ms", "duration_ms")
INSERT_REQUEST: Final = f"INSERT INTO requests (id, {', '.join(COLUMNS)}) VALUES (?{', ?' * len(COLUMNS)})"  # noqa: S608
INSERT_READING: Final = f"""INSERT INTO counted ({", ".join(access_log.Reading.model_fields)})
VALUES (?{", ?" * (len(access_log.Reading.model_fields) - 1)}) ON CONFLICT (server, at) DO NOTHING"""  # noqa: S608
LOCK_FILE: Final = """INSERT INTO taken (file, bytes) VALUES (?, 0)
ON CONFLICT (file) DO UPDATE SET bytes = taken.bytes RETURNING bytes"""
"""Whoever else takes the same file waits until this transaction has ended."""
LEFT: Final = """WITH read AS (
    SELECT server, model, release, max(at) AS until,
        max(prompt_tokens) - COALESCE(max(CASE WHEN at <= ? THEN prompt_tokens END), 0) AS prompt,
        max(output_tokens) - COALESCE(max(CASE WHEN at <= ? THEN output_tokens END), 0) AS output,
        COALESCE(max(CASE WHEN at <= ? THEN at END), 0) AS since
    FROM counted GROUP BY server, model, release HAVING max(at) > ?
)
SELECT read.model, read.release, read.prompt - COALESCE(sum(requests.prompt_tokens), 0),
    read.output - COALESCE(sum(requests.output_tokens), 0)
FROM read LEFT JOIN requests ON requests.server = read.server
    AND requests.at + requests.duration_ms / 1000 > read.since
    AND requests.at + requests.duration_ms / 1000 <= read.until
GROUP BY read.server, read.model, read.release, read.prompt, read.output"""
"""For each start of a server: what it has counted between two readings, less the requests that ended between them."""


class Sum(Record):
    """The requests of one group."""

    group: dict[str, str | int | None]
    requests: int
    refused: int
    """Answered with 4xx."""
    failed: int
    """Answered with 5xx, or not at all."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    unknown: int
    """Answers that did not say what they used: cut before the first token, or by the end of Envoy."""
    ttft_p95_ms: float | None
    duration_p95_ms: float | None
    seconds: float
    """The durations of all requests together."""
    cost: float | None = None
    """Its share of the price; None: there is no price."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


def take_in(database: Database, folder: Path, *, remove: bool = False) -> int:
    """Take in what was written to *folder* since the last time. Returns the number of lines.

    Args:
        remove: remove files that are finished once they were read. For the endpoint's supervisor alone, which knows
            into which database they have to go.
    """
    count, current = 0, folder / access_log.NAME
    found = access_log.files(folder)
    finished = current.exists()  # before reading: Envoy writes nothing more to a file once it has opened the next
    for each in found:
        while read := _take_file(database, each):
            count += read
        if remove and finished and each != current:
            _remove(database, each)
    return count


def rotate(folder: Path, limit: int = LOG_BYTES) -> bool:
    """Rename a log that is longer than *limit* bytes. Returns whether Envoy has to be asked to open another one."""
    current = folder / access_log.NAME
    with contextlib.suppress(FileNotFoundError):
        told = current.stat()
        if told.st_size > limit:
            current.rename(access_log.another(folder, told.st_mtime_ns))
    return not current.exists()


def sums(database: Database, since: datetime, by: Sequence[str]) -> list[Sum]:
    """The requests since then, by groups of ``GROUPS``; those with the most tokens first.

    Tokens that no request tells are ``UNATTRIBUTED``'s, so that all groups together have what vLLM has counted.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    rows = database.execute(f"SELECT {', '.join(SUMMED)} FROM requests WHERE at >= ?", [since.timestamp()])  # noqa: S608
    for row in rows:
        told = dict(zip(SUMMED, row, strict=True))
        groups.setdefault(tuple(told[each] for each in by), []).append(told)
    left: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for told in _unattributed(database, since):
        left.setdefault(tuple(told.get(each) for each in by), []).append(told)
    found = [
        _sum(dict(zip(by, group, strict=True)), groups.get(group, []), left.get(group, []))
        for group in dict.fromkeys([*groups, *left])
    ]
    return sorted(found, key=lambda each: -each.tokens)


def hours(database: Database, since: datetime, now: datetime) -> float:
    """From then, or from the first request since then, until *now*; 0: there was none."""
    ((first,),) = database.execute("SELECT min(at) FROM requests WHERE at >= ?", [since.timestamp()])
    return max(0.0, now.timestamp() - first) / SECONDS_PER_HOUR if first else 0.0


def with_costs(found: Sequence[Sum], whole: float, by: Basis) -> list[Sum]:
    """Each group's part of the *whole* price, idle hours included: as its part of all tokens, or of the time that all
    requests took."""
    parts = [each.tokens if by == "tokens" else each.seconds for each in found]
    total = sum(parts)
    shares = [part / total if total else 0.0 for part in parts]
    return [each.model_copy(update={"cost": whole * share}) for each, share in zip(found, shares, strict=True)]


def _sum(group: dict[str, Any], rows: list[dict[str, Any]], left: list[dict[str, Any]]) -> Sum:
    answered = [row for row in rows if 200 <= row["status"] < 300]
    return Sum(
        group=group,
        requests=len(rows),
        refused=sum(400 <= row["status"] < 500 for row in rows),
        failed=sum(row["status"] >= 500 or row["status"] < 200 for row in rows),
        prompt_tokens=sum(row["prompt_tokens"] or 0 for row in (*rows, *left)),
        cached_tokens=sum(row["cached_tokens"] or 0 for row in rows),
        output_tokens=sum(row["output_tokens"] or 0 for row in (*rows, *left)),
        unknown=sum(row["prompt_tokens"] is None and OFFERED[row["path"]] == "POST" for row in answered),
        ttft_p95_ms=p95([row["ttft_ms"] for row in answered if row["output_tokens"] and row["ttft_ms"] is not None]),
        duration_p95_ms=p95([row["duration_ms"] for row in answered]),
        seconds=sum(row["duration_ms"] for row in rows) / 1000,
    )


def _unattributed(database: Database, since: datetime) -> list[dict[str, Any]]:
    """What each start of a server has counted that no request tells, as rows.

    Never less than nothing: what was under way at the beginning of the period is told by its request as a whole, but
    counted only in part.
    """
    found = []
    for model, release, *tokens in database.execute(LEFT, [since.timestamp()] * 4):
        prompt, output = (max(0, int(token)) for token in tokens)
        if prompt or output:
            told = {"client": UNATTRIBUTED, "model": model, "release": release}
            found.append({**told, "prompt_tokens": prompt, "output_tokens": output})
    return found


def _take_file(database: Database, path: Path) -> int:
    """Take in the next lines of one file, in one transaction; 0: there is none."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return 0
    with file:
        first = file.readline()
        key = _key(first)
        told = database.execute("SELECT bytes FROM taken WHERE file = ?", [key])
        if not first.endswith(b"\n") or (told and told[0][0] >= os.fstat(file.fileno()).st_size):
            return 0
        with database.transaction():
            ((start,),) = database.execute(LOCK_FILE, [key])
            if not os.fstat(file.fileno()).st_nlink:  # it was read and removed meanwhile, and where to is forgotten
                return 0
            file.seek(start)
            lines = file.read(CHUNK_BYTES).rpartition(b"\n")[0]
            if not lines:
                return 0
            _insert(database, lines.split(b"\n"))
            database.execute("UPDATE taken SET bytes = ? WHERE file = ?", [start + len(lines) + 1, key])
            return lines.count(b"\n") + 1


def _insert(database: Database, lines: Sequence[bytes]) -> None:
    requests, readings = [], []
    for line in lines:
        if request := access_log.parsed(line):
            requests += [_row(request)] if request.path in OFFERED else []
        elif reading := access_log.parsed_reading(line):
            readings.append(list(reading.model_dump().values()))
    database.insert(INSERT_REQUEST, requests)
    database.insert(INSERT_READING, readings)


def _row(request: access_log.LoggedRequest) -> list[Any]:
    told = request.model_dump() | {"client": request.client or NOBODY}
    return [request.id, *(told[each] for each in COLUMNS)]


def _remove(database: Database, path: Path) -> None:
    """Remove a file that was read to its end."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        path.unlink()  # before its key: whoever has it open must see that it is gone
        database.execute("DELETE FROM taken WHERE file = ?", [_key(file.readline())])


def _key(first: bytes) -> str:
    """A file is known by its first line, which has a random id and a time."""
    return hashlib.sha256(first).hexdigest()
