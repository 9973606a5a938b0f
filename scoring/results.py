"""Results as the store's documents hold them. Imports nothing heavy, so that a command starts quickly."""

from __future__ import annotations

from typing import Literal

from scoring.closed import Closed

Relation = Literal["better", "equivalent", "not worse", "open", "worse"]


class Change(Closed):
    """A metric's difference from the reference's, as a share of it: −0.1 is ten percent less. For latency it is that of
    the mean over the same requests to both, for quality that on the same items."""

    value: float
    low: float | None
    high: float | None
    """95 % interval; None after a single start of the servers, which does not show the noise of starts."""


class Comparison(Closed):
    """The first of the ranking compared with another variant that could be chosen, or may pass the gates."""

    other: str
    relation: Relation
    """better: the first has the higher score, beyond chance. equivalent: they differ by less than the profile's
    margins. open: too few data to tell. worse, of what is in production only: the first is worse in something by more
    than a margin."""
    lead: float
    """The difference of their scores; where these are equal, of the sums without clipping."""
    low: float | None
    high: float | None
    """95 % interval; None after a single start of the servers."""
    confidence: float
    """The probability that the first is truly the better, 0.5–1."""
    share_by_items: float = 0.0
    """The share of the lead's variance that comes from the sampling of items, 0–1; 0 in older decisions."""


class More(Closed):
    """How much more measuring would settle an unresolved choice, if the estimates stayed as they are."""

    starts: int
    """Further starts of every variant's server."""
    items: int
    """How many times the present items of the quality tasks; 1: these are enough."""


class Divergence(Closed):
    """How far a variant's next-token distributions are from fp16's, at the same positions of held-out text."""

    documents: int
    tokens: int
    """Positions compared, over all documents."""
    kl: float
    """Mean KL(fp16 ‖ variant) in nats per token; a lower bound (``scoring.divergence``)."""
    kl_low: float
    kl_high: float
    """95 % interval over documents, because the positions of one are not independent."""
    top1_agreement: float
    """Share of positions at which both give the same token the highest probability."""
    top1_low: float
    top1_high: float
    greedy_agreement: float | None = None
    """Share of the held-out texts to whose beginning both give the same greedy answer; None in older decisions."""
    greedy_low: float | None = None
    greedy_high: float | None = None
    greedy_prefix: float | None = None
    """Mean share of such an answer before the first token that differs."""


def divergence_measures(divergence: Divergence | None, *, is_reference: bool) -> dict[str, float | None]:
    """Return what a divergence gives of ``scoring.constraints.MEASURES``; None for what was not measured.
    *is_reference*: whether the variant is fp16, which does not diverge from itself."""
    if is_reference:
        return {"kl_divergence": 0.0, "top1_agreement": 1.0, "greedy_agreement": 1.0}
    return {
        "kl_divergence": divergence.kl if divergence else None,
        "top1_agreement": divergence.top1_agreement if divergence else None,
        "greedy_agreement": divergence.greedy_agreement if divergence else None,
    }
