"""Names that the whole product shares. Imports nothing heavy, so that a command starts quickly."""

from __future__ import annotations

from typing import Final, Literal

REFERENCE: Final = "fp16"
"""The variant with which the others are compared by default."""
Outcome = Literal["decided", "equivalent", "unresolved", "incomplete"]
"""How a choice ended: see ``scoring.choice``."""
