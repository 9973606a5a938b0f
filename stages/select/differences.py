"""Where two documents differ."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, Final

TOLERANCE: Final = 1e-9
"""Relative: sums in another order differ in their last digits."""
ABSENT: Final = object()


def differences(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield every place where two documents differ: its path, and both values as text. Numbers are equal within
    ``TOLERANCE``. The entries of a list are named by their variant or task, if they have one."""
    if isinstance(before, list) and isinstance(after, list):
        before, after = _by_name(before), _by_name(after)
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            inner = f"{path}.{key}" if path else str(key)
            yield from differences(before.get(key, ABSENT), after.get(key, ABSENT), inner)
    elif not _equal(before, after):
        yield path, _text_of(before), _text_of(after)


def _by_name(entries: list[Any]) -> dict[str, Any]:
    numbers = [str(number) for number in range(len(entries))]
    names = [
        str(entry.get("variant") or entry.get("task") or number) if isinstance(entry, dict) else number
        for number, entry in zip(numbers, entries, strict=True)
    ]
    return dict(zip(names if len(set(names)) == len(names) else numbers, entries, strict=True))


def _equal(before: Any, after: Any) -> bool:
    if isinstance(before, int | float) and isinstance(after, int | float) and not isinstance(before, bool):
        return math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=1e-12)
    return bool(before == after)


def _text_of(value: Any) -> str:
    return "absent" if value is ABSENT else json.dumps(value, ensure_ascii=False)
