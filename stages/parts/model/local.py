"""A model in a local directory: which of its files count, and a name for their content."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stages.parts.base.errors import DamagedModel
from stages.parts.base.store import sha256_of
from stages.parts.model.name import local_directory
from stages.parts.records.acquired import File

if TYPE_CHECKING:
    pass

from stages.parts.base.errors import InvalidName
from stages.parts.model.checkpoint import chosen, small_files, weight_files
from stages.parts.records.acquired import files_digest

LOCAL_PREFIX = "local-"


LOCAL_DIGITS = 40  # of sha256: as many as a commit on the Hub has


def local_commit(directory: Path) -> str:
    """A name for what serving would take from *directory*; changes when any of it does."""
    paths = local_sizes(directory)
    names = chosen(small_files(paths), weight_files(paths, directory))
    return commit_name(files_digest(tuple(record_of(directory, name) for name in names)))


def commit_name(digest: str) -> str:
    """For the content with this ``files_digest``."""
    return LOCAL_PREFIX + digest[:LOCAL_DIGITS]


def existing_directory(source: str) -> Path:
    """Raises: InvalidName."""
    directory = local_directory(source)
    if not directory.is_dir():
        raise InvalidName(
            f"there is no directory {directory}", hint="give 'org/name' as on the Hub, or a directory that exists"
        )
    return directory


def local_sizes(directory: Path) -> dict[str, int]:
    """The size in bytes of each file of a directory, two levels deep, links followed.

    Raises:
        DamagedModel: a link leads nowhere.
    """
    sizes = {}
    for path in sorted([*directory.glob("*"), *directory.glob("*/*")]):
        if path.is_symlink() and not path.exists():
            raise DamagedModel(f"{path} is a broken link", hint="repair or remove it")
        if path.is_file():
            sizes[path.relative_to(directory).as_posix()] = path.stat().st_size
    return sizes


def record_of(directory: Path, path: str) -> File:
    """The record of one file, read once."""
    return File(path=path, size_bytes=(directory / path).stat().st_size, sha256=sha256_of(directory / path))
