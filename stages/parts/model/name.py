"""A model's name: what the user wrote, its id in the store, and the directory or the repository it means."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stages.parts.base.errors import (
    InvalidName,
)
from stages.parts.base.store import directory_name

if TYPE_CHECKING:
    pass


LOCAL_OWNER: Final = "local"


COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def is_local(source: str) -> bool:
    """Whether *source* is a path to a directory rather than a name on the Hub."""
    return source.startswith(("/", "./", "../", "~")) or source in (".", "..")


def local_directory(source: str) -> Path:
    """The directory that a local *source* means; it need not exist."""
    with contextlib.suppress(RuntimeError):  # '~nobody': stays as it is, and is then found missing
        return Path(os.path.normpath(Path(source).expanduser().absolute()))
    return Path(source).absolute()


def model_id(source: str) -> str:
    """The model's name in the store: ``org/name`` stays, a directory ``./my-model`` becomes ``local/my-model``.

    Raises:
        InvalidName: neither a name as on the Hub nor a path whose last part can be one.
    """
    if not is_local(source):
        directory_name(source)
        return source
    name = local_directory(source).name
    identifier = f"{LOCAL_OWNER}/{name}"
    try:
        directory_name(identifier)
    except InvalidName as error:
        raise InvalidName(
            f"{source!r}: a directory called {name!r} can't name a model",
            hint="rename it, or point a symbolic link at it: letters, digits, '-', '_' and '.'",
        ) from error
    return identifier
