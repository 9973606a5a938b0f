"""Hard constraints: limits that a variant must meet to be chosen at all, however good its score. Imports no pandas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from scoring.metrics import Metric

MEASURES: Final[dict[str, Metric]] = {
    "quality_recovery": Metric("× fp16", True, "quality divided by fp16's quality"),
    "top1_agreement": Metric(
        "0–1", True, "share of positions at which variant and fp16 give the same token the highest probability"
    ),
    "greedy_agreement": Metric("0–1", True, "share of prompts to which variant and fp16 give the same greedy answer"),
    "kl_divergence": Metric(
        "nats/token", False, "mean KL divergence of the variant's next-token distribution from fp16's"
    ),
    "ttft_p95_ms": Metric("ms", False, "95th percentile of the time to first token"),
    "tpot_p95_ms": Metric("ms", False, "95th percentile of the time per output token after the first"),
    "e2el_p95_ms": Metric("ms", False, "95th percentile of a request's end-to-end time"),
    "goodput_share": Metric("0–1", True, "share of requests that meet the workload's latency targets"),
    "memory_gib": Metric("GiB", False, "size of the weights to load"),
}
"""What can be constrained: by ``min`` if higher is better, by ``max`` if lower is better."""


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class AtLeast(_Closed):
    min: Annotated[float, Field(ge=0, le=1)]
    """A share: 0.98, not 98."""


class AtMost(_Closed):
    max: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Constraints(_Closed):
    """Limits by measure (see ``MEASURES`` for units and meanings); None: no limit. A value at its limit meets it."""

    quality_recovery: AtLeast | None = None
    top1_agreement: AtLeast | None = None
    greedy_agreement: AtLeast | None = None
    kl_divergence: AtMost | None = None
    ttft_p95_ms: AtMost | None = None
    tpot_p95_ms: AtMost | None = None
    e2el_p95_ms: AtMost | None = None
    goodput_share: AtLeast | None = None
    memory_gib: AtMost | None = None

    def limits(self) -> dict[str, float]:
        """The limits that are set, by measure; ``MEASURES`` says whether each is a minimum or a maximum."""
        given = {name: getattr(self, name) for name in MEASURES}
        return {name: each.min if isinstance(each, AtLeast) else each.max for name, each in given.items() if each}

    @model_serializer(mode="wrap")
    def _only_what_is_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}


@dataclass(frozen=True)
class Violation:
    """A constraint that a variant does not meet."""

    name: str
    limit: float
    value: float | None
    """None: not measured."""
    text: str
    """For a person, with the numbers: 'quality_recovery 0.91 is below the minimum of 0.95'."""


def violations(values: Mapping[str, float | None], constraints: Constraints) -> list[Violation]:
    """The constraints that a variant's *values* (by measure, in its unit) do not meet, in the order of ``MEASURES``.

    A value that is missing, NaN or infinite was not measured, and meets no constraint.
    """
    found = []
    for name, limit in constraints.limits().items():
        value, is_minimum = values.get(name), MEASURES[name].higher_is_better
        bound = f"the {'minimum' if is_minimum else 'maximum'} of "
        if value is None or not math.isfinite(value):
            text = f"{name} was not measured, so it does not meet {bound}{limit:.12g}"
            found.append(Violation(name, limit, None, text))
        elif value < limit if is_minimum else value > limit:
            # With all its digits if it would otherwise read like the limit that it violates.
            number = short if (short := f"{value:.4g}") != f"{limit:.4g}" else repr(float(value))
            text = f"{name} {number} is {'below' if is_minimum else 'above'} {bound}{limit:.12g}"
            found.append(Violation(name, limit, value, text))
    return found
