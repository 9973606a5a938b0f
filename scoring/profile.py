"""A scoring profile: how much each metric matters, which limits hold, and how certain a choice has to be."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from scoring.constraints import Constraints

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Weights(BaseModel):
    """Weights are not negative, and at least one is above zero. They are divided by their sum, so 50/20/20/10 and
    5/2/2/1 are equal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    quality: Weight
    latency: Weight
    throughput: Weight
    memory: Weight

    @model_validator(mode="after")
    def _one_above_zero(self) -> Weights:
        if not any(self.model_dump().values()):
            raise ValueError("all weights are zero, so no variant can be chosen")
        return self

    def shares(self) -> dict[str, float]:
        """The weights by metric, with sum 1."""
        given = self.model_dump()
        total = sum(given.values())
        return {name: value / total for name, value in given.items()}


DEFAULT: Final = Weights(quality=0.5, latency=0.2, throughput=0.2, memory=0.1)


class Thresholds(BaseModel):
    """When the evidence is sufficient to follow the score."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    confidence: Annotated[float, Field(ge=0.6, le=1)] = 0.9
    """The probability with which the variant of the highest score must win again if the measurement is repeated. Below
    it, the choice among the variants that are not separated is by quality and memory (``scoring.decide``). At least
    0.6, because at 0.5, or just above it by the chance of the draws, equal variants would be separated."""


class Profile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    description: str = ""
    weights: Weights = DEFAULT
    normalization: Literal["min-max", "relative"] = "min-max"
    """min-max: the best variant gets 1 and the worst 0, so every difference beyond noise counts fully. relative: by the
    ratio to fp16, so that a difference counts by its size. Formulas: ``scoring.normalize``."""
    constraints: Constraints = Constraints()
    """The limits that a variant must meet to be chosen at all."""
    decision: Thresholds = Thresholds()
