"""A model's name, parsed once: a model on the Hugging Face Hub, or a local directory."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from stages.parts.base.errors import InvalidName
from stages.parts.base.store import ModelStore, directory_name, store_root


@dataclass(frozen=True)
class ModelName:
    source: str
    """What the user wrote: ``org/name`` as on the Hub, or a path such as ``./my-model``."""
    id: str
    """The name in the store: ``org/name`` as on the Hub, or ``local/my-model`` for a directory ``./my-model``."""
    directory: Path | None
    """The absolute path of a local model, which need not exist; None for a model on the Hub."""

    @classmethod
    def parse(cls, source: str) -> Self:
        """Parse a path, which begins with ``/``, ``./``, ``../`` or ``~`` or is ``.`` or ``..``, or else a Hub name.

        Raises:
            InvalidName: *source* is not a valid Hub name, or it is a path whose last part can't be a model's name.
        """
        if not (source.startswith(("/", "./", "../", "~")) or source in (".", "..")):
            directory_name(source)
            return cls(source, source, None)
        directory = _absolute(source)
        identifier = f"local/{directory.name}"
        try:
            directory_name(identifier)
        except InvalidName as error:
            raise InvalidName(
                f"{source!r}: a directory called {directory.name!r} can't name a model",
                hint="rename it, or use a symbolic link to it, with only letters, digits, '-', '_' and '.'",
            ) from error
        return cls(source, identifier, directory)

    def store(self, root: Path | None = None) -> ModelStore:
        """Return the model's store in *root*; by default in the folder that ``SLIPWAY_STORE`` names.

        Raises:
            ConfigError: the variable is not set.
        """
        return ModelStore((root or store_root()).absolute(), self.id)


def _absolute(path: str) -> Path:
    """Make the path absolute, with ``~`` expanded and symbolic links kept."""
    with contextlib.suppress(RuntimeError):  # '~nobody' is kept as written; later there is no such directory
        return Path(os.path.normpath(Path(path).expanduser().absolute()))
    return Path(path).absolute()
