"""A variant compared with fp16 on the same items: how many answers flipped, and how much the mean changed."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scoring.arrays import Floats
from scoring.items import by_cluster
from scoring.student import quantile


class Flips(NamedTuple):
    lost: int
    """Items that the reference answers correctly and the variant does not."""
    gained: int
    p_value: float
    """For the hypothesis that flips in both directions are equally likely."""


class Difference(NamedTuple):
    """Variant minus reference."""

    mean: float
    low: float
    high: float
    """95 % interval; a difference is beyond noise if it excludes 0."""


def flips(reference: npt.NDArray[np.bool_], variant: npt.NDArray[np.bool_]) -> Flips:
    """Compare which items are correct. Raise ValueError if the numbers of items differ."""
    _check_pairs(len(reference), len(variant))
    lost, gained = int((reference & ~variant).sum()), int((~reference & variant).sum())
    return Flips(lost, gained, mcnemar(lost, gained))


def mcnemar(lost: int, gained: int) -> float:
    """Compute McNemar's exact two-sided p-value: 2·P(X ≤ min(lost, gained)), X ~ Binomial(lost + gained, ½), at most 1.

    McNemar 1947, Psychometrika 12, 153–157. 1 if there are no flips.
    """
    from scipy import special

    return min(1.0, 2 * float(special.bdtr(min(lost, gained), lost + gained, 0.5)))


def mean_difference(
    reference: Floats, variant: Floats, weights: Floats | None = None, clusters: tuple[str, ...] | None = None
) -> Difference:
    """Compute the change of the (weighted) mean over items, with the interval of Student's t over their influences.

    For the bits per byte of a corpus, the values are each text's bits per byte, weighted by its bytes. For a KL
    divergence, which already is a difference, *reference* is zeros. Raise ValueError if the numbers of items differ, or
    are 0."""
    _check_pairs(len(reference), len(variant))
    if not len(variant):
        raise ValueError("no items to compare")
    changes, shares = variant - reference, np.ones(len(variant)) if weights is None else weights
    mean = float((changes * shares).sum() / shares.sum())
    influences = by_cluster(shares * (changes - mean) / shares.sum(), clusters)
    size = len(influences)
    deviation = math.sqrt(float(influences @ influences) * size / (size - 1)) if size > 1 else 0.0
    reach = quantile(0.975, size - 1) * deviation if deviation else 0.0
    return Difference(mean, mean - reach, mean + reach)


def _check_pairs(reference: int, variant: int) -> None:
    if reference != variant:
        raise ValueError(f"{reference} items of the reference and {variant} of the variant are not pairs")
