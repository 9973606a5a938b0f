"""Reads a manifest into models, and names every field that can't run here by its full path."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from pipeline.local.manifest import Closed, Manifest
from stages.parts.base.errors import ConfigError, UnsupportedField


def read(manifest: Mapping[str, Any]) -> Manifest:
    """Read a manifest; report every unsupported, wrong or missing field at once, each by its full path.

    Raises:
        UnsupportedField: a field that the local engine does not support.
        ConfigError: every field is supported, but some are wrong or missing.
    """
    try:
        return Manifest.model_validate(dict(manifest))
    except ValidationError as error:
        mistakes = error.errors()
        lines = [f"{path_of(mistake['loc'], manifest)}: {_said(mistake)}" for mistake in mistakes]
        kind = UnsupportedField if any(mistake["type"] == "extra_forbidden" for mistake in mistakes) else ConfigError
        raise refused(kind, lines) from error


def refused(kind: type[UnsupportedField] | type[ConfigError], lines: Sequence[str]) -> UnsupportedField | ConfigError:
    """One error for all *lines*."""
    count = f"{len(lines)} fields" if len(lines) > 1 else "a field"
    return kind(
        f"the local engine can't run this workflow: {count} refused\n" + "\n".join(f"    {line}" for line in lines),
        hint="run it on Argo, or remove the fields; docs/local-engine.md lists what runs here",
    )


def path_of(location: Sequence[int | str], manifest: object) -> str:
    """A field's path, such as ``spec.templates[optimize].container.env[HOME]``; list entries appear by their name."""
    path, here = "", manifest
    for part in location:
        if isinstance(here, str):  # podSpecPatch, whose fields were read from JSON
            here = json.loads(here)
        if isinstance(here, Mapping):
            here = here.get(part)
            path += f".{part}" if path else str(part)
        elif isinstance(here, Sequence) and isinstance(part, int) and part < len(here):
            here = here[part]
            path += f"[{here.get('name', part) if isinstance(here, Mapping) else part}]"
    return path or "(root)"


def models(base: type[Closed] = Closed) -> Iterator[type[Closed]]:
    """All models of the manifest."""
    for model in base.__subclasses__():
        yield model
        yield from models(model)


def _said(mistake: ErrorDetails) -> str:
    if mistake["type"] == "extra_forbidden":
        field = str(mistake["loc"][-1])
        known = {to_camel(name) for model in models() for name in model.model_fields} - {field}
        close = difflib.get_close_matches(field, sorted(known), n=1, cutoff=0.85)
        return "not supported here" + (f"; did you mean {close[0]!r}?" if close else "")
    message = mistake["msg"].removeprefix("Value error, ")
    return message if mistake["type"] == "missing" else f"{message} (got {str(mistake['input'])[:60]!r})"
