"""A model's name, parsed once: a model on the Hugging Face Hub, or a local directory."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from stages.parts.base.errors import InvalidName
from stages.parts.base.files import look_anew
from stages.parts.base.store import ModelStore, directory_name, store_root


@dataclass(frozen=True)
class ModelName:
    source: str
    """What the user wrote: ``org/name`` as on the Hub, or a path such as ``./my-model``."""
    id: str
    """The name in the store: ``org/name`` as on the Hub, or ``local/my-model`` for a directory ``./my-model``."""
    directory: Path | None
    """The absolute path of a local model, with symbolic links, which need not exist; None for a model on the Hub."""

    @classmethod
    def parse(cls, source: str) -> Self:
        """Parse a path, which begins with ``/``, ``./``, ``../`` or ``~`` or is ``.`` or ``..``, or else a Hub name.
        Raises: InvalidName: *source* is not a valid Hub name, or it is a path whose last part can't be a model's
        name."""
        if not (source.startswith(("/", "./", "../", "~")) or source in (".", "..")):
            directory_name(source)
            return cls(source, source, None)
        directory = Path(source).absolute()
        with contextlib.suppress(RuntimeError):  # '~nobody' is kept as written; later there is no such directory
            directory = Path(os.path.normpath(Path(source).expanduser().absolute()))
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
        """Return the model's store in *root*, by default in ``store_root()``, as it is now."""
        store = ModelStore((root or store_root()).absolute(), self.id)
        look_anew(store.root)
        look_anew(store.path)
        return store
