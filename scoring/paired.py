"""A variant compared with fp16 on the same items: how many answers flipped, and how much the mean changed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scoring.arrays import Floats
from scoring.draws import DRAWS, SEED, resampled


@dataclass(frozen=True)
class Flips:
    lost: int
    """Items that the reference answers correctly and the variant does not."""
    gained: int
    p_value: float
    """For the hypothesis that flips in both directions are equally likely."""


@dataclass(frozen=True)
class Difference:
    """Variant minus reference."""

    mean: float
    low: float
    high: float
    """95 % interval; a difference is beyond noise if it excludes 0."""
    draws: Floats = field(compare=False, repr=False)
    """The draws that the interval is computed from."""


def flips(reference: npt.NDArray[np.bool_], variant: npt.NDArray[np.bool_]) -> Flips:
    """Compare which items are correct.

    Raises:
        ValueError: the numbers of items differ.
    """
    _check_pairs(len(reference), len(variant))
    lost, gained = int((reference & ~variant).sum()), int((~reference & variant).sum())
    return Flips(lost, gained, mcnemar(lost, gained))


def mcnemar(lost: int, gained: int) -> float:
    """McNemar's exact two-sided p-value: 2·P(X ≤ min(lost, gained)), X ~ Binomial(lost + gained, ½), at most 1.

    McNemar 1947, Psychometrika 12, 153–157. 1 if there are no flips.
    """
    flipped = lost + gained
    term = total = 1
    for count in range(min(lost, gained)):
        term = term * (flipped - count) // (count + 1)
        total += term
    p_value: float = 2 * total / 2**flipped
    return min(1.0, p_value)


def mean_difference(
    reference: Floats, variant: Floats, weights: Floats | None = None, *, draws: int = DRAWS, seed: int = SEED
) -> Difference:
    """The change of the (weighted) mean over items, with its paired percentile-bootstrap interval (Efron 1979).

    For the bits per byte of a corpus, the values are each text's bits per byte, weighted by its bytes. For a KL
    divergence, which already is a difference, *reference* is zeros.

    Raises:
        ValueError: the numbers of items differ, or are 0.
    """
    _check_pairs(len(reference), len(variant))
    if not len(variant):
        raise ValueError("no items to compare")
    moved = variant - reference
    by = np.ones(len(moved)) if weights is None else weights
    means = np.empty(draws)
    for start, chosen in resampled(len(moved), draws, np.random.default_rng(seed)):
        means[start : start + len(chosen)] = (moved * by)[chosen].sum(axis=1) / by[chosen].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Difference(float((moved * by).sum() / by.sum()), float(low), float(high), means)


def _check_pairs(reference: int, variant: int) -> None:
    if reference != variant:
        raise ValueError(f"{reference} items of the reference and {variant} of the variant are not pairs")
