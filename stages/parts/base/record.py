"""A document in the store: frozen, without unknown fields, written atomically."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from stages.parts.base.errors import DamagedModel
from stages.parts.base.log import say
from stages.parts.base.store import write_json


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read the document at *path*; None if there is no file. One that is not valid is refused with DamagedModel."""
        try:
            return cls.model_validate_json(path.read_bytes())
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
