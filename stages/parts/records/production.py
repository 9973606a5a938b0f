"""``production_metrics.json``: which variant is in production, and why."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Literal

from pydantic import Field

from scoring.metrics import odds
from scoring.names import REFERENCE, Outcome, Promotion
from scoring.results import Change, Comparison, Divergence, More
from stages.parts.base.serving_settings import Recipe
from stages.parts.base.store import Record
from stages.parts.machine.hardware import Hardware
from stages.parts.records.evaluation import Engine

RULES: Final = 12
"""Raised when the same measurements would give another document, so that old decisions are not used again."""


class Paired(Record):
    """A variant compared with fp16 on the same items of one task."""

    task: str
    kind: Literal["accuracy", "perplexity"]
    difference: float
    """Variant minus fp16: in accuracy, or in bits per byte (positive is worse)."""
    low: float
    high: float
    """95 % interval, by Student's t over the items."""
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
    """The cost of a million output tokens, and of a thousand answers."""

    value: float
    low: float
    high: float | None
    """95 % interval, from the noise of the throughput; without a width if that is not known. In decisions by rules
    before 11, None stands for no upper bound."""
    currency: str
    tokens_per_s: float
    """The output tokens per second that the cost is computed from, on all GPUs that the price is for."""
    basis: Literal["goodput", "throughput"]
    """goodput: the rate of tokens within the workload's latency targets. throughput: the measured rate, because the
    workload sets no targets."""
    answers: float | None = None
    """Of a thousand answers as long as those to the quality tasks' questions; None if these were not counted."""


class Interval(Record):
    """A 95 % interval, which includes the value itself."""

    low: float
    high: float


class Loss(Record):
    """The share of the reference's score that a variant loses on one task; negative for a gain."""

    task: str
    value: float
    low: float
    high: float
    """One-sided 95 % bounds, from the same items."""
    limit: float
    """The share that may be lost."""
    verdict: Literal["pass", "fail", "unclear"]
    """pass: it is shown that less than the limit is lost. fail: that more is. unclear: too few items to tell."""


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
    """The change of each metric from the reference; empty for the reference itself, and without a measured one."""
    losses: tuple[Loss, ...] = ()
    """Task by task; empty for the reference itself."""
    answer_tokens: float | None = None
    """The mean length of its answers to the quality tasks' questions; None if they were not counted."""
    answer_growth: Change | None = None
    """By what share its answers to the same questions are longer than the reference's."""
    normalized: dict[str, float]
    """Each metric between its anchors: 0 at the anchor of 0 and beyond, 1 at the anchor of 1 and beyond."""
    score: float | None
    score_low: float | None
    score_high: float | None
    """95 % interval of the score; None after a single start of the servers."""
    chance: float | None = None
    """The probability that it is truly the best of the variants that can be chosen; None after a single start."""
    weights_share: float | None = None
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

    @property
    def score_text(self) -> str:
        """The score with its interval, for a candidate that has one."""
        if self.score_low is None or self.score_high is None:
            return f"{self.score:.3f}"
        return f"{self.score:.3f} ({self.score_low:.2f}–{self.score_high:.2f})"

    @property
    def chance_text(self) -> str:
        return "–" if self.chance is None else odds(self.chance)


class Standing(Record):
    """The winner compared with the release that is in production, by which it takes that one's place or does not."""

    release: str
    relation: Literal["better", "equivalent", "not worse", "open", "worse", "unmeasured"]
    """better: worse in nothing by more than the margins, and better, beyond chance. equivalent: it differs by less than
    the margins. not worse: in nothing by more than the margins, which suffices for its weights under another engine.
    worse: in something, by more than its margin. open: too few data to tell. unmeasured: the release could not be
    measured beside the winner."""
    reasons: tuple[str, ...] = ()
    """What is worse or, if nothing is, what is not shown."""
    change: dict[str, Change] = Field(default_factory=dict)
    """The change of each metric from the release's."""
    losses: tuple[Loss, ...] = ()
    """Of the release's score, task by task."""
    forced: bool = Field(default=False, exclude_if=lambda value: not value)
    """Whether a person wanted the winner published, however the two compare (``--force-publish``)."""

    @property
    def promotion(self) -> Promotion:
        """What becomes of the winner."""
        if self.forced or self.relation in ("better", "not worse"):
            return "promoted"
        return "equivalent" if self.relation == "equivalent" else "kept"


class Production(Record):
    """``production_metrics.json``: which variant is in production, and why in detail."""

    schema_version: Literal[2] = 2
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
    rules: int
    """The version of the rules that decided; only a version of Slipway with the same rules can replay the decision."""
    slipway: str
    """The version of Slipway that decided."""
    outcome: Outcome
    """decided: the winner is better than every other, beyond chance. equivalent: others are as good, within the
    profile's margins, and the winner is the cheapest to run, by memory, then by speed. unresolved: too few data to
    tell; the winner is the first of the ranking. incomplete: a variant that was asked for could not be made or
    measured; the winner is the best of the others."""
    missing: tuple[str, ...] = ()
    """The variants because of which it is incomplete."""
    starts: int = 1
    """How often the variants' servers were started and loaded, at most."""
    comparisons: tuple[Comparison, ...] = ()
    """The first of the ranking with each other variant that could still be chosen."""
    more: More | None = None
    """None if the choice is settled, if the noise is not known yet, or if no reasonable amount would do."""
    profile: dict[str, Any]
    weights: dict[str, float]
    """Shares with sum 1."""
    units: dict[str, str]
    """The unit of each raw metric."""
    price: Price | None
    """What the costs are computed from; None if the platform has no price."""
    candidates: tuple[Candidate, ...]
    """Sorted by score, the best first, followed by those that could not win."""
    anchor: str = Field(default="", exclude_if=lambda value: not value)
    """The variant with whose speed and memory the others are compared, because the reference was asked the questions
    only; absent if it was measured."""
    standing: Standing | None = Field(default=None, exclude_if=lambda value: value is None)
    """Absent if nothing was in production, or the winner's run made that itself."""
    workload: dict[str, Any]
    recipe: Recipe | None = Field(default=None, exclude_if=lambda value: value is None)
    """The recipe by which the winner was measured and is served; absent if it has none."""
    engine: Engine
    """The engine of the winner, as it was measured."""
    hardware: Hardware
    prompt_tokens_per_s: float | None = Field(default=None, exclude_if=lambda value: value is None)
    """How fast the winner, as it is served, reads prompts under load (``stages.parts.samples.figures``). Absent in
    older decisions."""
    key: str
    """``digest_of`` everything that the decision follows from: the same key means the same decision."""
    decided_at: datetime

    @property
    def reference(self) -> str:
        """The variant with which the others are compared; empty if fixed values are in its place."""
        reference = self.profile.get("reference", REFERENCE)
        return reference if isinstance(reference, str) else ""

    @property
    def compared_with(self) -> str:
        """What the changes are relative to."""
        reference = self.reference or "the profile’s values"
        return f"{reference} in quality, and {self.anchor} in speed and memory" if self.anchor else reference

    @property
    def adapters(self) -> dict[str, str]:
        """The digests of the LoRA adapters that were measured, and are served, with the winner, by name."""
        return dict(self.workload.get("adapters", {}))

    @property
    def promotion(self) -> Promotion:
        """What becomes of the winner."""
        return self.standing.promotion if self.standing else "promoted"

    @property
    def headline(self) -> str:
        """The winner and the outcome in a few words, alike in all commands and pages."""
        stays = f"; {self.promotion}, so that {self.standing.release} stays" if self.standing else ""
        return f"{self.winner}: {self.meaning}{stays if self.promotion != 'promoted' else ''}"

    @property
    def ended(self) -> str:
        """The outcome and, if the winner does not take the place of what is in production, why not, in a word each."""
        return self.outcome if self.promotion == "promoted" else f"{self.outcome}, {self.promotion}"

    @property
    def meaning(self) -> str:
        """What the outcome means, without the winner's name."""
        if self.outcome == "incomplete":
            return f"incomplete, without {', '.join(self.missing)}"
        if self.outcome == "equivalent":
            equal = [comparison.other for comparison in self.comparisons if comparison.relation == "equivalent"]
            others = [name for name in (self.candidates[0].variant, *equal) if name != self.winner]
            return f"equivalent to {', '.join(others)}, and the cheapest to run"
        if self.outcome == "unresolved":
            return "unresolved, first of the ranking"
        able = [candidate for candidate in self.candidates if candidate.excluded is None]
        return "decided, better than every other" if len(able) > 1 else "decided, the only choice"

    @property
    def chosen(self) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.variant == self.winner)
