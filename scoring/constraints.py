"""Hard constraints: limits that a variant must meet to be chosen at all, however good its score. Imports nothing
heavy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from scoring.closed import Closed
from scoring.metrics import Metric

MEASURES: Final[dict[str, Metric]] = {
    "quality_recovery": Metric("× reference", True, "quality divided by the reference's"),
    "top1_agreement": Metric(
        "0–1", True, "share of positions at which variant and reference give the same token the highest probability"
    ),
    "greedy_agreement": Metric("0–1", True, "share of prompts that variant and reference answer alike, greedily"),
    "kl_divergence": Metric(
        "nats/token", False, "mean KL divergence of the variant's next-token distribution from the reference's"
    ),
    "ttft_p95_ms": Metric("ms", False, "95th percentile of the time to first token"),
    "tpot_p95_ms": Metric("ms", False, "95th percentile of the time per output token after the first"),
    "e2el_p95_ms": Metric("ms", False, "95th percentile of a request's end-to-end time"),
    "goodput_share": Metric("0–1", True, "share of requests that meet the workload's latency targets"),
    "memory_gib": Metric("GiB", False, "size of the weights to load"),
}
"""What can be constrained: by ``min`` if higher is better, by ``max`` if lower is better."""


class AtLeast(Closed):
    min: Annotated[float, Field(ge=0, le=1)]
    """A share: 0.98, not 98."""


class AtMost(Closed):
    max: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Constraints(Closed):
    """Limits by measure (see ``MEASURES`` for units and meanings); None stands for no limit. A value at its limit meets
    it."""

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
        """Return the limits that are set, by measure; ``MEASURES`` says whether each is a minimum or a maximum."""
        bounds = {name: getattr(self, name) for name in MEASURES}
        return {name: bound.min if isinstance(bound, AtLeast) else bound.max for name, bound in bounds.items() if bound}

    @model_serializer(mode="wrap")
    def _only_what_is_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None}


def meets(name: str, value: float, limit: float) -> bool:
    """Return whether the value of a measure meets its limit; one that is not finite was not measured, and meets
    none."""
    return math.isfinite(value) and (value >= limit if MEASURES[name].higher_is_better else value <= limit)


def bound_of(name: str, limit: float) -> str:
    """Name a limit: 'the minimum of 0.95'."""
    return f"the {'minimum' if MEASURES[name].higher_is_better else 'maximum'} of {limit:.12g}"


def violations(values: Mapping[str, float | None], constraints: Constraints) -> list[str]:
    """Name the constraints that a variant's *values* (by measure, in its unit) do not meet, in the order of
    ``MEASURES``: 'quality_recovery 0.91 is below the minimum of 0.95'. A value that is missing, NaN or infinite was not
    measured, and meets no constraint."""
    violated = []
    for name, limit in constraints.limits().items():
        value = values.get(name)
        if value is None or not math.isfinite(value):
            violated.append(f"{name} was not measured, so it does not meet {bound_of(name, limit)}")
        elif not meets(name, value, limit):
            # With all its digits if it would otherwise read like the limit that it violates.
            number = short if (short := f"{value:.4g}") != f"{limit:.4g}" else repr(float(value))
            side = "below" if MEASURES[name].higher_is_better else "above"
            violated.append(f"{name} {number} is {side} {bound_of(name, limit)}")
    return violated
