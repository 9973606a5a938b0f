"""How far a variant's next-token distributions are from the reference's: KL divergence and top-1 agreement.

A server reports only the likeliest tokens of each distribution. Both distributions are therefore made coarser in the
same way: each token in both lists counts by itself; the tokens that only the reference lists are merged into one
outcome, those that only the variant lists into another, and the rest into a third. Merging outcomes can only reduce the
KL divergence, so the divergence between the coarse distributions is never larger than that between the full ones (the
data-processing inequality: Cover & Thomas, Elements of Information Theory, 2nd ed. 2006, section 2.8; for a partition,
the log-sum inequality, Theorem 2.7.1).

The probability of a token that is not listed is bounded: it is at most that of the last listed token. Among all
distributions within these bounds, the least divergent ones are used. The result is thus a lower bound of the true
divergence: a variant whose bound exceeds a limit truly exceeds it. The bound is close to the truth for similar
distributions, whose lists are nearly the same, and still large for distributions that have no token in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import numpy as np
import numpy.typing as npt

from scoring.arrays import Floats
from scoring.items import Difference, mean_difference
from scoring.probes import common_prefix
from scoring.results import Divergence

Booleans = npt.NDArray[np.bool_]

SMALLEST: Final = 1e-6
"""The precision of the probability outside a list, which is computed from single-precision log-probabilities with six
decimals. A smaller rest counts as this on both sides, so that rounding causes no divergence, and an empty rest no
infinite one."""
NOTHING: Final = 1e-15
"""Replaces 0 in a logarithm."""
STEPS: Final = 20
"""Steps of the search for the minimum; usually the first one reaches it."""
ROUNDING: Final = 1e-3
"""How far the probabilities of a list may add up to more than 1."""


@dataclass(frozen=True)
class Distributions:
    """Next-token distributions at the positions of one document, each by its likeliest tokens, the likeliest first."""

    tokens: npt.NDArray[np.int64]
    """Token ids, shape (positions, listed)."""
    logprobs: Floats
    """Natural logarithms of their probabilities, same shape."""


def divergence(
    reference: Sequence[Distributions],
    variant: Sequence[Distributions],
    answers: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]] | None = None,
) -> Divergence:
    """Compare document by document.

    Args:
        answers: of the reference and of the variant to the beginning of each document, if they were recorded. One flip
            makes everything after it another text, so that the share of equal answers falls with their length.

    Raises:
        ValueError: the documents or positions differ, there are none, or the numbers are not log-probabilities.
    """
    pairs = list(zip(reference, variant, strict=True))
    if not pairs:
        raise ValueError("no documents to compare")
    apart = [position_divergences(ours, theirs) for ours, theirs in pairs]
    positions = np.array([float(len(document)) for document in apart])
    kl = _over_documents([document.mean() for document in apart], positions)
    top1 = _over_documents([(ours.tokens[:, 0] == theirs.tokens[:, 0]).mean() for ours, theirs in pairs], positions)
    greedy = _greedy_agreement(*answers) if answers else {}
    return Divergence(
        documents=len(pairs),
        tokens=int(positions.sum()),
        kl=kl.mean,
        kl_low=kl.low,
        kl_high=kl.high,
        top1_agreement=top1.mean,
        top1_low=top1.low,
        top1_high=min(1.0, top1.high),
        **greedy,
    )


def _greedy_agreement(reference: Sequence[Sequence[int]], variant: Sequence[Sequence[int]]) -> dict[str, float]:
    """Compare the answers token by token."""
    pairs = [(tuple(ours), tuple(theirs)) for ours, theirs in zip(reference, variant, strict=True)]
    share = _over_documents([float(ours == theirs) for ours, theirs in pairs])
    prefixes = [1.0 if a == b else common_prefix(a, b) / max(len(a), len(b)) for a, b in pairs]
    return {
        "greedy_agreement": share.mean,
        "greedy_low": share.low,
        "greedy_high": min(1.0, share.high),
        "greedy_prefix": fmean(prefixes),
    }


def position_divergences(reference: Distributions, variant: Distributions) -> Floats:
    """Compute KL(reference ‖ variant) at each position in nats: a lower bound (see above), never below 0."""
    _check(reference)
    _check(variant)
    if len(reference.tokens) != len(variant.tokens):
        raise ValueError(f"{len(reference.tokens)} positions of the reference, {len(variant.tokens)} of the variant")
    equal = reference.tokens[:, :, None] == variant.tokens[:, None, :]
    ours, theirs = equal.any(axis=2), equal.any(axis=1)
    p, q = np.exp(reference.logprobs), np.exp(variant.logprobs)
    logq = (equal * variant.logprobs[:, None, :]).sum(axis=2)
    listed = np.where(ours, p * (reference.logprobs - logq), 0.0).sum(axis=1)
    apart: Floats = np.maximum(listed + _least_unlisted(p, q, ours, theirs), 0.0)
    return apart


def _least_unlisted(p: Floats, q: Floats, ours: Booleans, theirs: Booleans) -> Floats:
    """Compute the smallest contribution of the tokens that are not in both lists.

    Let A be the tokens that only the reference lists, and B those that only the variant lists. P(A) and Q(B) are known,
    Q(A) = a and P(B) = b are not. With R and S the probabilities outside the lists, the sum P(A)·ln(P(A)/a) +
    b·ln(b/Q(B)) + (R−b)·ln((R−b)/(S−a)) is convex in (a, b), with its minimum where all three ratios are equal, or at a
    bound. *ours* and *theirs*: which tokens of each list are in the other one too."""
    p_only, q_only = np.where(ours, 0.0, p).sum(axis=1), np.where(theirs, 0.0, q).sum(axis=1)
    p_left, q_left = (np.maximum(1.0 - listed.sum(axis=1), SMALLEST) for listed in (p, q))
    most_a, most_b = (
        np.maximum((~shared).sum(axis=1) * last, SMALLEST) for shared, last in ((ours, q[:, -1]), (theirs, p[:, -1]))
    )
    ratio = (p_left + p_only) / (q_left + q_only)
    a, b = np.minimum(p_only / ratio, most_a), np.minimum(q_only * ratio, most_b)
    for _ in range(STEPS):
        b = np.minimum(p_left * q_only / (q_only + q_left - a), most_b)
        a = np.minimum(q_left * p_only / (p_only + p_left - b), most_a)
    return _term(p_only, a) + _term(b, q_only) + _term(p_left - b, q_left - a)


def _term(p: Floats, q: Floats) -> Floats:
    """Compute p·ln(p/q), which is 0 if p is 0."""
    p, q = np.maximum(p, NOTHING), np.maximum(q, NOTHING)
    term: Floats = p * np.log(p / q)
    return term


def _over_documents(means: Sequence[float], positions: Floats | None = None) -> Difference:
    """Average what can't be negative."""
    values = np.array(means, dtype=float)
    mean = mean_difference(np.zeros(len(values)), values, positions)
    return mean._replace(low=max(0.0, mean.low))


def _check(document: Distributions) -> None:
    if document.tokens.ndim != 2 or document.tokens.shape != document.logprobs.shape or not document.tokens.size:
        raise ValueError(
            f"tokens {document.tokens.shape} and log-probabilities {document.logprobs.shape} need one shape, not empty"
        )
    with np.errstate(over="ignore"):
        total = np.exp(document.logprobs).sum(axis=1)
    if not np.isfinite(document.logprobs).all() or not (total <= 1.0 + ROUNDING).all():
        raise ValueError("log-probabilities that are not finite, or add up to more than 1")
    if (np.diff(document.logprobs, axis=1) > ROUNDING).any():
        raise ValueError("log-probabilities that are not in descending order")
