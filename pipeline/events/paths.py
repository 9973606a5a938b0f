"""Paths into JSON, as far as our Sensor uses gjson's and sjson's: keys, indices, and the first that matches a query.

``body.updatedRefs.#(ref=="refs/heads/main").newSha`` is the new commit of main.
Syntax: https://github.com/tidwall/gjson/blob/master/SYNTAX.md
"""

from __future__ import annotations

import re
from typing import Any, Final

from stages.parts.base.errors import UnsupportedField

PART: Final = re.compile(r'#\((?P<field>[A-Za-z_]\w*)=="(?P<wanted>[^"\\]*)"\)|(?P<index>\d+)|(?P<key>[A-Za-z_]\w*)')


class _Missing:
    def __repr__(self) -> str:
        return "not there"


MISSING: Final = _Missing()
"""Not null: there is nothing at the path."""


def find(document: Any, path: str) -> Any:
    """What is at *path*, or ``MISSING``.

    Raises:
        UnsupportedField: *path* is of another form than those above.
    """
    for part in _parts(path):
        document = _step(document, part)
    return document


def put(document: Any, path: str, value: str) -> None:
    """Set *path* of *document*, making the last key if it is not there.

    Raises:
        UnsupportedField: nothing is there to hold it.
    """
    *parents, last = _parts(path)
    place = document
    for part in parents:
        place = _step(place, part)
    if isinstance(place, dict) and last["key"]:
        place[last["key"]] = value
    elif isinstance(place, list) and last["index"] and int(last["index"]) < len(place):
        place[int(last["index"])] = value
    else:
        raise UnsupportedField(f"the Sensor sets {path}, but the resource has nothing to hold it")


def _parts(path: str) -> list[re.Match[str]]:
    found, position = [], 0
    while part := PART.match(path, position):
        found.append(part)
        position = part.end() + 1
        if part.end() == len(path):
            return found
        if path[part.end()] != ".":
            break
    raise UnsupportedField(
        f"the path {path!r} is of a form that is not evaluated here",
        hint='use keys, indices and #(key=="text"), with dots between them',
    )


def _step(document: Any, part: re.Match[str]) -> Any:
    if part["key"] and isinstance(document, dict):
        return document.get(part["key"], MISSING)
    if part["index"] and isinstance(document, list):
        return document[int(part["index"])] if int(part["index"]) < len(document) else MISSING
    if part["field"] and isinstance(document, list):
        matches = (each for each in document if isinstance(each, dict) and each.get(part["field"]) == part["wanted"])
        return next(matches, MISSING)
    return MISSING
