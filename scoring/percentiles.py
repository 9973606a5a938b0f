"""Percentiles by nearest rank: always a value that was measured."""

from __future__ import annotations

from collections.abc import Iterable


def p95(values: Iterable[float | None]) -> float | None:
    """Find the smallest of the values that 95 % do not exceed; None without any. Values that are None do not count."""
    known = sorted(value for value in values if value is not None)
    return known[-(-95 * len(known) // 100) - 1] if known else None
