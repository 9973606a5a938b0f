"""The kinds of models that slipway can't serve: how each is recognized, what it is, and what one could use instead.

The names of a repository's files and its config.json suffice, so a model is refused before anything else is read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from stages.parts.base.errors import UnusableModel
from stages.parts.base.settings import Settings, parse, read_yaml

Config = Mapping[str, Any]

HOLDS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "is_encoder_decoder": lambda value: value is True,
    "quantization": lambda value: isinstance(value, dict) and {"bits", "group_size"} <= value.keys(),
}
"""What the value of a field is if the model is of the kind; of others, anything but nothing."""


class ModelKind(Settings):
    """Models of one kind; the table says what its fields are."""

    what: str
    instead: str
    files: tuple[str, ...] = ()
    architectures: str = ""
    field: str = ""

    def sign(self, paths: Collection[str], config: Config) -> str | None:
        """Name what shows that the model is of this kind, or return None if nothing does."""
        for path in sorted(paths):
            if any(fnmatchcase(path, pattern) for pattern in self.files):
                return path
        named = config.get("architectures")
        for architecture in named if isinstance(named, list) and self.architectures else ():
            if re.fullmatch(self.architectures, str(architecture)):
                return str(architecture)
        if self.field in config and HOLDS.get(self.field, bool)(config[self.field]):
            return f"{self.field!r} in config.json"
        return None


class Unservable(Settings):
    no_pickles: str
    same_model: str
    layouts: tuple[ModelKind, ...]
    kinds: tuple[ModelKind, ...]


TABLE: Final = Path(__file__).with_suffix(".yaml")


@functools.cache
def unservable() -> Unservable:
    """Read the table, which a model that is there already does not need."""
    return parse(Unservable, read_yaml(TABLE), str(TABLE))


def unknown_layout(paths: Collection[str], expected: str) -> UnusableModel:
    """Make the error for a repository that lacks the files *expected* of every model."""
    for kind in unservable().layouts:
        if sign := kind.sign(paths, {}):
            return UnusableModel(f"the repository holds {kind.what} ({sign}), and no {expected}", hint=kind.instead)
    return UnusableModel(f"the repository has no weights: no {expected}", hint=unservable().same_model)


def refuse_kind(config: Config, paths: Collection[str]) -> None:
    """Refuse, with UnusableModel, a model of a kind that can't be served; the message names the kind."""
    for kind in unservable().kinds:
        if sign := kind.sign(paths, config):
            raise UnusableModel(f"the model is {kind.what} ({sign}), which slipway can't serve", hint=kind.instead)
