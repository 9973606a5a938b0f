"""The database of usage: SQLite in the store, or PostgreSQL by its URL. Both take the same statements."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stages.parts.base.errors import ConfigError, TransientError

FILE: Final = "usage.db"
"""In the store: one for all of its endpoints."""
URL_VARIABLE: Final = "SLIPWAY_USAGE_URL"
"""PostgreSQL's URL. It holds a password, so no argument and no record has it."""
TIMEOUT_S: Final = 30.0
POSTGRESQL: Final[dict[str, Any]] = {
    "autocommit": True,
    "connect_timeout": 5,  # seconds
    "application_name": "slipway",
    "client_encoding": "UTF8",  # of a database without an encoding (SQL_ASCII), too
    "tcp_user_timeout": 1000 * 30,  # a connection whose other end is gone does not hang
}
ENCODE: Final = "postgresql://user:password@host/database; in the password, special characters as %40 for @"
LOCK: Final = 0x511B_3A7E
"""A number of our own, for PostgreSQL's lock while tables are made."""
TABLES: Final = Path(__file__).with_name("tables.sql")
ADDED: Final = (("requests", "server"), ("requests", "endpoint"), ("counted", "endpoint"))
"""Tables, and columns that those of earlier versions lack."""


@dataclass(frozen=True)
class Database:
    """A connection. In statements ``?`` marks a value."""

    connection: Any
    """From ``sqlite3`` or ``psycopg``; it commits each statement unless there is a transaction."""
    begin: str
    mark: str
    columns: str
    """The statement that lists the columns of a table."""
    alone: str = ""
    """The statement by which a transaction waits for others that make tables; SQLite's transactions wait anyway."""

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(statement.replace("?", self.mark), values)
        return list(cursor.fetchall()) if cursor.description else []

    def insert(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows that all have the same columns; those whose primary key is there already are left out."""
        if rows:
            marks = ", ".join(self.mark for _ in rows[0])
            statement = f"INSERT INTO {table} ({', '.join(rows[0])}) VALUES ({marks}) ON CONFLICT DO NOTHING"  # noqa: S608
            self.connection.cursor().executemany(statement, [list(row.values()) for row in rows])

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self.execute(self.begin)
        try:
            yield
        except BaseException:
            self.execute("ROLLBACK")
            raise
        self.execute("COMMIT")


@contextlib.contextmanager
def opened(root: Path, url: str = "") -> Iterator[Database]:
    """Open the database at *url*, or without one that of the store at *root*, and make its tables if there are none.
    Others who write to SQLite's file are waited for, for ``TIMEOUT_S`` at most. Raises as ``check_url``; TransientError
    if it can't be reached, read or written, in the block too: the message never has the password."""
    with _postgresql(url) if url else _sqlite(root / FILE) as database:
        _make_tables(database)
        yield database


def usage_url() -> str:
    """Read where the endpoints that this process starts put their usage; empty for SQLite. Raises as ``check_url``."""
    url = os.environ.get(URL_VARIABLE, "")
    check_url(url)
    return url


def check_url(url: str) -> None:
    """Raise ConfigError if it is no URL of PostgreSQL, without telling what it holds: that may be the password."""
    if not url:
        return
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    try:
        if not url.startswith(("postgresql://", "postgres://")):
            raise ConfigError("the URL of the usage database does not begin with postgresql://", hint=ENCODE)
        parts = conninfo_to_dict(url)
    except ProgrammingError:
        raise ConfigError("the URL of the usage database is not valid", hint=ENCODE) from None
    # A password with an @ or a / that is not encoded ends in the wrong place, and errors would show it.
    if any("@" in str(parts.get(part, "")) for part in ("host", "port", "dbname")):
        raise ConfigError("the URL of the usage database is not valid", hint=ENCODE)


@contextlib.contextmanager
def _sqlite(path: Path) -> Iterator[Database]:
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=TIMEOUT_S, isolation_level=None)) as connection:
            yield Database(connection, "BEGIN IMMEDIATE", "?", "SELECT name FROM pragma_table_info(?)")
    except sqlite3.Error as error:
        raise TransientError(f"{path} can't be read or written: {error}") from error


@contextlib.contextmanager
def _postgresql(url: str) -> Iterator[Database]:
    import psycopg

    check_url(url)
    columns = "SELECT column_name FROM information_schema.columns WHERE table_name = ?"
    try:
        with contextlib.closing(psycopg.connect(url, **POSTGRESQL)) as connection:
            yield Database(connection, "BEGIN", "%s", columns, f"SELECT pg_advisory_xact_lock({LOCK})")
    except psycopg.Error as error:
        reason = " ".join(str(error).split())
        raise TransientError(f"the usage database can't be reached: {reason}", hint=f"see {URL_VARIABLE}") from error


def _make_tables(database: Database) -> None:
    """Make the tables, and the columns that those of earlier versions lack, unless all is there."""
    if ("endpoint",) in database.execute(database.columns, ["counted"]):
        return
    with database.transaction():
        if database.alone:
            database.execute(database.alone)
        for table, column in ADDED:
            columns = database.execute(database.columns, [table])
            if columns and (column,) not in columns:
                database.execute(f"ALTER TABLE {table} ADD COLUMN {column} TEXT")
        for statement in TABLES.read_text(encoding="utf-8").split(";"):
            database.execute(statement)
