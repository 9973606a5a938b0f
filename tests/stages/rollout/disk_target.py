"""A platform for rollouts in a folder: real server processes, and a split that is a file.

Every call can be held by a test, before or after it has done its work, so that a rollout can be killed just there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from stages.parts.base.errors import Conflict, ServerFailed, TransientError
from stages.parts.base.files import write_json
from stages.parts.base.serving_settings import Serving
from stages.parts.records.rollout import LOCAL, Counters
from stages.parts.releases.release import Split
from stages.parts.vllm.client import http
from stages.parts.vllm.prometheus import read_counters
from stages.rollout.slices import CopiedRequest
from stages.rollout.target import Replicas

SERVER = Path(__file__).with_name("release_server.py")
ANSWER_S = 60
EMPTY: dict[str, Any] = {"stable": None, "canary": None, "percent": 0, "standby": None}


class DiskTarget:
    def __init__(self, folder: Path, releases: Path) -> None:
        self.folder, self.releases, self.name = folder, releases, LOCAL
        (folder / "servers").mkdir(parents=True, exist_ok=True)

    def split(self) -> Split:
        found = self._read()
        with self._noted("split", found["percent"]):
            return Split(**found)

    def who(self) -> str:
        return "somebody"

    def announce(self, reason: str, note: str) -> None:
        with (self.folder / "announced").open("a") as file:
            file.write(f"{reason}: {note}\n")

    def changes(self, release: str) -> str:
        return ""

    def serving_of(self, release: str) -> Serving:
        return Serving()

    def check_room(self, release: str) -> None:
        pass

    def replicas(self, release: str) -> Replicas:
        raise NotImplementedError

    def servers(self, release: str) -> tuple[int, int]:
        return 1, int(self._alive(release))

    def deploy(self, release: str) -> None:
        with self._noted("deploy"):
            found = self._read()
            if release != found["stable"]:
                self._write(found | {"canary": release})
            if not self._alive(release):
                self._start(release)

    def ready(self, release: str) -> bool:
        with self._noted("ready"):
            try:
                return http().get(f"{self.url(release)}/health", timeout=ANSWER_S).is_success
            except httpx.HTTPError as error:
                raise ServerFailed(f"the server of {release} is gone") from error

    def waits_for(self, release: str) -> str:
        return f"{release} is on disk alone"

    def url(self, release: str) -> str:
        state = self._state(release)
        if state is None:
            raise TransientError(f"{release} is not being served")
        return f"http://127.0.0.1:{state['port']}"

    def prepare(self, release: str, percent: int) -> str:
        return f"no replicas for {percent} %" if (self.releases / release / "alone").exists() else ""

    def shift(self, release: str, percent: int) -> None:
        with self._noted("shift", percent):
            found = self._read()
            if found["canary"] != release:
                raise Conflict(f"{release} is not the canary")
            self._write(found | {"percent": percent})

    def cannot_copy(self) -> str:
        return "a disk copies nothing" if (self.folder / "copies nothing").exists() else ""

    def copy(self, release: str, percent: int) -> None:
        with self._noted("copy", percent):
            self._write(self._read() | {"percent": 0})

    def copies(self, release: str) -> Sequence[CopiedRequest]:
        return ()

    def promote(self, release: str) -> None:
        with self._noted("promote"):
            found = self._read()
            if found["stable"] != release:
                assert found["canary"] == release
                self._write({"stable": release, "canary": None, "percent": 0, "standby": found["stable"]})

    def withdraw(self, release: str, *, first: bool = False) -> None:
        with self._noted("withdraw"):
            found = self._read()
            if found["stable"] == release:
                if not first:
                    raise Conflict(f"{release} is the stable release")
                self._write(EMPTY)
            if found["canary"] == release:
                self._write(found | {"canary": None, "percent": 0})
            self.stop(release)

    def counters(self, release: str) -> Counters:
        self._wait_if_held(f"before counters {self._read()['percent']}")
        state = self._state(release)
        try:
            text = http().get(f"{self.url(release)}/metrics", timeout=ANSWER_S).text
        except httpx.HTTPError as error:
            if self._state(release) != state:
                raise TransientError(f"the server of {release} is being restarted") from error
            raise ServerFailed(f"the server of {release} is gone") from error
        return read_counters(text, str(state and state["pid"]))

    def client_url(self) -> str:
        return self.url(self._read()["stable"])

    def kill(self, release: str) -> Callable[[], bool]:
        self.stop(release)
        return lambda: False  # nothing starts another one

    def last_start(self, release: str) -> tuple[float | None, str]:
        return None, ""

    def calls(self) -> list[str]:
        """The calls that changed something, in order."""
        try:
            return (self.folder / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []

    def hold(self, where: str) -> None:
        """Stop at *where*, such as ``before shift 10``, until the caller is killed."""
        (self.folder / "held").unlink(missing_ok=True)
        (self.folder / "hold").write_text(where)

    def release_hold(self) -> None:
        (self.folder / "hold").unlink(missing_ok=True)

    def held(self) -> bool:
        return (self.folder / "held").exists()

    def stop(self, release: str) -> None:
        if state := self._state(release):
            (self.folder / "servers" / f"{release}.json").unlink()
            with contextlib.suppress(ProcessLookupError):
                os.kill(state["pid"], signal.SIGKILL)

    def stop_all(self) -> None:
        for path in (self.folder / "servers").glob("*.json"):
            self.stop(path.stem)

    @contextlib.contextmanager
    def _noted(self, call: str, percent: int | None = None) -> Iterator[None]:
        name = call if percent is None else f"{call} {percent}"
        self._wait_if_held(f"before {name}")
        yield
        if call not in ("split", "ready"):
            with (self.folder / "calls").open("a") as file:
                file.write(f"{name}\n")
        self._wait_if_held(f"after {name}")

    def _wait_if_held(self, where: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            while (self.folder / "hold").read_text() == where:
                (self.folder / "held").touch()
                time.sleep(0.02)

    def _start(self, release: str) -> None:
        state = self.folder / "servers" / f"{release}.json"
        state.unlink(missing_ok=True)
        server = subprocess.Popen(
            [sys.executable, "-I", "-S", str(SERVER), str(self.releases / release), str(state)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + ANSWER_S
        while not state.exists() and server.poll() != -signal.SIGKILL:  # a rollout may stop it at once
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)

    def _alive(self, release: str) -> bool:
        try:
            return http().get(f"{self.url(release)}/metrics", timeout=ANSWER_S).is_success
        except (httpx.HTTPError, TransientError):
            return False

    def _state(self, release: str) -> dict[str, int] | None:
        try:
            found: dict[str, int] = json.loads((self.folder / "servers" / f"{release}.json").read_text())
            return found
        except FileNotFoundError:
            return None

    def _read(self) -> dict[str, Any]:
        try:
            return EMPTY | json.loads((self.folder / "platform.json").read_text())
        except FileNotFoundError:
            return dict(EMPTY)

    def _write(self, document: dict[str, Any]) -> None:
        write_json(self.folder / "platform.json", document)
