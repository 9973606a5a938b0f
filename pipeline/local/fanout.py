"""``withItems``, ``withParam``, ``withSequence``: one task becomes several, and their outputs one list.

As in Argo (workflow/controller/dag.go ``expandTask``, operator.go ``processItem``, ``expandSequence``,
``processAggregateNodeOutputs``; docs/walk-through/loops.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from pipeline.local.manifest import Sequence as Counted
from pipeline.local.manifest import Step
from pipeline.local.names import plain
from pipeline.local.templates import substitute
from stages.parts.base.errors import ConfigError

FORMAT: Final = re.compile(r"[^%]*%0?\d*[doxX][^%]*")


def items(task: Step, lookup: Callable[[str], str]) -> list[Any]:
    """What *task* is repeated for.

    Raises:
        ConfigError: withParam is no JSON list, or withSequence has no whole numbers; by *lookup*, too.
    """
    if task.with_items:
        return [_filled(item, lookup) for item in task.with_items]
    if task.with_sequence:
        return _counted(task.with_sequence, lookup)
    text = substitute(task.with_param, lookup)
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise ConfigError(f"withParam is no JSON list: {text.strip()[:200]}")
    return found


def values(item: Any) -> dict[str, str]:
    """What ``{{item}}`` and, for a map, ``{{item.KEY}}`` stand for."""
    found = {"item": plain(item)}
    if isinstance(item, Mapping):
        found |= {f"item.{key}": plain(value) for key, value in item.items()}
    return found


def aggregated(outputs: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """By output name, a JSON list of what the succeeded items gave, in their order.

    If every value is a JSON list or map, the list holds these; otherwise it holds texts
    (``aggregatedJSONValueList`` in workflow/controller/operator.go).
    """
    names = dict.fromkeys(name for each in outputs for name in each)
    return {name: plain(_list(each[name] for each in outputs if name in each)) for name in names}


def _list(texts: Iterable[str]) -> list[Any]:
    kept = list(texts)
    try:
        read = [json.loads(text) for text in kept]
    except ValueError:
        return list(kept)
    return read if all(isinstance(value, list | dict) for value in read) else list(kept)


def _filled(item: Any, lookup: Callable[[str], str]) -> Any:
    """References within the texts of an item, replaced."""
    match item:
        case str():
            return substitute(item, lookup)
        case list() | tuple():
            return [_filled(each, lookup) for each in item]
        case dict():
            return {key: _filled(value, lookup) for key, value in item.items()}
        case _:
            return item


def texts(task: Step) -> list[str]:
    """Every text of the expansion that may hold references."""
    counted = task.with_sequence
    parts = (counted.start, counted.end, counted.count, counted.format) if counted else ()
    return [task.with_param, *(text for text in parts if text), *_texts(list(task.with_items))]


def _texts(item: Any) -> Iterable[str]:
    if isinstance(item, str):
        yield item
    elif isinstance(item, Mapping | list | tuple):
        for each in item.values() if isinstance(item, Mapping) else item:
            yield from _texts(each)


def _counted(sequence: Counted, lookup: Callable[[str], str]) -> list[str]:
    """Texts from start (0) to end, upwards or downwards; or count of them."""
    start = _whole("start", sequence.start, lookup) if sequence.start is not None else 0
    if sequence.end is not None:
        end = _whole("end", sequence.end, lookup)
    elif sequence.count is not None:
        count = _whole("count", sequence.count, lookup)
        if count == 0:
            return []
        end = start + count - 1
    else:
        raise ConfigError("withSequence needs end or count")
    if sequence.format and not FORMAT.fullmatch(sequence.format):
        raise ConfigError(f"withSequence.format {sequence.format!r} has not one place for a number, such as %02d")
    step = 1 if start <= end else -1
    return [(sequence.format or "%d") % number for number in range(start, end + step, step)]


def _whole(field: str, text: str, lookup: Callable[[str], str]) -> int:
    given = substitute(text, lookup)
    try:
        return int(given)
    except ValueError as error:
        raise ConfigError(f"withSequence.{field} is no whole number: {given!r}") from error
