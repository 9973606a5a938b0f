from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stages.rollout.stage import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.target.stop_all()
