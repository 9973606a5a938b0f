"""A scoring profile: what a choice is made by, and the limits that a variant has to keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from scoring.constraints import Constraints
from scoring.criteria import Criteria
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

    @model_validator(mode="before")
    @classmethod
    def _with_the_limit_as_anchor(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        limit, anchors = _limit(data.get("constraints")), data.get("anchors") or {}
        if limit is None or not isinstance(anchors, Mapping) or "quality" in anchors:
            return data
        return {**data, "anchors": {**anchors, "quality": {"zero": limit, "one": 1.0}}}


def _limit(constraints: Any) -> float | None:
    """Return the limit of the quality recovery, if it can be an anchor."""
    limits = constraints.model_dump() if isinstance(constraints, Constraints) else constraints
    recovery = limits.get("quality_recovery") if isinstance(limits, Mapping) else None
    limit = recovery.get("min") if isinstance(recovery, Mapping) else getattr(recovery, "min", None)
    return limit if isinstance(limit, float) and 0 < limit < 1 else None
