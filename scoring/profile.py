"""A scoring profile: what a choice is made by, and the limits that a variant has to keep."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from scoring.constraints import Constraints
from scoring.criteria import Anchor, Criteria
from scoring.names import REFERENCE


class Profile(Criteria):
    name: str
    description: str = ""
    constraints: Constraints = Constraints()
    """The limits that a variant must meet to be chosen at all. Unless ``anchors`` says otherwise, quality counts 0 at
    the limit of ``quality_recovery``."""

    def for_format(self, published: str) -> Self:
        """Compare with the variant in the format in which the model was *published* in place of fp16."""
        return self.model_copy(update={"reference": published}) if self.reference == REFERENCE else self

    @model_validator(mode="after")
    def _with_the_limit_as_anchor(self) -> Self:
        recovery = self.constraints.quality_recovery
        if recovery and 0 < recovery.min < 1 and "quality" not in self.anchors.model_fields_set:
            quality = Anchor(zero=recovery.min, one=1.0)
            object.__setattr__(self, "anchors", self.anchors.model_copy(update={"quality": quality}))
        return self
