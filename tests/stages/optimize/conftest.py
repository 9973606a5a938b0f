from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.stages.optimize.tiny import llama, publish, words


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published Llama: bfloat16, tied embeddings, three shards."""
    return publish(tmp_path_factory.mktemp("tiny"), llama())


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings with a calibration text that is long enough for 8 sequences of 64 tokens."""
    path = tmp_path_factory.mktemp("calibration") / "lines.txt"
    path.write_text("\f".join(words(60, seed) for seed in range(40)))
    return {"calibration": {"text": str(path), "samples": 8, "sequence_length": 64}}
