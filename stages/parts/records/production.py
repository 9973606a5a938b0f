"""``production_metrics.json``: which variant is in production, and why."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from stages.parts.base.record import Record
from stages.parts.machine.hardware import Hardware
from stages.parts.records.evaluation import Engine


class Paired(Record):
    """A variant beside fp16 on the very same items of one task."""

    task: str
    kind: Literal["accuracy", "perplexity"]
    difference: float
    """Variant minus fp16: in accuracy, or in bits per byte (positive is worse)."""
    low: float
    high: float
    """95 % interval, bootstrap over the items."""
    lost: int | None
    """Items that fp16 gets right and the variant wrong; None for perplexity."""
    gained: int | None
    p_value: float | None
    """McNemar's exact test of lost against gained."""


class Price(Record):
    """What an hour of the serving hardware costs: of one replica, with all its GPUs."""

    per_hour: float = Field(gt=0, allow_inf_nan=False)
    currency: str = "USD"


class Cost(Record):
    """What a million output tokens cost."""

    value: float
    low: float
    high: float | None
    """95 % interval, from the noise of the rate; None: no bound, because the rate may be 0."""
    currency: str
    tokens_per_s: float
    """The output tokens per second that it is computed from."""
    basis: Literal["goodput", "throughput"]
    """goodput: the rate at which the workload's latency targets are met. throughput: the measured rate, because the
    workload sets no targets."""


class Divergence(Record):
    """How far a variant's next-token distributions are from fp16's, on the same positions of held-out text."""

    documents: int
    tokens: int
    """Positions compared, over all documents."""
    kl: float
    """Mean KL(fp16 ‖ variant) in nats per token; a lower bound (``scoring.divergence``)."""
    kl_low: float
    kl_high: float
    """95 % interval, bootstrap over documents."""
    top1_agreement: float
    """Share of positions at which both hold the same token likeliest."""
    top1_low: float
    top1_high: float


def divergence_measures(divergence: Divergence | None, *, is_reference: bool) -> dict[str, float | None]:
    """What a divergence gives of ``scoring.constraints.MEASURES``; None for what was not measured.

    Args:
        is_reference: whether the variant is fp16, which does not diverge from itself.
    """
    if is_reference:
        return {"kl_divergence": 0.0, "top1_agreement": 1.0}
    return {
        "kl_divergence": divergence.kl if divergence else None,
        "top1_agreement": divergence.top1_agreement if divergence else None,
    }


class Interval(Record):
    """Of 95 %, from the draws that the decision is made of; the value itself always lies in it."""

    low: float
    high: float


class Change(Record):
    """A metric beside fp16's, as a share of fp16's: −0.1 is ten percent less."""

    value: float
    low: float
    high: float
    """95 % interval, from the same draws of both, so that what moves both alike cancels out."""


class Candidate(Record):
    """One variant in a decision."""

    variant: str
    digest: str | None
    evaluation_key: str | None
    evaluation_digest: str | None
    """``digest_of`` the whole evaluation, which holds the digest of its samples."""
    excluded: str | None
    """Why it could not win, or None if it could."""
    raw: dict[str, float]
    """By metric, in the units of ``scoring.metrics.METRICS``; empty if it was not measured."""
    intervals: dict[str, Interval] = Field(default_factory=dict)
    """By metric, of ``raw``; without those that are counted (memory), or whose noise is not known."""
    change: dict[str, Change] = Field(default_factory=dict)
    """By metric; empty for fp16 itself, and where fp16 was not measured."""
    normalized: dict[str, float]
    """By metric, 0–1, 1 is best."""
    score: float | None
    score_low: float | None
    score_high: float | None
    """95 % interval of the score, from the noise of what was measured."""
    win_probability: float | None
    """That it keeps every constraint and scores highest if the measurement is repeated."""
    weights_share: float | None
    """Share of the weightings near the profile's under which it scores highest."""
    any_weights_share: float | None = None
    """The same over all weightings there are."""
    pareto: bool | None
    """Whether no other variant is at least as good in every metric and better in one."""
    against_fp16: tuple[Paired, ...]
    """Task by task; empty for fp16 itself, and where the items can't be paired."""
    recovery: dict[str, float] = Field(default_factory=dict)
    """By task, the variant's score divided by fp16's (``TaskScore.score``: for perplexity tasks the probability per
    byte); above 1 is better than fp16. Empty where fp16 was not measured."""
    divergence: Divergence | None = None
    """None for fp16 itself, and where it was not measured."""
    cost: Cost | None
    """Where the platform has a price, and the variant was measured and met the latency targets, if there are any."""


class Margin(Record):
    """The winner's score beside that of the best of the others."""

    over: str
    value: float
    """The difference; negative where the winner ranks behind, because the evidence does not separate them."""
    low: float
    high: float
    """95 % interval, from the same draws of both."""


class Production(Record):
    """``production_metrics.json``: which variant is in production, and exactly why."""

    schema_version: Literal[1] = 1
    model: str
    commit: str
    license: str | None
    base_digest: str
    run: str | None
    winner: str
    release: str
    """The directory's name under ``releases/``."""
    reason: str
    notes: tuple[str, ...]
    """What else a reader has to know of the measurement, such as a machine that drifted."""
    separated: bool
    """Whether the evidence separates the best score from the others; if not, quality and memory decided."""
    margin: Margin | None = None
    """None where nobody else could be chosen."""
    profile: dict[str, Any]
    weights: dict[str, float]
    """Shares with sum 1."""
    noise: dict[str, float]
    """By metric, in its unit: the largest difference between two variants that chance explains. Without those that were
    measured on different hardware, and do not compare."""
    units: dict[str, str]
    """Of the raw metrics."""
    price: Price | None
    """What the costs are computed with; None where the platform names no price."""
    candidates: tuple[Candidate, ...]
    """By score, best first; those that could not win last."""
    workload: dict[str, Any]
    engine: Engine
    """The winner's, as it was measured."""
    hardware: Hardware
    key: str
    """``digest_of`` what the decision follows from: same key, same decision."""
    decided_at: datetime
