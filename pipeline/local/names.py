"""Names of nodes, as in Argo, and the file names that are safe for them.

evaluate                 a task
evaluate(1:awq)          the second of its items
evaluate.load            the task load of the dag that evaluate runs
onExit                   the exit handler
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final
from urllib.parse import quote

SAFE: Final = "()[]{}:,= +@"
LONGEST: Final = 150
"""Bytes. File systems allow 255, and a suffix is added."""


def inside(outer: str, name: str) -> str:
    return f"{outer}.{name}" if outer else name


def of_item(task: str, index: int, item: Any) -> str:
    """The name of an item's node: ``task(0:item)``, or a map's sorted ``key:value`` pairs (Argo's ``processItem``)."""
    if isinstance(item, dict):
        item = ",".join(sorted(f"{key}:{plain(value)}" for key, value in item.items()))
    return f"{task}({index}:{plain(item)})"


def plain(value: Any) -> str:
    """A text as it is; any other value as compact JSON with sorted keys, as Go writes it."""
    if isinstance(value, str):
        return value
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def log_file(node: str) -> str:
    """The file name of a node's log: without slashes, not too long, and different for each node."""
    return f"{safe(node)}.log"


def safe(node: str) -> str:
    text = quote(node, safe=SAFE)
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}-{hashlib.sha256(node.encode()).hexdigest()[:12]}"
