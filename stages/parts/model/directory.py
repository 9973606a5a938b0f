"""A model in a local directory: its files, and the commit name that stands for their content."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from stages.parts.base.errors import DamagedModel, InvalidName
from stages.parts.model.checkpoint import chosen, small_files, weight_files
from stages.parts.records.acquired import File, files_digest

LOCAL_PREFIX: Final = "local-"
LOCAL_DIGITS: Final = 40
"""Hexadecimal digits of the sha256: as many as a commit on the Hub has."""
LOCAL_COMMIT: Final = re.compile(f"{LOCAL_PREFIX}[0-9a-f]{{{LOCAL_DIGITS}}}")


def local_commit(directory: Path) -> str:
    """Compute a commit name for the files of *directory* that serving needs; it changes when any of them changes."""
    paths = local_sizes(directory)
    names = chosen(small_files(paths), weight_files(paths, directory))
    return commit_name(files_digest(tuple(File.of(directory, name) for name in names)))


def commit_name(digest: str) -> str:
    """Make the commit name of the local files with this ``files_digest``."""
    return LOCAL_PREFIX + digest[:LOCAL_DIGITS]


def local_sizes(directory: Path) -> dict[str, int]:
    """List the sizes in bytes of the files in a directory and one level below. Follows symbolic links, and refuses
    broken ones with DamagedModel, and a directory that does not exist with InvalidName."""
    if not directory.is_dir():
        hint = "give a name as on the Hub ('org/name'), or a directory that exists"
        raise InvalidName(f"there is no directory {directory}", hint=hint)
    sizes = {}
    for path in sorted([*directory.glob("*"), *directory.glob("*/*")]):
        if path.is_symlink() and not path.exists():
            raise DamagedModel(f"{path} is a broken link", hint="repair or remove it")
        if path.is_file():
            sizes[path.relative_to(directory).as_posix()] = path.stat().st_size
    return sizes
