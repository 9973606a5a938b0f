"""Names that the whole product shares. Imports nothing heavy, so that a command starts quickly."""

from __future__ import annotations

from typing import Final, Literal

REFERENCE: Final = "fp16"
"""The variant with which the others are compared by default."""
PRODUCTION: Final = "production"
"""The release in production, as it is measured beside the variants of a run."""
WITH_RECIPE: Final = "+"
"""Between the variant and the recipe in the name of a candidate, such as ``gptq+ngram``."""
Outcome = Literal["decided", "equivalent", "unresolved", "incomplete"]
"""How a choice ended: see ``scoring.choice``."""
Promotion = Literal["promoted", "kept", "equivalent"]
"""What becomes of a run's winner: with *kept* and *equivalent*, what is in production stays there."""


def variant_of(candidate: str) -> str:
    """Name the variant whose weights a candidate has."""
    return candidate.partition(WITH_RECIPE)[0]


def recipe_of(candidate: str) -> str:
    """Name the recipe by which a candidate is served; empty if it has none."""
    return candidate.partition(WITH_RECIPE)[2]
