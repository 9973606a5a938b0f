"""What is done to a store, one program after the other; what of a store matters; and what is wrong with one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

from pipeline.upkeep.checking import Digests, check
from stages.parts.base.errors import NothingToServe
from stages.parts.base.program import OUTPUTS_VARIABLE, RUN_VARIABLE
from stages.parts.base.store import STORE_VARIABLE, ModelStore
from stages.parts.endpoint.endpoint import published
from stages.parts.machine.lock import LOCK_VARIABLE
from stages.parts.records.variant import read_variant
from stages.parts.releases import release as releases
from stages.parts.releases.listing import catalogue
from tests.hub.server import HubServer
from tests.samples import MODEL
from tests.serving import DEMO, REPOSITORY

SMALL_BYTES: Final = 1 << 20
"""A larger file is never changed where it is, so that copies of a store may share it."""
TIMEOUT_S: Final = 300
LATER_S: Final = 2 * 3600
VOLATILE: Final = frozenset(
    (
        "acquired_at",
        "created_at",
        "decided_at",
        "started_at",
        "ended_at",
        "seconds",
        "peak_memory_bytes",
        "source",
        "run",
    )
)
"""What two undisturbed runs record differently: times, memory, where the Hub listened, and their own names."""
HASHES_OF_TIMES: Final = ("provenance.json", "bom.cdx.json")


class Step(NamedTuple):
    """A program that is run in the store as the steps before it left it."""

    name: str
    module: str
    arguments: tuple[str, ...]
    run: str = "run-1"
    killed: bool = True
    """False for what is no part of the product."""
    repeats: bool = True
    """False for what has nothing to do a second time, and says so."""


class Hub(NamedTuple):
    url: str
    commits: tuple[str, str]
    """The demo's model, and the same with another card."""
    server: HubServer


@contextmanager
def hub() -> Iterator[Hub]:
    with HubServer() as server:
        # Those that are killed hang up.
        server._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        files: dict[str, bytes | Path] = {path.name: path for path in (DEMO / "model").iterdir() if path.is_file()}
        first = server.add_repo(MODEL, files)
        yield Hub(
            server.url, (first, server.add_repo(MODEL, files | {"README.md": b"# another\n"}, revision="next")), server
        )


def steps(hub: Hub, variants: tuple[str, ...] = ("fp16", "int8")) -> list[Step]:
    """A first release; another commit, of which fp16 is made anew and published; the first one again, of which what was
    put aside is taken up; and a rollback."""
    model = ("--model", MODEL)
    optimize = json.dumps({"variants": variants, "force_publish": True})
    only_fp16 = json.dumps({"variants": ["fp16"], "force_publish": True})
    select = ("--profile", '{"name": "balanced"}', "--optimize")
    first, second = hub.commits
    return [
        Step("acquire", "stages.acquire", (*model, "--commit", first)),
        *(Step(f"make {name}", "stages.optimize", (*model, "--method", name)) for name in variants),
        Step("measure", "tests.campaign.recorded", variants, killed=False),
        Step("publish", "stages.select", (*model, *select, optimize)),
        Step("acquire another", "stages.acquire", (*model, "--commit", second), "run-2"),
        Step("put aside", "stages.optimize", (*model, "--method", "fp16"), "run-2"),
        Step("measure another", "tests.campaign.recorded", ("fp16",), "run-2", killed=False),
        Step("publish another", "stages.select", (*model, *select, only_fp16), "run-2"),
        Step("acquire the first", "stages.acquire", (*model, "--commit", first), "run-3"),
        Step("take up", "stages.optimize", (*model, "--method", "fp16"), "run-3"),
        Step("go back", "pipeline", ("rollback", MODEL, "--store", "."), "run-3", repeats=False),
    ]


@dataclass(frozen=True)
class Place:
    """A folder with a store, and the Hub."""

    folder: Path
    hub: Hub

    @property
    def store(self) -> ModelStore:
        return ModelStore(self.folder / "store", MODEL)

    def environment(self, run: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "SLIPWAY_"))}
        own = {
            STORE_VARIABLE: str(self.store.root),
            OUTPUTS_VARIABLE: str(self.folder / "outputs"),
            LOCK_VARIABLE: str(self.folder / "machine.lock"),
            RUN_VARIABLE: run,
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.folder / "hf"),
            "PYTHONPATH": str(REPOSITORY),
        }
        return kept | own

    def start(self, step: Step, how: str = "") -> subprocess.Popen[str]:
        """Start a step; *how*: see ``calls``."""
        self.store.root.mkdir(parents=True, exist_ok=True)
        program = ["tests.campaign.calls", how, step.module] if how else [step.module]
        return subprocess.Popen(
            [sys.executable, "-m", *program, *step.arguments],
            env=self.environment(step.run),
            cwd=self.store.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, step: Step, how: str = "") -> tuple[int, str]:
        """Run a step to its end. Returns its exit status and what it printed."""
        with self.start(step, how) as process:
            printed, _ = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, printed

    def again(self, step: Step, after: dict[str, str]) -> list[str]:
        """Run a step that was disturbed again. Returns what is wrong afterwards: what matters is not as it was *after*
        the undisturbed step, or something is left."""

        def different() -> list[str]:
            return differences(but_for_aside(self.store), without_aside(after))

        is_over = not step.repeats and not different()
        status, printed = self.run(step)
        wrong = [f"the next run ended with {status}: {printed[-500:]}"] if status and not is_over else []
        return wrong + faults(self.store) + [f"left: {path}" for path in unreferenced(self.store)] + different()


def copy(source: Path, target: Path) -> None:
    """Copy a store as it is, in place of *target*: names of one file stay names of one file."""
    shutil.rmtree(target, ignore_errors=True)
    known: dict[int, Path] = {}

    def placed(path: str, to: str) -> None:
        status = os.stat(path)  # noqa: PTH116
        if status.st_size >= SMALL_BYTES:
            os.link(path, to)
        elif first := known.get(status.st_ino):
            os.link(first, to)
        else:
            known[status.st_ino] = Path(shutil.copy2(path, to))

    shutil.copytree(source, target, symlinks=True, copy_function=placed)


def age(store: ModelStore) -> None:
    """Let two hours pass, as far as files show it."""
    before = time.time() - LATER_S
    for path in store.path.rglob(".*"):
        with suppress(FileNotFoundError):
            os.utime(path, (before, before), follow_symlinks=False)


def faults(store: ModelStore) -> list[str]:
    """Whatever a reader of the store would take for something that it is not."""
    if not store.path.exists():
        return []
    found = [f"{each.paths}: {each.problem}" for each in check(store, Digests()).damaged]
    try:
        catalogue(store)
        releases.decisions(store)
        read_variant(published(store))
    except NothingToServe:
        pass
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def unreferenced(store: ModelStore) -> tuple[str, ...]:
    """What is left by nobody for nobody."""
    return check(store, Digests()).unreferenced


def what_matters(store: ModelStore) -> dict[str, str]:
    """The content of a store by path, but for times, logs and what happened in a run."""
    seen: dict[str, str] = {}
    for path in sorted(store.path.rglob("*")):
        place = path.relative_to(store.path)
        if place.parts[0] in (".locks", ".building", "runs"):
            continue
        if path.is_symlink():
            seen[str(place)] = str(path.readlink())
        elif path.name == releases.HISTORY:
            seen[str(place)] = str(
                [(move.kind, move.release, move.before, move.result) for move in releases.history(store)]
            )
        elif path.name in HASHES_OF_TIMES:
            seen[str(place)] = str(sorted(json.loads(path.read_bytes())))
        elif path.suffix == ".json":
            seen[str(place)] = json.dumps(lasting(json.loads(path.read_bytes())), sort_keys=True)
        elif path.is_file():
            seen[str(place)] = sha256(path.read_bytes()).hexdigest()
    return seen


def without_aside(seen: Mapping[str, str]) -> dict[str, str]:
    """What was put aside may be lost: it is made again when it is asked for."""
    return {path: text for path, text in seen.items() if not path.startswith(".aside")}


def but_for_aside(store: ModelStore) -> dict[str, str]:
    return without_aside(what_matters(store))


def lasting(value: Any) -> Any:
    """A document without what differs each time."""
    if isinstance(value, dict):
        return {name: lasting(each) for name, each in value.items() if name not in VOLATILE}
    return [lasting(each) for each in value] if isinstance(value, list) else value


def differences(seen: dict[str, str], expected: dict[str, str]) -> list[str]:
    paths: Iterable[str] = sorted(seen.keys() | expected.keys())
    return [
        f"{path}: {seen.get(path, 'missing')[:200]} instead of {expected.get(path, 'nothing')[:200]}"
        for path in paths
        if seen.get(path) != expected.get(path)
    ]
