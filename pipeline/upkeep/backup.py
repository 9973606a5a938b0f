"""Backups of a store or of one of its models, and their return.

    DIR/.unfinished/   what was copied so far; the next try continues with it
    DIR/store/         a whole backup: a store as any other, and backup.json with the sha256 of every file

Nothing in a store changes in place but what is appended to a log, so a copy is consistent if the store has the same
files after it as before. Runs that have not ended, and the endpoint's state and logs, stay out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from pipeline.upkeep.checking import Digests, check
from pipeline.upkeep.contents import has_ended, models_in
from stages.parts.base.errors import Busy, ConfigError, DamagedModel, disk_errors
from stages.parts.base.files import exclusive, files_in, fsync, fsync_tree, place
from stages.parts.base.store import ModelStore, Record
from stages.parts.endpoint import clients, database, endpoint
from stages.parts.model.name import ModelName

STORE, UNFINISHED, RETURNING, MANIFEST = "store", ".unfinished", ".returning", "backup.json"
LOCK: Final = ".backup.lock"
LEFT_OUT: Final = (
    *(".locks", ".building", endpoint.RECORD, endpoint.WANTED, endpoint.LOG, endpoint.PREVIOUS_LOG, endpoint.SERVERS),
)
PASSES: Final = 100


class Backup(Record):
    """``backup.json``: what a backup holds."""

    made_at: datetime
    models: tuple[str, ...]
    files: dict[str, str]
    """The sha256 of each, by its path; of a symbolic link, where it leads to."""


class Entry(NamedTuple):
    """What tells that a file is another one than it was."""

    inode: tuple[int, int]
    size_bytes: int
    modified_ns: int
    link: str
    """Where a symbolic link leads to; empty for a file."""


def back_up(root: Path, target: Path, model: str | None = None) -> Backup:
    """Copy the store at *root*, or one model of it, to the folder *target*, while runs go on; hard links stay such.

    Raises:
        ConfigError: *target* holds a backup already, or lies in the store.
        DamagedModel: something is not what was recorded.
        Busy: another process makes this backup, or the store changes faster than it can be copied.
    """
    stores, root = [store for store in models_in(root, model) if any(files_in(*_of_model(store.path)))], root.absolute()
    if target.absolute().is_relative_to(root):
        raise ConfigError(f"{target} is in the store", hint="name a folder on another disk")
    work = target / UNFINISHED
    with disk_errors(target), exclusive(_made(target) / LOCK, f"the backup {target}", wait=False):
        if (target / STORE).exists():
            raise ConfigError(f"{target} holds a backup already", hint="name another folder, or remove it")
        _copy(root, work, [store.path.name for store in stores], [clients.FILE] if model is None else [])
        if model is None and (root / database.FILE).exists():
            (work / database.FILE).unlink(missing_ok=True)
            opened = (contextlib.closing(sqlite3.connect(folder / database.FILE)) for folder in (root, work))
            with next(opened) as usage, next(opened) as copy:
                usage.backup(copy)  # a file copied while it is written to would be damaged
        digests = Digests()
        for store in stores:
            if damaged := check(ModelStore(work, store.model), digests).damaged:
                hint = f"slipway store check {store.model}; if that finds nothing, remove {work} and copy again"
                raise DamagedModel(f"{store.model} is damaged: {damaged[0].paths[0]}: {damaged[0].problem}", hint=hint)
        models = tuple(store.model for store in stores)
        backup = Backup(made_at=datetime.now(UTC), models=models, files=_digests(work, digests))
        backup.write(work / MANIFEST)
        fsync_tree(work)
        os.replace(work, target / STORE)
        fsync(target)
    return backup


def restore(root: Path, source: Path, model: str | None = None) -> Backup:
    """Put a backup, or one model of it, into the store at *root*, where that model must not be yet. Clients and usage
    that are in the store already stay as they are. After a kill, the next try continues.

    Raises:
        ConfigError: there is no whole backup, or the store has one of the models.
        DamagedModel: a file of the backup is not what was written.
    """
    whole = Backup.read(source / STORE / MANIFEST)
    names = whole and [each for each in whole.models if model is None or each == ModelName.parse(model).id]
    if not whole or not names:
        raise ConfigError(f"{source} holds no whole backup of {model or 'a store'}", hint="slipway store backup DIR")
    stores, work = [ModelStore(root.absolute(), name) for name in names], root / RETURNING
    folders = [store.path.name for store in stores]
    of_store: list[str] = [name for name in (clients.FILE, database.FILE) if name in whole.files and model is None]
    chosen = {path: sha256 for path, sha256 in whole.files.items() if path.split("/")[0] in (*folders, *of_store)}
    backup = Backup(made_at=whole.made_at, models=tuple(names), files=chosen)
    with disk_errors(root), exclusive(_made(root) / LOCK, f"the store {root}", wait=False):
        if Backup.read(work / MANIFEST) != backup:  # otherwise all of it is here, and was being moved to its place
            if present := [store.model for store in stores if store.path.exists()]:
                hint = "nothing is overwritten: move its folder away, or name another store with --store"
                raise ConfigError(f"the store {root} has {', '.join(present)} already", hint=hint)
            _copy(source / STORE, work, folders, of_store)
            if wrong := sorted(_digests(work, Digests()).items() ^ chosen.items()):
                shutil.rmtree(work)
                text = f"{source / STORE / wrong[0][0]} is not what was backed up"
                raise DamagedModel(text, hint="use another backup")
            backup.write(work / MANIFEST)
            fsync_tree(work)
        for name in of_store:
            if not (root / name).exists():
                os.replace(work / name, root / name)
        for store in (store for store in stores if (work / store.path.name).exists()):
            try:
                os.rename(work / store.path.name, store.path)  # noqa: PTH104 - refuses a folder that has anything in it
            except OSError as error:
                raise ConfigError(f"{store.path} was made meanwhile", hint="move it away, and restore again") from error
        fsync(root)
        shutil.rmtree(work)
    return backup


def _copy(source: Path, target: Path, folders: list[str], files: list[str]) -> None:
    """Copy *folders* and *files* until nothing changed meanwhile; what an earlier try copied is kept."""
    copied: dict[str, Entry] = {}
    for _ in range(PASSES):
        entries = dict(_entries(source, folders, files))
        if entries == copied:
            for folder in sorted((path for path in target.rglob("*") if path.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()  # unless there is something in it: all that was in it is gone from the source
            for folder in {folder for name in entries for folder in Path(name).parents}:
                shutil.copystat(source / folder, target / folder)
            return
        for path, _ in files_in(_made(target)):
            if str(path.relative_to(target)) not in entries:
                path.unlink()
        first: dict[tuple[int, int], Path] = {}
        for name, entry in entries.items():
            with contextlib.suppress(FileNotFoundError):  # replaced meanwhile: the next pass finds it changed
                _take(source / name, target / name, entry, first.setdefault(entry.inode, target / name))
        copied = entries
    raise Busy(f"{source} changes faster than it can be copied")


def _take(source: Path, target: Path, entry: Entry, twin: Path) -> None:
    """Make *target* what *source* is, unless it is; *twin* is the first copy of the same file."""
    if target.is_symlink() or target.exists():
        status = target.lstat()
        if target.is_symlink() and entry.link and str(target.readlink()) == entry.link:
            return
        if not entry.link and (status.st_size, status.st_mtime_ns) == (entry.size_bytes, entry.modified_ns):
            return
        target.unlink()
    target.parent.mkdir(parents=True, exist_ok=True)
    if entry.link:
        target.symlink_to(entry.link)
        return
    if target == twin:
        shutil.copy(source, target)
    else:
        place(twin, target)
    os.utime(target, ns=(entry.modified_ns, entry.modified_ns))  # last: an unfinished copy has another time


def _entries(root: Path, folders: Iterable[str], files: Iterable[str]) -> Iterator[tuple[str, Entry]]:
    """Yield every file that a backup holds, by its path."""
    places = [*(entry for folder in folders for entry in _of_model(root / folder)), *(root / name for name in files)]
    for path, status in files_in(*places):
        with contextlib.suppress(FileNotFoundError):
            link = str(path.readlink()) if stat.S_ISLNK(status.st_mode) else ""
            entry = Entry((status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns, link)
            yield str(path.relative_to(root)), entry


def _of_model(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()):
        if entry.name == "runs":
            yield from filter(has_ended, sorted(entry.iterdir()))
        elif entry.name not in LEFT_OUT:
            yield entry


def _digests(folder: Path, digests: Digests) -> dict[str, str]:
    """Compute the sha256 of all files of a backup, by path; of a symbolic link, read where it leads to."""
    files = {str(path.relative_to(folder)): path for path, _ in files_in(folder) if path != folder / MANIFEST}
    return {
        name: f"link to {path.readlink()}" if path.is_symlink() else digests.of(path) for name, path in files.items()
    }


def _made(folder: Path) -> Path:
    """Create a folder unless it is there. Raises: ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        hint = "name a folder that can be written"
        raise ConfigError(f"{folder} can't be used: {error.strerror}", hint=hint) from error
    return folder
