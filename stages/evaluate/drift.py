"""How fast the machine itself is, by two short kernels while no server has work: what moves between the probe before
the load and the one after it is not the variant's.

They run on the processor: of a GPU, which has clocks and memory of its own, they say nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Final

from stages.parts.records.evaluation import Drift, Speed

MATRIX: Final = 768
"""Rows and columns: its three matrices fit a cache, so that arithmetic decides."""
COPY_BYTES: Final = 96 << 20
"""Does not fit a cache, so that memory decides."""
REPEATS: Final = 9
"""Of which the median counts: a single moment of another program's changes nothing."""
SETTLE_S: Final = 0.5
"""A server that has just started or just answered still tidies up."""
GIGA: Final = 1e9
GIB: Final = 1 << 30


def probe() -> Speed:
    """Multiply matrices and copy memory for less than half a second, on all cores that numpy uses."""
    import numpy as np

    time.sleep(SETTLE_S)
    square = np.full((MATRIX, MATRIX), 0.5, dtype=np.float32)
    product = np.empty_like(square)
    source = np.ones(COPY_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    return Speed(
        compute_gflop_per_s=2 * MATRIX**3 / GIGA / _median_s(lambda: np.matmul(square, square, out=product)),
        memory_gib_per_s=2 * COPY_BYTES / GIB / _median_s(lambda: np.copyto(target, source)),
    )


def change(before: Speed, after: Speed) -> float:
    """The larger relative change of the two, without its sign."""
    return max(
        abs(after.compute_gflop_per_s / before.compute_gflop_per_s - 1),
        abs(after.memory_gib_per_s / before.memory_gib_per_s - 1),
    )


def drift_of(pairs: list[tuple[Speed, Speed]], measured_again: int) -> Drift:
    """From the probes before and after the load of each start."""
    before, *between, after = (speed for pair in pairs for speed in pair)
    return Drift(
        before=before,
        between=tuple(between),
        after=after,
        largest_change=max(change(before, after) for before, after in pairs),
        measured_again=measured_again,
    )


def _median_s(kernel: Callable[[], object]) -> float:
    kernel()  # pages are mapped and threads started by the first
    return median(_seconds(kernel) for _ in range(REPEATS))


def _seconds(kernel: Callable[[], object]) -> float:
    started = time.perf_counter()
    kernel()
    return time.perf_counter() - started
