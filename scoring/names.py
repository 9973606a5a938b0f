"""Names that the whole product shares. Imports nothing heavy, so that a command starts quickly."""

from __future__ import annotations

from typing import Final, Literal

REFERENCE: Final = "fp16"
"""The variant with which the others are compared by default."""
WITH_RECIPE: Final = "+"
"""Between the variant and the recipe in the name of a candidate, such as ``gptq+ngram``."""
Outcome = Literal["decided", "equivalent", "unresolved", "incomplete"]
"""How a choice ended: see ``scoring.choice``."""


def variant_of(candidate: str) -> str:
    """Name the variant whose weights a candidate has."""
    return candidate.partition(WITH_RECIPE)[0]


def recipe_of(candidate: str) -> str:
    """Name the recipe by which a candidate is served; empty if it has none."""
    return candidate.partition(WITH_RECIPE)[2]
