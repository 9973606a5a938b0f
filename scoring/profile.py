"""A scoring profile: how much each metric matters to a user."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Weights(BaseModel):
    """Non-negative, at least one above zero. They are divided by their sum, so 50/20/20/10 and 5/2/2/1 are equal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    quality: Weight
    latency: Weight
    throughput: Weight
    memory: Weight

    @model_validator(mode="after")
    def _one_above_zero(self) -> Weights:
        if not any(self.model_dump().values()):
            raise ValueError("all weights are zero, so nothing could be chosen")
        return self

    def shares(self) -> dict[str, float]:
        """The weights by metric, with sum 1."""
        given = self.model_dump()
        total = sum(given.values())
        return {name: value / total for name, value in given.items()}


DEFAULT: Final = Weights(quality=0.5, latency=0.2, throughput=0.2, memory=0.1)


class Profile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    description: str = ""
    weights: Weights = DEFAULT
