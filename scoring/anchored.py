"""Scores that depend on a variant and the reference alone, so that no other variant can change the order of two.

Every metric is measured by the logarithm of how many times better it is than the reference's, which has no unit, and is
scaled linearly between two fixed anchors (``scoring.criteria.Anchors``):

    scaled = (ln ratio − ln zero) / (ln one − ln zero), clipped to [0, 1]

The score is the weighted sum. Equal scores, such as those of two variants beyond an anchor, are ordered by the same sum
without clipping.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from scoring.arrays import Floats
from scoring.criteria import MARGIN_OF, Anchors, Criteria, Margins
from scoring.metrics import METRICS

DIGITS: Final = 9
"""Decimals of a score; smaller differences come from the arithmetic, not from the variants."""
SIGNS: Floats = np.array([1.0 if metric.higher_is_better else -1.0 for metric in METRICS.values()])


def log_ratios(values: Floats, reference: Floats) -> Floats:
    """Compute ln of how many times better each metric is than the reference's.

    Args:
        values: shape (…, metrics), metrics in the order and units of ``METRICS``, positive; a quality of 0 gives −∞.
        reference: the reference's, shape (metrics,) or one that broadcasts.
    """
    with np.errstate(divide="ignore"):
        ratios: Floats = SIGNS * (np.log(values) - np.log(reference))
    return ratios


def scaled(ratios: Floats, anchors: Anchors) -> Floats:
    """Put ``log_ratios`` on the scale of the anchors, not clipped; same shape."""
    low, high = spans(anchors)
    position: Floats = (ratios - low) / (high - low)
    return position


def spans(anchors: Anchors) -> tuple[Floats, Floats]:
    """Compute ln of the anchors of 0 and of 1, in the order of ``METRICS``."""
    ends = np.log([(getattr(anchors, name).zero, getattr(anchors, name).one) for name in METRICS])
    return ends[:, 0], ends[:, 1]


def scores(ratios: Floats, criteria: Criteria) -> tuple[Floats, Floats]:
    """Compute the scores of ``log_ratios``, shape (…) for ratios of shape (…, metrics). Returns the score in [0, 1],
    and the sum without clipping, which orders equal scores."""
    shares = shares_of(criteria)
    counts = shares > 0
    positions = scaled(ratios, criteria.anchors)[..., counts]
    score: Floats = (np.clip(positions, 0.0, 1.0) @ shares[counts]).round(DIGITS)
    return score, (positions @ shares[counts]).round(DIGITS)


def shares_of(criteria: Criteria) -> Floats:
    """Return the weights in the order of ``METRICS``, with sum 1."""
    shares = criteria.weights.shares()
    return np.array([shares[name] for name in METRICS])


def ranked(ratios: Floats, criteria: Criteria) -> npt.NDArray[np.int64]:
    """Return the positions of the variants, the best first, shape (…, variants) for ratios of shape (…, variants,
    metrics).

    Variants of equal scores, clipped and not, keep their order.
    """
    score, beyond = scores(ratios, criteria)
    order: npt.NDArray[np.int64] = np.lexsort((-beyond, -score), axis=-1)
    return order


def log_margins(margins: Margins) -> Floats:
    """Return the margins as differences of logarithms, in the order of ``METRICS``."""
    return np.array([-math.log1p(-getattr(margins, MARGIN_OF[name])) for name in METRICS])
