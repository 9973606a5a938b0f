"""What one check of a cluster finds."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    state: Literal["ok", "warning", "missing"]
    found: str
    hint: str = ""
    """What to do about it."""


def ok(found: str, hint: str = "") -> Finding:
    return Finding("ok", found, hint)


def warning(found: str, hint: str = "") -> Finding:
    return Finding("warning", found, hint)


def missing(found: str, hint: str = "") -> Finding:
    return Finding("missing", found, hint)
