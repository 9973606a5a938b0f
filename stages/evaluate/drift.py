"""The speed of the machine itself, probed by two short kernels while no server has work. A change between the probes
before and after a block does not come from a variant.

The kernels run on the CPU; a GPU, which has its own clocks and memory, is not probed."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from statistics import median
from typing import Final

from scoring.units import GIB
from stages.parts.records.evaluation import Drift, Speed

MATRIX: Final = 768
"""Rows and columns: the three matrices fit into a cache, so that arithmetic limits the speed."""
COPY_BYTES: Final = 96 << 20
"""Does not fit into a cache, so that memory limits the speed."""
REPEATS: Final = 9
"""The median counts, so that a short burst of another program has no effect."""
SETTLE_S: Final = 0.5
"""A server that has just started or answered is still cleaning up."""
GIGA: Final = 1e9


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
    """Return the larger of the two relative changes, without its sign."""
    return max(
        abs(after.compute_gflop_per_s / before.compute_gflop_per_s - 1),
        abs(after.memory_gib_per_s / before.memory_gib_per_s - 1),
    )


def drift_of(pairs: list[tuple[Speed, Speed]]) -> Drift:
    """Compute the drift from the probes before and after each block."""
    before, *between, after = (speed for pair in pairs for speed in pair)
    largest = max(change(*pair) for pair in pairs)
    return Drift(before=before, between=tuple(between), after=after, largest_change=largest)


def _median_s(kernel: Callable[[], object]) -> float:
    kernel()  # the first run maps pages and starts threads
    return median(timeit.repeat(kernel, number=1, repeat=REPEATS))
