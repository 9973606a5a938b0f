"""The demo's model, its settings and its quality tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DEMO: Final = Path(__file__).parent
MODEL: Final = "slipway/demo-llama"
