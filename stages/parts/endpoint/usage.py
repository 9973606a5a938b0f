"""Who used what: one row for each request, taken from Envoy's access log into a database.

Each line is taken once, whoever takes it and however often they are interrupted: the place up to which a file was read
is stored in the same transaction as its rows.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

from stages.parts.base.record import Record
from stages.parts.endpoint import access_log
from stages.parts.endpoint.offered import OFFERED

DATABASE: Final = "usage.db"
"""In the store: one for all of its endpoints."""
LOG_BYTES: Final = 16 << 20
"""The length at which Envoy begins another file."""
NOBODY: Final = "nobody"
"""The client of requests that were not let in."""
TIMEOUT_S: Final = 30.0
CHUNK_BYTES: Final = 4 << 20
SECONDS_PER_HOUR: Final = 3600
Basis = Literal["tokens", "time"]
COLUMNS: Final = (
    "at",
    "client",
    "model",
    "release",
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
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS requests (
    id TEXT NOT NULL, at REAL NOT NULL, client TEXT NOT NULL, model TEXT NOT NULL, release TEXT, path TEXT NOT NULL,
    status INTEGER NOT NULL, flags TEXT, prompt_tokens INTEGER, cached_tokens INTEGER, output_tokens INTEGER,
    ttft_ms REAL, duration_ms REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS requests_at ON requests (at);
CREATE TABLE IF NOT EXISTS taken (file TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
"""


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


@contextlib.contextmanager
def opened(root: Path, timeout_s: float = TIMEOUT_S) -> Iterator[sqlite3.Connection]:
    """The database of the store at *root*, which is made if there is none.

    Args:
        timeout_s: how long to wait for others who write to it.
    """
    connection = sqlite3.connect(root / DATABASE, timeout=timeout_s, isolation_level=None)
    try:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'taken'").fetchone():
            connection.executescript(SCHEMA)
        yield connection
    finally:
        connection.close()


def take_in(database: sqlite3.Connection, folder: Path) -> int:
    """Take in what Envoy has written to *folder* since the last time. Returns the number of requests.

    Files that Envoy has finished are removed once they were read.
    """
    current, count = folder / access_log.NAME, 0
    others = sorted(each for each in folder.glob(f"{current.stem}.*{current.suffix}"))
    finished = current.exists()  # before reading: Envoy writes nothing more to a file once it has opened the next
    for each in [*others, current]:
        while read := _take_file(database, each):
            count += read
        if each != current and finished:
            _forget(database, each)
    return count


def rotate(folder: Path, limit: int = LOG_BYTES) -> bool:
    """Rename a log that is longer than *limit* bytes. Returns whether Envoy has to be asked to open another one."""
    current = folder / access_log.NAME
    with contextlib.suppress(FileNotFoundError):
        told = current.stat()
        if told.st_size > limit:
            current.rename(current.with_name(f"{current.stem}.{told.st_mtime_ns}{current.suffix}"))
            return True
    return False


def sums(database: sqlite3.Connection, since: datetime, by: Sequence[str]) -> list[Sum]:
    """The requests since then, by groups of ``GROUPS``; those with the most tokens first."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    columns = ("client", "model", "release", "path", *COLUMNS[5:])
    rows = database.execute(f"SELECT {', '.join(columns)} FROM requests WHERE at >= ?", [since.timestamp()])  # noqa: S608
    for row in rows:
        told = dict(zip(columns, row, strict=True))
        groups.setdefault(tuple(told[each] for each in by), []).append(told)
    found = [_sum(dict(zip(by, group, strict=True)), rows) for group, rows in groups.items()]
    return sorted(found, key=lambda each: -each.tokens)


def hours(database: sqlite3.Connection, since: datetime, now: datetime) -> float:
    """From then, or from the first request since then, until *now*; 0: there was none."""
    (first,) = database.execute("SELECT min(at) FROM requests WHERE at >= ?", [since.timestamp()]).fetchone()
    return max(0.0, now.timestamp() - first) / SECONDS_PER_HOUR if first else 0.0


def with_costs(found: Sequence[Sum], whole: float, by: Basis) -> list[Sum]:
    """Each group's part of the *whole* price, idle hours included: as its part of all tokens, or of the time that all
    requests took."""
    parts = [each.tokens if by == "tokens" else each.seconds for each in found]
    total = sum(parts)
    shares = [part / total if total else 0.0 for part in parts]
    return [each.model_copy(update={"cost": whole * share}) for each, share in zip(found, shares, strict=True)]


def _sum(group: dict[str, Any], rows: list[dict[str, Any]]) -> Sum:
    answered = [row for row in rows if 200 <= row["status"] < 300]
    return Sum(
        group=group,
        requests=len(rows),
        refused=sum(400 <= row["status"] < 500 for row in rows),
        failed=sum(row["status"] >= 500 or row["status"] < 200 for row in rows),
        prompt_tokens=sum(row["prompt_tokens"] or 0 for row in rows),
        cached_tokens=sum(row["cached_tokens"] or 0 for row in rows),
        output_tokens=sum(row["output_tokens"] or 0 for row in rows),
        unknown=sum(row["prompt_tokens"] is None and OFFERED[row["path"]] == "POST" for row in answered),
        ttft_p95_ms=_p95([row["ttft_ms"] for row in answered if row["output_tokens"] and row["ttft_ms"] is not None]),
        duration_p95_ms=_p95([row["duration_ms"] for row in answered]),
        seconds=sum(row["duration_ms"] for row in rows) / 1000,
    )


def _p95(values: list[float]) -> float | None:
    """The smallest value that 95 % do not exceed."""
    return sorted(values)[-(-len(values) * 95 // 100) - 1] if values else None


def _take_file(database: sqlite3.Connection, path: Path) -> int:
    """Take in the next lines of one file, in one transaction; 0: there is none."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return 0
    with file, _transaction(database):
        key = _key(file.fileno())
        told = database.execute("SELECT bytes FROM taken WHERE file = ?", [key]).fetchone()
        start = told[0] if told else 0
        file.seek(start)
        lines = file.read(CHUNK_BYTES).rpartition(b"\n")[0]
        if not lines:
            return 0
        found = [each for line in lines.split(b"\n") if (each := access_log.parsed(line))]
        database.executemany(
            f"INSERT INTO requests (id, {', '.join(COLUMNS)}) VALUES (?{', ?' * len(COLUMNS)})",  # noqa: S608
            [_row(each) for each in found if each.path in OFFERED],
        )
        end = start + len(lines) + 1
        database.execute("INSERT OR REPLACE INTO taken (file, bytes) VALUES (?, ?)", [key, end])
        return max(1, len(found))


def _row(request: access_log.Request) -> list[Any]:
    told = request.model_dump() | {"client": request.client or NOBODY}
    return [request.id, *(told[each] for each in COLUMNS)]


def _forget(database: sqlite3.Connection, path: Path) -> None:
    """Remove a file that was read to its end."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        path.unlink()  # before its key: its number may be given to another file
        database.execute("DELETE FROM taken WHERE file = ?", [_key(file.fileno())])


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


def _key(descriptor: int) -> str:
    told = os.fstat(descriptor)
    return f"{told.st_dev}:{told.st_ino}"
