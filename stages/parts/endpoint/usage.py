"""Who used what: one row for each request, taken from Envoy's access log into a database.

Each line is taken once into a database, whoever takes it and however often they are interrupted: the place up to which
a file was read is stored in the same transaction as its rows, under the file's first line, which no other has on any
machine. So nothing is lost while the database can't be reached: the lines wait in their files.

Tokens that vLLM has counted and no line reports are those of the client ``UNATTRIBUTED``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from scoring.percentiles import p95
from stages.parts.base.files import exclusive, write_text
from stages.parts.base.store import Record
from stages.parts.endpoint import access_log
from stages.parts.endpoint.access_log import LoggedRequest
from stages.parts.endpoint.clients import NOBODY, UNATTRIBUTED, TokenPrices
from stages.parts.endpoint.database import Database
from stages.parts.endpoint.routing import OFFERED

LOG_BYTES: Final = 16 << 20
"""The length at which Envoy begins another file."""
CHUNK_BYTES: Final = 4 << 20
SECONDS_PER_HOUR: Final = 3600
ID_FILE: Final = ".endpoint"
"""Beside the folder of the log: the name by which the database knows this endpoint, which no other has."""
NOT_KEPT: Final = {"answered", "copy_of", "content_type", "server_ttft_us", "server_answer_us"}
"""What the log says of a request beyond its row."""
GROUPS: Final = ("client", "model", "month", "release", "path", "status")
LOCK_FILE: Final = """INSERT INTO taken (file, bytes) VALUES (?, 0)
ON CONFLICT (file) DO UPDATE SET bytes = taken.bytes RETURNING bytes"""
"""Whoever else takes the same file waits until this transaction has ended."""
UNREPORTED: Final = Path(__file__).with_name("unreported.sql")

Complete: TypeAlias = Callable[[LoggedRequest], LoggedRequest]


def unchanged(request: LoggedRequest) -> LoggedRequest:
    return request


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
    """Its share of the price; None if there is no price."""


class EndpointPrice(NamedTuple):
    """What all servers of one endpoint cost, and how the clients of that endpoint share it."""

    per_hour: float
    shared_by: Literal["tokens", "time"]
    until: datetime
    """The end of what is charged, which begins with the endpoint's first request; idle hours count."""


class Used(NamedTuple):
    """A request, or the tokens of a server's start that no request reports; these have neither time nor status."""

    endpoint: str | None
    """None in rows that were taken before endpoints were told apart."""
    at: float | None
    client: str
    model: str
    release: str | None
    path: str | None
    status: int | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    ttft_ms: float | None
    duration_ms: float

    @property
    def month(self) -> str | None:
        """In UTC, such as 2026-01."""
        return None if self.at is None else f"{datetime.fromtimestamp(self.at, UTC):%Y-%m}"

    def amount(self, shared_by: Literal["tokens", "time"]) -> float:
        if shared_by == "time":
            return self.duration_ms
        return (self.prompt_tokens or 0) + (self.output_tokens or 0)


def take_in(database: Database, folder: Path, *, remove: bool = False, complete: Complete = unchanged) -> int:
    """Take in what was written to *folder* since the last time, each request as *complete* returns it. Returns the
    number of lines. *remove* files that are finished once they were read: for whoever alone knows into which database
    they go, such as the endpoint's supervisor."""
    count, current = 0, folder / access_log.NAME
    paths = access_log.files(folder)
    finished = current.exists()  # before reading: Envoy writes nothing more to a file once it has opened the next
    for path in paths:
        while lines := _take_file(database, path, complete):
            count += lines
        if remove and finished and path != current:
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                path.unlink()  # before its key: whoever has it open must see that it is gone
                database.execute("DELETE FROM taken WHERE file = ?", [_key(file.readline())])
    return count


def rotate(folder: Path, limit: int = LOG_BYTES) -> bool:
    """Rename a log that is longer than *limit* bytes. Returns whether Envoy has to be asked to open another one."""
    current = folder / access_log.NAME
    with contextlib.suppress(FileNotFoundError):
        status = current.stat()
        if status.st_size > limit:
            current.rename(access_log.another(folder, status.st_mtime_ns))
    return not current.exists()


def sums(
    database: Database, since: datetime, by: Sequence[str], price: EndpointPrice | TokenPrices | None = None
) -> list[Sum]:
    """Sum up the requests since then by groups of ``GROUPS``, those with the most tokens first.

    With the tokens of ``UNATTRIBUTED``, all groups together have what vLLM has counted. With an endpoint's price, each,
    which is one model on one machine, is charged for its own hours, and those who used it share them.
    """
    fields = ", ".join(Used._fields)
    requests = database.execute(f"SELECT {fields} FROM requests WHERE at >= ?", [since.timestamp()])  # noqa: S608
    rows = [*map(Used._make, requests), *_unattributed(database, since)]
    cost_of = _cost_of(rows, price) if price else None
    groups: dict[tuple[Any, ...], list[Used]] = defaultdict(list)
    for row in rows:
        groups[tuple(getattr(row, name) for name in by)].append(row)
    totals = [
        _sum(dict(zip(by, group, strict=True)), members, sum(map(cost_of, members)) if cost_of else None)
        for group, members in groups.items()
    ]
    return sorted(totals, key=lambda total: -(total.prompt_tokens + total.output_tokens))


def _cost_of(rows: Iterable[Used], price: EndpointPrice | TokenPrices) -> Callable[[Used], float]:
    """Return what tells the cost of a row: that of its tokens, or by what a token or a millisecond costs at its
    endpoint, or else model."""
    if isinstance(price, TokenPrices):
        return lambda row: price.cost(row.model, row.prompt_tokens or 0, row.output_tokens or 0)
    endpoints: dict[str, list[Used]] = defaultdict(list)
    for row in rows:
        endpoints[row.endpoint or row.model].append(row)
    rates, end = {}, price.until.timestamp()
    for endpoint, members in endpoints.items():
        hours = (end - min((row.at for row in members if row.at is not None), default=end)) / SECONDS_PER_HOUR
        amount = sum(row.amount(price.shared_by) for row in members)
        rates[endpoint] = price.per_hour * max(0.0, hours) / amount if amount else 0.0
    return lambda row: rates[row.endpoint or row.model] * row.amount(price.shared_by)


def _sum(group: dict[str, Any], rows: Sequence[Used], cost: float | None) -> Sum:
    requests = [(row, row.status) for row in rows if row.status is not None]
    answered = [row for row, status in requests if 200 <= status < 300]
    return Sum(
        group=group,
        requests=len(requests),
        refused=sum(400 <= status < 500 for _, status in requests),
        failed=sum(status >= 500 or status < 200 for _, status in requests),
        prompt_tokens=sum(row.prompt_tokens or 0 for row in rows),
        cached_tokens=sum(row.cached_tokens or 0 for row in rows),
        output_tokens=sum(row.output_tokens or 0 for row in rows),
        unknown=sum(row.prompt_tokens is None and OFFERED[row.path or ""] == "POST" for row in answered),
        ttft_p95_ms=p95([row.ttft_ms for row in answered if row.output_tokens and row.ttft_ms is not None]),
        duration_p95_ms=p95([row.duration_ms for row in answered]),
        seconds=sum(row.duration_ms for row in rows) / 1000,
        cost=cost,
    )


def _unattributed(database: Database, since: datetime) -> list[Used]:
    """Query what each start of a server has counted and no request reports. Never less than nothing: what was under way
    at the beginning of the period is reported by its request as a whole, but counted only in part."""
    rows = []
    for endpoint, model, release, *counts in database.execute(
        UNREPORTED.read_text(encoding="utf-8"), [since.timestamp()]
    ):
        prompt, output = (max(0, int(count)) for count in counts)
        if prompt or output:
            rows.append(Used(endpoint, None, UNATTRIBUTED, model, release, None, None, prompt, None, output, None, 0.0))
    return rows


def _take_file(database: Database, path: Path, complete: Complete) -> int:
    """Take in the next lines of one file, in one transaction. Returns their number; 0 if there is none."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return 0
    with file:
        first = file.readline()
        key = _key(first)
        offsets = database.execute("SELECT bytes FROM taken WHERE file = ?", [key])
        if not first.endswith(b"\n") or (offsets and offsets[0][0] >= os.fstat(file.fileno()).st_size):
            return 0
        endpoint = _endpoint(path.parent)
        with database.transaction():
            ((start,),) = database.execute(LOCK_FILE, [key])
            if not os.fstat(file.fileno()).st_nlink:  # it was read and removed meanwhile, and its offset is gone
                return 0
            file.seek(start)
            lines = file.read(CHUNK_BYTES).rpartition(b"\n")[0]
            if not lines:
                return 0
            _insert(database, lines.split(b"\n"), endpoint, complete)
            database.execute("UPDATE taken SET bytes = ? WHERE file = ?", [start + len(lines) + 1, key])
            return lines.count(b"\n") + 1


def _endpoint(folder: Path) -> str:
    """Read the name of the endpoint whose log is in *folder*; the first time, draw it."""
    path = folder.parent / ID_FILE
    if not path.exists():
        with exclusive(path.with_name(".locks") / "endpoint-name", "the endpoint's name"):
            if not path.exists():
                write_text(path, uuid.uuid4().hex)
    return path.read_text()


def _insert(database: Database, lines: Sequence[bytes], endpoint: str, complete: Complete) -> None:
    requests, readings = [], []
    for line in map(access_log.parsed, lines):
        if isinstance(line, access_log.Reading):
            readings.append(line.model_dump() | {"endpoint": endpoint})
        elif line and line.path in OFFERED:
            named = {"client": line.client or NOBODY, "model": line.answered or line.model, "endpoint": endpoint}
            requests.append(complete(line).model_dump(exclude=NOT_KEPT) | named)
    database.insert("requests", requests)
    database.insert("counted", readings)


def _key(first: bytes) -> str:
    """Hash the first line of a file, which has a random id and a time: so the database knows the file."""
    return hashlib.sha256(first).hexdigest()
