"""Names of nodes, as in Argo, and file names for them.

evaluate                 a task
evaluate.load            the task load of the dag that evaluate runs
onExit                   the exit handler
"""

from __future__ import annotations

import hashlib
from typing import Final

LONGEST: Final = 150
"""Bytes. File systems allow 255, and a suffix is added."""


def inside(outer: str, name: str) -> str:
    return f"{outer}.{name}" if outer else name


def log_file(node: str) -> str:
    return f"{safe(node)}.log"


def safe(node: str) -> str:
    """Return a file name for a node: short enough, and different for each."""
    if len(node) <= LONGEST:
        return node
    return f"{node[:LONGEST]}-{hashlib.sha256(node.encode()).hexdigest()[:12]}"
