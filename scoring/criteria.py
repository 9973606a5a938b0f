"""What a choice is made by: weights, anchors of the scores, margins of equivalence, the error rate."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, model_validator

from scoring.closed import Closed
from scoring.metrics import METRICS
from scoring.names import PRODUCTION, REFERENCE

Ratio = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, lt=1)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
GATE: Final = 0.95
"""The default limit of the quality recovery, at which quality counts 0."""


class Weights(Closed):
    """Weights are not negative, and at least one is above zero. They are divided by their sum, so 50/20/20/10 and
    5/2/2/1 are equal."""

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
        """Divide the weights by their sum, by metric."""
        weights = self.model_dump()
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}


DEFAULT: Final = Weights(quality=0.5, latency=0.2, throughput=0.2, memory=0.1)


class Anchor(Closed):
    """How many times better than the reference a metric must be to count as 0 and as 1; values beyond are clipped."""

    zero: Ratio
    one: Ratio

    @model_validator(mode="after")
    def _one_is_better(self) -> Anchor:
        if not self.zero < self.one:
            raise ValueError("the anchor of 1 must be better than that of 0")
        return self


class Anchors(Closed):
    """Each default lies as far below the reference as above it, so that the reference counts 0.5 and a loss costs as
    much as a gain of the same ratio brings."""

    quality: Anchor = Anchor(zero=GATE, one=1 / GATE)
    """From the limit of the quality recovery to as much more than the reference."""
    latency: Anchor = Anchor(zero=0.5, one=2.0)
    throughput: Anchor = Anchor(zero=0.5, one=2.0)
    memory: Anchor = Anchor(zero=0.25, one=4.0)
    """A quarter of the reference's memory counts as 1: 4-bit weights for 16-bit ones."""


class Margins(Closed):
    """Differences that do not matter, as a share; two variants within all of them are equivalent."""

    speed: Share = 0.03
    """Share of the reference's latency or throughput."""
    memory: Share = 0.01
    quality: Share = 0.005


class Values(Closed):
    """What the variants are compared with where the reference is not measured, in the units of ``METRICS``."""

    quality: Ratio
    latency: Ratio
    throughput: Ratio
    memory: Ratio


class Criteria(Closed):
    weights: Weights = DEFAULT
    anchors: Anchors = Anchors()
    margins: Margins = Margins()
    reference: str | Values = REFERENCE
    """What the variants are compared with: a variant, or fixed values where none is measured."""
    task_loss: Share = 0.03
    """The share of the reference's score that a variant may lose on any one task. That it loses less must be shown, by
    the one-sided 95 % bound."""
    answer_growth: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.2
    """The share by which a variant's answers may be longer than the reference's to the same questions: each costs so
    much more. More must be shown, by the 95 % interval."""
    error_rate: Annotated[float, Field(gt=0, le=0.4)] = 0.05
    """The probability that one of two identical variants is called better, or that variants that differ by more than a
    margin are called equivalent; all looks at the data together."""

    @property
    def reference_variant(self) -> str:
        """The variant with which the others are compared; empty if fixed values are in its place."""
        return self.reference if isinstance(self.reference, str) else ""

    @property
    def requalifies(self) -> bool:
        """Whether what is in production is compared with itself under another stack, which need not be better."""
        return self.reference == PRODUCTION


MARGIN_OF: Final = {name: name if name in ("quality", "memory") else "speed" for name in METRICS}
"""The field of ``Margins`` that applies to each metric."""
