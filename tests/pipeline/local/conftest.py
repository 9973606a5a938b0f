"""Fixtures of the local engine's tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pipeline.local.local_bench import Bench, processes_with


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def living() -> Iterator[Callable[[str], list[int]]]:
    """``living(marker)``: the processes with it in their command line. What a failed test leaves is killed by pid."""
    markers: set[str] = set()

    def look(marker: str) -> list[int]:
        markers.add(marker)
        return processes_with(marker)

    yield look
    for pid in [pid for marker in markers for pid in processes_with(marker)]:
        os.kill(pid, signal.SIGKILL)
