"""The Pareto front: what nothing else improves on without a loss."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pareto_front(rows: Sequence[Sequence[float]]) -> list[bool]:
    """Find the rows that are not dominated: no other is at least as good in all columns and better in one.

    Equal rows do not dominate each other. A row with a value that is missing or infinite is never on the front and
    dominates no other. *rows*: of equal length; higher is better in every column."""
    measured = [row for row in rows if all(map(math.isfinite, row))]

    def dominated(row: Sequence[float]) -> bool:
        return any(
            all(theirs >= ours for ours, theirs in zip(row, rival, strict=True)) and tuple(rival) != tuple(row)
            for rival in measured
        )

    return [all(map(math.isfinite, row)) and not dominated(row) for row in rows]
