"""Reads every byte that a model's records refer to, and finds what no record refers to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from stages.parts.base.errors import Busy, DamagedModel
from stages.parts.base.files import exclusive, files_in, from_json, look_anew, sha256_of
from stages.parts.base.store import ModelStore, Record
from stages.parts.endpoint import endpoint
from stages.parts.records import rollout
from stages.parts.records.acquired import ACQUIRED, Acquired, files_digest
from stages.parts.records.evaluation import SAMPLES_SUFFIX
from stages.parts.records.variant import VARIANT, Variant
from stages.parts.releases.provenance import BOM, PROVENANCE
from stages.parts.releases.release import (
    CANDIDATE,
    CANDIDATE_METRICS,
    HISTORY,
    METRICS,
    PROBES,
    UNFINISHED,
    current_release,
)
from stages.parts.releases.signing import SIGNATURE

MANIFESTS: Final[dict[str, tuple[str, type[Acquired | Variant]]]] = {
    "base": (ACQUIRED, Acquired),
    "adapters/*": (ACQUIRED, Acquired),
    "optimized/*": (VARIANT, Variant),
    ".aside/optimized/*/*/*": (VARIANT, Variant),
    "releases/*": (VARIANT, Variant),
    "releases/*/adapters/*": (ACQUIRED, Acquired),
}
"""The directories that list their files, with the name and the kind of the record that does."""
MEASURED: Final = (
    "evaluations/*.json",
    ".aside/evaluations/*/*/*.json",
    "answers/*.json",
    "runs/*/measurements/*.json",
)
"""The records that have their samples beside them."""
DECIDED: Final = (
    *(METRICS, CANDIDATE_METRICS, "runs/*/*.json"),
    *(f"releases/*/{name}" for name in (METRICS, PROBES, PROVENANCE, BOM)),
)
MADE: Final = ("base", "adapters", "optimized", "releases", "evaluations", "answers", ".aside", ".building")
"""The folders in which a record refers to everything, when nothing is being made."""
STATE: Final = (
    *("runs", ".locks", "production", CANDIDATE, METRICS, CANDIDATE_METRICS, HISTORY, UNFINISHED),
    *(rollout.JOURNAL, rollout.REQUEST),
    *(endpoint.RECORD, endpoint.LOG, endpoint.PREVIOUS_LOG, endpoint.WANTED, endpoint.SERVERS),
)


class Damage(Record):
    """A file that is not what was recorded."""

    paths: tuple[str, ...]
    """In the model's folder; several that link to it."""
    problem: str
    releases: tuple[str, ...]
    """Those that it is a part of."""
    hint: str


class Checked(Record):
    """What is wrong with a model's files, if anything."""

    model: str
    files: int
    """How many were read."""
    size_bytes: int
    damaged: tuple[Damage, ...]
    unreferenced: tuple[str, ...]
    unreferenced_bytes: int


@dataclass
class Digests:
    """The sha256 of files; one that has several names is read once."""

    by_inode: dict[tuple[int, int], str] = field(default_factory=dict)
    size_bytes: int = 0

    def of(self, path: Path) -> str:
        status = path.stat()
        key = status.st_dev, status.st_ino
        if key not in self.by_inode:
            self.by_inode[key] = sha256_of(path)
            self.size_bytes += status.st_size
        return self.by_inode[key]


def check(store: ModelStore, digests: Digests) -> Checked:
    """Compare all files of a model with their records. What is being made meanwhile is left out."""
    referred = set[Path]()
    before, read_bytes = len(digests.by_inode), digests.size_bytes
    for _ in range(2):  # what was replaced while it was read is right the second time
        look_anew(store.path)
        problems: dict[str, list[Path]] = defaultdict(list)
        for path, problem in _problems(store, digests, referred):
            if problem:
                problems[problem].append(path)
        if not problems:
            break
    unreferenced = {path: size for path, size in sorted(_made(store)) if path not in referred}
    return Checked(
        model=store.model,
        files=len(digests.by_inode) - before,
        size_bytes=digests.size_bytes - read_bytes,
        damaged=tuple(_damage(store, problem, paths) for problem, paths in problems.items()),
        unreferenced=tuple(str(path.relative_to(store.path)) for path in unreferenced),
        unreferenced_bytes=sum(unreferenced.values()),
    )


def _problems(store: ModelStore, digests: Digests, referred: set[Path]) -> Iterator[tuple[Path, str]]:
    """Yield each file that a record refers to, and what is wrong with it, which is the same text for every link to it;
    add it to those that are *referred* to."""
    for pattern, (name, kind) in MANIFESTS.items():
        for folder in (path for path in _matching(store, pattern) if path.is_dir()):
            record, problem = _record(store, folder, name, kind)
            referred.add(folder / name)
            yield folder / name, problem
            for path, sha256 in ((folder / file.path, file.sha256) for file in (record.files if record else ())):
                referred.add(path)
                yield path, _wrong(path, sha256, digests)
    referred |= {*store.releases.glob(f"*/{SIGNATURE}")}
    for link in (store.production, store.path / CANDIDATE):
        is_broken = link.is_symlink() and not link.is_dir()
        yield link, f"it leads to {link.readlink()}, which is missing" if is_broken else ""
    for pattern in (*MEASURED, *DECIDED, rollout.JOURNAL):
        for path in _matching(store, pattern):
            document, samples = _document(path), path.with_suffix(SAMPLES_SUFFIX)
            referred |= {path, samples}
            yield path, f"{path.relative_to(store.path)} is not valid JSON" if document is None else ""
            if isinstance(document, dict) and pattern in MEASURED and "samples_sha256" in document:
                yield samples, _wrong(samples, document["samples_sha256"], digests)


def _matching(store: ModelStore, pattern: str) -> list[Path]:
    """List the paths that match, in order; anew if a folder vanished meanwhile."""
    while True:
        with suppress(FileNotFoundError):
            return sorted(store.path.glob(pattern))


def _record(
    store: ModelStore, folder: Path, name: str, kind: type[Acquired | Variant]
) -> tuple[Acquired | Variant | None, str]:
    """Read the record of a folder, and say what is wrong with it."""
    shown = f"{folder.relative_to(store.path)}/{name}"
    try:
        record = kind.read(folder / name)
    except DamagedModel as error:
        return None, str(error)
    if record is None:
        return None, f"{shown} is missing"
    digest = files_digest(record.files)
    named = folder.parent != store.releases or folder.name.endswith(digest[:12])
    return record, "" if digest == record.digest and named else f"{shown} was altered: it has another digest"


def _wrong(path: Path, recorded: str, digests: Digests) -> str:
    """Say what is wrong with a file; empty if it has the *recorded* sha256."""
    try:
        sha256 = digests.of(path)
    except FileNotFoundError:
        return f"{path.parent.name}/{path.name} is missing"
    except OSError as error:
        return f"{path.parent.name}/{path.name} can't be read: {error.strerror}"
    return "" if sha256 == recorded else f"it has sha256 {sha256[:12]}…, {recorded[:12]}… was recorded"


def _document(path: Path) -> Any:
    try:
        return from_json(path.read_bytes())
    except FileNotFoundError:  # it was replaced meanwhile
        return {}
    except (OSError, ValueError):
        return None


def _made(store: ModelStore) -> Iterator[tuple[Path, int]]:
    """Yield every file in the folders where records refer to everything, and what a model's folder does not have, with
    its size in bytes."""
    for entry in store.path.iterdir():
        if entry.name not in (*MADE, *STATE):
            yield entry, sum(status.st_size for _, status in files_in(entry))
    for path, status in files_in(*(store.path / name for name in MADE)):
        if not _in_work(store, path):
            yield path, status.st_size


def _in_work(store: ModelStore, path: Path) -> bool:
    """Whether another process is making what *path* belongs to."""
    place = path.relative_to(store.path).parts
    if place[0] != ".building" or not store.lock(place[1]).exists():
        return False
    try:
        with exclusive(store.lock(place[1]), place[1], wait=False):
            return False
    except Busy:
        return True


def _damage(store: ModelStore, problem: str, paths: list[Path]) -> Damage:
    """Say which releases a damaged file belongs to, and what to do."""
    places = [path.relative_to(store.path) for path in paths]
    releases = sorted({place.parts[1] for place in places if place.parts[0] == "releases"})
    backup = f"to mend it, move {store.path} away: slipway store restore DIR {store.model}"
    first = Path(*places[0].parts[: 1 if places[0].parts[0] == "base" else 2])
    if current_release(store) in releases:
        hint = f"clients get it: slipway rollback {store.model}; {backup}"
    elif releases:
        hint = f"do not go back to it; {backup}"
    elif places[0].parts[0] == "runs":
        hint = f"its decision can't be verified any more; {backup}"
    else:
        hint = f"remove {first} and run again: it is made anew; or {backup}"
    return Damage(paths=tuple(map(str, places)), problem=problem, releases=tuple(releases), hint=hint)
