"""What all settings have in common. Each model is frozen, and an unknown or wrong field is an error.

The defaults are in the models and in ``configs/defaults.yaml``, which a person reads; a test compares the two.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stages.parts.base.errors import ConfigError
from stages.parts.base.files import from_json

CONFIGS: Final = Path(__file__).parents[3] / "configs"
SettingsT = TypeVar("SettingsT", bound=BaseModel)
SHOWN_VALUE_CHARACTERS: Final = 60
MOST_VALUES: Final = 1_000_000
"""In a YAML file."""
Positive = Annotated[int, Field(gt=0)]
Percent = Annotated[int, Field(gt=0, le=100)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Ratio = Annotated[float, Field(ge=1)]
AbsolutePath = Annotated[str, Field(pattern="^/")]


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    replaced: ClassVar[Mapping[str, str]] = {}
    """Fields that there were once, and what there is in their place."""


def parse(model: type[SettingsT], data: Mapping[str, Any], where: str) -> SettingsT:
    """Validate *data*, or show all mistakes at once, one per line, with ConfigError, which names each wrong field and
    *where* it is: the file or the flag."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError.of_many(mistakes(error, model), where) from error


def parse_json(model: type[SettingsT], text: str, where: str) -> SettingsT:
    """Like ``parse``, from the JSON text of a flag, which has to be an object."""
    try:
        data = from_json(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{where} is not a JSON object")
    return parse(model, data, where)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; ConfigError if the file is missing, unreadable, not YAML, or not a mapping."""
    try:
        data = from_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold fields with values, not a {type(data).__name__}")
    return data


def from_yaml(text: str) -> Any:
    """Parse YAML. Raises: ValueError, also for what PyYAML fails at, and for what aliases make too large."""
    import yaml

    try:
        value = yaml.safe_load(text)
        size = _size(value, {})
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    if size > MOST_VALUES:
        raise ValueError(f"its aliases make more than {MOST_VALUES} values of it")
    return value


def _size(value: Any, known: dict[int, int]) -> int:
    """Count the values in *value*, those of an alias each time, and characters by the hundred."""
    if isinstance(value, dict | list | tuple) and id(value) not in known:
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(each, known) for each in inner)
    return known.get(id(value)) or 1 + len(str(value)) // 100


def mistakes(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line per mistake. For an unknown field it suggests the most similar known name. A mistake in how fields go
    together names them itself."""
    lines = []
    for detail in error.errors():
        field = ".".join(str(part) for part in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            message = _unknown(model, *map(str, detail["loc"]))
        elif detail["type"] != "missing" and not isinstance(detail["input"], Mapping):
            message += f" (got {str(detail['input'])[:SHOWN_VALUE_CHARACTERS]!r})"
        lines.append(f"{field}: {message}" if field else message)
    return lines


def _unknown(model: type[BaseModel], *path: str) -> str:
    """Say that the field at *path* in *model* is unknown, and which one may be meant."""
    *parts, field = path
    for part in parts:
        inner = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return "unknown field"
        model = inner
    if issubclass(model, Settings) and field in model.replaced:
        return f"there is no such field any more: {model.replaced[field]}"
    close = difflib.get_close_matches(field, model.model_fields, n=1)
    return "unknown field" + (f", did you mean {close[0]!r}?" if close else "")
