"""What settings and results have in common: they are frozen and have no unknown fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PlanRecord(Closed):
    """A part of a plan's document, whose schema describes every field."""

    model_config = ConfigDict(use_attribute_docstrings=True)
