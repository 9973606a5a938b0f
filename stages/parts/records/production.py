"""``production_metrics.json``: which variant is in production, and why."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from stages.parts.base.record import Record
from stages.parts.machine.hardware import Hardware
from stages.parts.records.evaluation import Engine


class Paired(Record):
    """A variant compared with fp16 on the same items of one task."""

    task: str
    kind: Literal["accuracy", "perplexity"]
    difference: float
    """Variant minus fp16: in accuracy, or in bits per byte (positive is worse)."""
    low: float
    high: float
    """95 % interval, bootstrap over the items."""
    lost: int | None
    """Items that fp16 answers correctly and the variant does not; None for perplexity."""
    gained: int | None
    p_value: float | None
    """McNemar's exact test of lost against gained."""


class Price(Record):
    """The price of the serving hardware per hour: of one replica, with all its GPUs."""

    per_hour: float = Field(gt=0, allow_inf_nan=False)
    currency: str = "USD"


class Cost(Record):
    """The cost of a million output tokens."""

    value: float
    low: float
    high: float | None
    """95 % interval, from the noise of the rate; None: no upper bound, because the rate may be 0."""
    currency: str
    tokens_per_s: float
    """The output tokens per second that the cost is computed from."""
    basis: Literal["goodput", "throughput"]
    """goodput: the rate of tokens within the workload's latency targets. throughput: the measured rate, because the
    workload sets no targets."""


class Divergence(Record):
    """How far a variant's next-token distributions are from fp16's, at the same positions of held-out text."""

    documents: int
    tokens: int
    """Positions compared, over all documents."""
    kl: float
    """Mean KL(fp16 ‖ variant) in nats per token; a lower bound (``scoring.divergence``)."""
    kl_low: float
    kl_high: float
    """95 % interval, bootstrap over documents."""
    top1_agreement: float
    """Share of positions at which both give the same token the highest probability."""
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
    """A 95 % interval from the draws that the decision is based on; it always includes the value itself."""

    low: float
    high: float


class Change(Record):
    """A metric's difference from fp16's, as a share of fp16's: −0.1 is ten percent less."""

    value: float
    low: float
    high: float
    """95 % interval, from the same draws of both, so that common variation cancels out."""


class Candidate(Record):
    """One variant in a decision."""

    variant: str
    digest: str | None
    evaluation_key: str | None
    evaluation_digest: str | None
    """``digest_of`` the whole evaluation, which includes the digest of its samples."""
    excluded: str | None
    """Why it could not win, or None if it could."""
    raw: dict[str, float]
    """The measured value of each metric, in the units of ``scoring.metrics.METRICS``; empty if it was not measured."""
    intervals: dict[str, Interval] = Field(default_factory=dict)
    """The interval of each metric in ``raw``, except counted metrics (memory) and metrics whose noise is not known."""
    change: dict[str, Change] = Field(default_factory=dict)
    """The change of each metric; empty for fp16 itself, and if fp16 was not measured."""
    normalized: dict[str, float]
    """Each metric on a scale from 0 to 1, where 1 is best."""
    score: float | None
    score_low: float | None
    score_high: float | None
    """95 % interval of the score, from the noise of the measurements."""
    win_probability: float | None
    """The probability that it meets every constraint and scores highest if the measurement is repeated."""
    weights_share: float | None
    """The share of the weightings near the profile's under which it scores highest."""
    any_weights_share: float | None = None
    """The same over all possible weightings."""
    pareto: bool | None
    """Whether no other variant is at least as good in every metric and better in one."""
    against_fp16: tuple[Paired, ...]
    """Task by task; empty for fp16 itself, and if no items can be paired."""
    recovery: dict[str, float] = Field(default_factory=dict)
    """The variant's score divided by fp16's, for each task (``TaskScore.score``: for perplexity tasks the
    probability per byte); above 1 is better than fp16. Empty if fp16 was not measured."""
    divergence: Divergence | None = None
    """None for fp16 itself, and if it was not measured."""
    cost: Cost | None
    """None if the platform has no price, the variant was not measured, or no request met the latency targets."""


class Margin(Record):
    """The winner's score compared with that of the best other variant."""

    over: str
    value: float
    """The difference; negative if the winner ranks behind, because the evidence does not separate them."""
    low: float
    high: float
    """95 % interval, from the same draws of both."""


class Production(Record):
    """``production_metrics.json``: which variant is in production, and why in detail."""

    schema_version: Literal[1] = 1
    model: str
    commit: str
    license: str | None
    base_digest: str
    run: str | None
    winner: str
    release: str
    """The directory's name under ``releases/``; empty if the decision was not published."""
    reason: str
    notes: tuple[str, ...]
    """What else a reader has to know about the measurement, such as a machine that drifted."""
    wording: int = 1
    """The version of the sentences in ``reason``, ``notes`` and ``excluded``; only that version verifies them."""
    separated: bool
    """Whether the evidence separates the best score from the others; if not, quality and memory decided."""
    margin: Margin | None = None
    """None if no other variant could be chosen."""
    profile: dict[str, Any]
    weights: dict[str, float]
    """Shares with sum 1."""
    noise: dict[str, float]
    """The largest difference between two variants that chance explains, for each metric in its unit. Without metrics
    that are not comparable, because the variants were measured on different hardware."""
    units: dict[str, str]
    """The unit of each raw metric."""
    price: Price | None
    """What the costs are computed from; None if the platform has no price."""
    candidates: tuple[Candidate, ...]
    """Sorted by score, the best first, followed by those that could not win."""
    workload: dict[str, Any]
    engine: Engine
    """The engine of the winner, as it was measured."""
    hardware: Hardware
    key: str
    """``digest_of`` everything that the decision follows from: the same key means the same decision."""
    decided_at: datetime
