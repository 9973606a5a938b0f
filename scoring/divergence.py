"""How far a variant's next-token distributions are from the reference's: KL divergence and top-1 agreement.

A server tells only the likeliest tokens of each distribution. So both distributions are made coarser in the same way:
each token that both lists hold, by itself; the tokens that only the reference lists, together; those that only the
variant lists, together; and the rest. Merging outcomes can only lose what tells two distributions apart, so the KL
divergence between the coarse distributions is never more than that between the full ones (the data-processing
inequality: Cover & Thomas, Elements of Information Theory, 2nd ed. 2006, section 2.8; for a partition, the log-sum
inequality, Theorem 2.7.1).

What a list does not hold is not known, but bounded: each such token is at most as likely as the last one listed. Of all
that is within these bounds the least divergent is taken. The result is thus a lower bound of the true divergence: a
variant that is beyond a limit by it is beyond it in truth. It is near the truth for similar distributions, whose lists
are nearly the same, and still large for those that have no token in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from scoring.normalize import Floats
from scoring.paired import Difference, mean_difference

Booleans = npt.NDArray[np.bool_]

SMALLEST: Final = 1e-6
"""What log-probabilities in single precision, written with six decimals, know of what a list leaves. Less counts as
this on both sides, so that rounding makes no divergence, and nothing left no infinite one."""
NOTHING: Final = 1e-15
"""In place of 0 in a logarithm."""
STEPS: Final = 20
"""Of the search for the lowest; mostly the first one arrives."""
ROUNDING: Final = 1e-3
"""By how much the probabilities of a list may add up to more than 1."""


@dataclass(frozen=True)
class Distributions:
    """Next-token distributions at the places of one document, each by its likeliest tokens, best first."""

    tokens: npt.NDArray[np.int64]
    """Token ids, shape (places, listed)."""
    logprobs: Floats
    """Their natural logarithms of probability, same shape."""


@dataclass(frozen=True)
class Divergence:
    documents: int
    places: int
    """Over all documents."""
    kl: Difference
    """Mean KL(reference ‖ variant) in nats per token, a lower bound; over places, the interval by documents."""
    top1: Difference
    """Share of places at which both hold the same token likeliest."""


def divergence(reference: Sequence[Distributions], variant: Sequence[Distributions]) -> Divergence:
    """Compare document by document. The intervals (95 %) come from a bootstrap over documents, because the places of
    one document are not independent.

    Raises:
        ValueError: not the same documents and places, none at all, or numbers that are no log-probabilities.
    """
    pairs = list(zip(reference, variant, strict=True))
    if not pairs:
        raise ValueError("no documents to compare")
    apart = [place_divergences(ours, theirs) for ours, theirs in pairs]
    same = [ours.tokens[:, 0] == theirs.tokens[:, 0] for ours, theirs in pairs]
    places = np.array([float(len(each)) for each in apart])
    return Divergence(
        documents=len(pairs),
        places=int(places.sum()),
        kl=_over_documents([each.mean() for each in apart], places),
        top1=_over_documents([each.mean() for each in same], places),
    )


def place_divergences(reference: Distributions, variant: Distributions) -> Floats:
    """KL(reference ‖ variant) at each place, in nats: a lower bound (see above), never below 0.

    Raises:
        ValueError: see ``divergence``.
    """
    _check(reference)
    _check(variant)
    if len(reference.tokens) != len(variant.tokens):
        raise ValueError(f"{len(reference.tokens)} places of the reference, {len(variant.tokens)} of the variant")
    same = reference.tokens[:, :, None] == variant.tokens[:, None, :]
    ours, theirs = same.any(axis=2), same.any(axis=1)
    p, q = np.exp(reference.logprobs), np.exp(variant.logprobs)
    logq = (same * variant.logprobs[:, None, :]).sum(axis=2)
    listed = np.where(ours, p * (reference.logprobs - logq), 0.0).sum(axis=1)
    found: Floats = np.maximum(listed + _least_unlisted(p, q, ours, theirs), 0.0)
    return found


def _least_unlisted(p: Floats, q: Floats, ours: Booleans, theirs: Booleans) -> Floats:
    """The smallest contribution of the tokens that are not in both lists.

    With A the reference's own tokens and B the variant's own: P(A) and Q(B) are known, Q(A) = a and P(B) = b are not.
    The sum P(A)·ln(P(A)/a) + b·ln(b/Q(B)) + (R−b)·ln((R−b)/(S−a)), R and S being what the lists leave, is convex in
    (a, b), and is lowest where all three ratios are equal, or at a bound.

    Args:
        ours, theirs: which tokens of each list the other one holds.
    """
    p_own, q_own = np.where(ours, 0.0, p).sum(axis=1), np.where(theirs, 0.0, q).sum(axis=1)
    p_left, q_left = (np.maximum(1.0 - each.sum(axis=1), SMALLEST) for each in (p, q))
    most_a, most_b = (
        np.maximum((~own).sum(axis=1) * last, SMALLEST) for own, last in ((ours, q[:, -1]), (theirs, p[:, -1]))
    )
    ratio = (p_left + p_own) / (q_left + q_own)
    a, b = np.minimum(p_own / ratio, most_a), np.minimum(q_own * ratio, most_b)
    for _ in range(STEPS):
        b = np.minimum(p_left * q_own / (q_own + q_left - a), most_b)
        a = np.minimum(q_left * p_own / (p_own + p_left - b), most_a)
    found: Floats = _term(p_own, a) + _term(b, q_own) + _term(p_left - b, q_left - a)
    return found


def _term(p: Floats, q: Floats) -> Floats:
    """p·ln(p/q), which is 0 where p is."""
    p, q = np.maximum(p, NOTHING), np.maximum(q, NOTHING)
    found: Floats = p * np.log(p / q)
    return found


def _over_documents(means: Sequence[float], places: Floats) -> Difference:
    values = np.array(means, dtype=float)
    return mean_difference(np.zeros(len(values)), values, places)


def _check(given: Distributions) -> None:
    if given.tokens.ndim != 2 or given.tokens.shape != given.logprobs.shape or not given.tokens.size:
        raise ValueError(f"tokens {given.tokens.shape} and log-probabilities {given.logprobs.shape} of no one shape")
    with np.errstate(over="ignore"):
        total = np.exp(given.logprobs).sum(axis=1)
    if not np.isfinite(given.logprobs).all() or not (total <= 1.0 + ROUNDING).all():
        raise ValueError("log-probabilities that are not finite, or add up to more than 1")
    if (np.diff(given.logprobs, axis=1) > ROUNDING).any():
        raise ValueError("log-probabilities that are not in order, best first")
