"""The demo's model, its settings and its quality tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DEMO: Final = Path(__file__).parent
MODEL: Final = "slipway/demo-llama"
REPEATING: Final = DEMO / "repeating.jsonl"
"""A trace of prompts whose answers repeat themselves: those 30 of 80 passages whose greedy answers of 300 tokens are
the shortest when compressed."""
