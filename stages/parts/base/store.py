"""The store: one directory tree on a shared volume, and how its folders are made and put aside.

    <store>/<org>--<name>/
      base/  adapters/<name>/  optimized/<variant>/  evaluations/<variant>.json
      releases/<number>-<variant>-<digest12>/   production -> releases/…   production_metrics.json
      runs/<id>/

A directory or file appears complete or not at all: it is built under ``.building/``, or beside its target, then
fsynced and renamed. Nothing that a killed process leaves behind is ever read as a result, and the next process that
makes the same removes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from scoring.names import PRODUCTION, variant_of
from stages.parts.base.errors import Busy, ConfigError, DamagedModel, InvalidName, disk_errors
from stages.parts.base.files import (
    LOCKS,
    REPLACED,
    content_of,
    exclusive,
    fsync,
    fsync_tree,
    look_anew,
    make_folder,
    swap,
    write_json,
)
from stages.parts.base.log import say

STORE_VARIABLE: Final = "SLIPWAY_STORE"
# The Hub's rule for the name of a repository: letters, digits, '-', '_', '.'; no '--' or '..'; 96 characters at most.
NAME: Final = re.compile(r"^(?!.*(?:--|\.\.))[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?\Z")
SET_ASIDE: Final = 3
"""How many of each name are kept aside: the last ones that were in use."""
KEY_CHARACTERS: Final = 16
NEW: Final = "new"


def directory_name(model: str) -> str:
    """``org/name`` → ``org--name``; InvalidName for a name that the Hub does not allow. Hub names contain no ``--``, so
    two models never share a directory."""
    parts = model.split("/")
    if len(parts) > 2 or not all(NAME.match(part) for part in parts):
        hint = "use 'org/name' or 'name' as on the Hub, or a path to a local directory such as ./my-model"
        raise InvalidName(f"{model!r} is not a model's name", hint=hint)
    return "--".join(parts)


@dataclass(frozen=True)
class ModelStore:
    """The paths of one model in the store."""

    root: Path
    model: str

    @property
    def path(self) -> Path:
        return self.root / directory_name(self.model)

    @property
    def base(self) -> Path:
        return self.path / "base"

    def adapter(self, name: str) -> Path:
        return self.path / "adapters" / name

    def optimized(self, candidate: str) -> Path:
        """Locate the weights of a variant, which all candidates of it share; those of the release in production are
        the release's own."""
        if variant_of(candidate) == PRODUCTION and self.production.is_symlink():
            return self.path / self.production.readlink()
        return self.path / "optimized" / variant_of(candidate)

    def evaluation(self, candidate: str) -> Path:
        return self.path / "evaluations" / f"{candidate}.json"

    @property
    def releases(self) -> Path:
        return self.path / "releases"

    @property
    def production(self) -> Path:
        """The symbolic link to the current release."""
        return self.path / "production"

    @property
    def production_metrics(self) -> Path:
        return self.path / "production_metrics.json"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    def run(self, run_id: str) -> Path:
        return self.runs / run_id

    @property
    def aside(self) -> Path:
        """The folder of what other configurations made."""
        return self.path / ".aside"

    def lock(self, name: str) -> Path:
        return self.path / LOCKS / name

    def set_aside(self, path: Path, key: str) -> Path:
        """Locate the folder in which what had this key at *path* is kept."""
        return self.aside / path.relative_to(self.path) / key[:KEY_CHARACTERS]

    def take_up(self, paths: Sequence[Path], current: str | None, key: str) -> None:
        """Bring back the *paths* that have this key, and put aside those that are there, if they have another one.

        So two configurations do not undo each other's work: one variant and one evaluation of a name is in its place at
        a time. The caller holds their lock. After a crash in between the store has neither, and they are made again.

        The *paths* are files or directories that belong together. The last one, which holds the key, is moved out first
        and in last. *current* is the key of those that are there; None if there are none, or they are damaged.
        """
        if current == key:
            return
        returning = self.set_aside(paths[-1], key)
        look_anew(returning.parent.parent)
        for left in returning.parent.glob(".*"):
            shutil.rmtree(left)
        if current:
            _put_aside(paths, self.set_aside(paths[-1], current))
        for path in paths:
            if (returning / path.name).exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                swap(returning / path.name, path)
        shutil.rmtree(returning, ignore_errors=True)

    @contextlib.contextmanager
    def building(self, target: Path, *, resume: str = "") -> Iterator[Path]:
        """Yield an empty directory that becomes *target* when the block succeeds, and is removed when it fails.

        *resume* is a key: an unfinished directory with the same key is used again with its content, and is kept
        when the block fails, so that a download continues where it stopped. Processes that build the same target
        wait for each other. NotEnoughSpace leaves *target* unchanged.
        """
        slug, folder = self._place_of(target)
        with disk_errors(self.path), exclusive(self.lock(slug), slug):
            work = folder / (resume or NEW)
            work.mkdir(parents=True, exist_ok=True)
            for stale in work.parent.iterdir():
                if stale != work:
                    shutil.rmtree(stale)
            if not resume:
                shutil.rmtree(work)
                work.mkdir()
            try:
                yield work
                fsync_tree(work)
                swap(work, target)
            finally:
                if not resume:
                    shutil.rmtree(work, ignore_errors=True)

    def clear(self, target: Path, key: str = NEW) -> None:
        """Remove what was left of making *target*, which is there, by a process that was killed or by a loss of power,
        but for what can be resumed with another *key*; nothing while another process makes it."""
        slug, folder = self._place_of(target)
        if folder.exists():
            with contextlib.suppress(Busy), exclusive(self.lock(slug), slug, wait=False):
                for left in [*folder.iterdir()]:
                    if left.name in (NEW, key) or REPLACED in left.name:
                        shutil.rmtree(left)

    def _place_of(self, target: Path) -> tuple[str, Path]:
        """Return the name of the lock of what becomes *target*, and the folder where it is built."""
        slug = "-".join(target.relative_to(self.path).parts)
        return slug, self.path / ".building" / slug


def store_root() -> Path:
    """Return the store's folder, from ``SLIPWAY_STORE`` (in a pod, the mount of the volume); ConfigError if not set."""
    value = os.environ.get(STORE_VARIABLE)
    if not value:
        raise ConfigError(f"{STORE_VARIABLE} is not set", hint="set it to the store's folder")
    return Path(value)


def _put_aside(paths: Sequence[Path], target: Path) -> None:
    """Move *paths* to the folder *target*, and remove the oldest of those beside it."""
    work = target.with_name(f".{uuid.uuid4().hex}")
    make_folder(target.parent)
    work.mkdir()
    for path in reversed(paths):
        if path.exists():
            os.replace(path, work / path.name)
    fsync(work)
    swap(work, target)
    oldest_first = sorted(target.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    for path in oldest_first[:-SET_ASIDE]:
        removed = path.with_name(f".{uuid.uuid4().hex}")
        os.replace(path, removed)  # what is half removed is never taken up
        shutil.rmtree(removed)


class Record(BaseModel):
    """A document in the store: frozen, without unknown fields, written atomically."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read the document at *path*; None if there is no file. One that is not valid is refused with DamagedModel."""
        try:
            return cls.model_validate_json(content_of(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValidationError as error:
            raise DamagedModel(
                f"{path} is not a valid {cls.__name__} record: {error.errors()[0]['msg']}",
                hint="remove the directory that holds it and run again",
            ) from error

    @classmethod
    def read_if_intact(cls, path: Path, otherwise: str = "") -> Self | None:
        """Like ``read``, but None for a document that is not valid; a line says what is done *otherwise*, if that is
        given."""
        try:
            return cls.read(path)
        except DamagedModel as error:
            if otherwise:
                say(f"{error}; {otherwise}")
            return None

    def write(self, path: Path) -> None:
        write_json(path, self)
