"""What one check of a cluster finds."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    state: Literal["ok", "warning", "missing"]
    text: str
    hint: str = ""
    """What to do about it."""


def ok(text: str, hint: str = "") -> Finding:
    return Finding("ok", text, hint)


def warning(text: str, hint: str = "") -> Finding:
    return Finding("warning", text, hint)


def missing(text: str, hint: str = "") -> Finding:
    return Finding("missing", text, hint)
