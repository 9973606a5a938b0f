"""The data sets that tasks need from the Hub, each at one commit."""

from __future__ import annotations

from typing import Final

from stages.parts.model.hub import DatasetFile

IFEVAL: Final = DatasetFile("google/IFEval", "966cd89545d6b6acfd7638bc708b98261ca58e84", "ifeval_input_data.jsonl")
DATA: Final = {
    "gsm8k": DatasetFile(
        "openai/gsm8k", "e53f048856ff4f594e959d75785d2c2d37b678ee", "main/test-00000-of-00001.parquet"
    ),
    "ifeval": IFEVAL,
    "instructions": IFEVAL,
}
"""What a task needs, by its name."""
