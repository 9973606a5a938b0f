"""The quality of the variants on the same items: its logarithm with the noise of sampling items, and the loss per task.

The items are paired: an item that is hard for all variants adds nothing to the noise of their difference. Items that
share something, such as a text, are sampled together: the noise is that of such clusters (Liang & Zeger 1986,
Biometrika 73, 13–22).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from scoring.arrays import Floats
from scoring.items import Items, aligned, by_cluster
from scoring.student import quantile

ONE_SIDED: Final = 0.95
"""The confidence of the bounds of a loss."""
FLIP: Final = 0.5
"""Flipped items added to each variant, because a sample without flips does not show that there are none (Agresti & Min
2005, Statistics in Medicine 24, 729–740)."""
LEAST: Final = 1e-300
"""A probability per byte that is lower counts as this, because 0 has no logarithm."""


@dataclass(frozen=True)
class Quality:
    logs: Floats
    """ln of the score, shape (variants,)."""
    covariance: Floats
    """Shape (variants, variants)."""
    degrees: float = math.inf
    """Degrees of freedom of the covariance: one less than the clusters of items."""

    def of(self, places: Sequence[int]) -> Quality:
        """Select the variants at these positions."""
        return replace(self, logs=self.logs[list(places)], covariance=self.covariance[np.ix_(places, places)])

    def difference_variance(self, first: int, second: int) -> float:
        """Compute the variance of the difference of two logarithms."""
        matrix = self.covariance
        return max(0.0, float(matrix[first, first] + matrix[second, second] - 2 * matrix[first, second]))


@dataclass(frozen=True)
class TaskLoss:
    """The share of the reference's score that a variant loses on one task; negative for a gain."""

    value: float
    low: float
    high: float
    """One-sided 95 % bounds."""
    limit: float

    @property
    def verdict(self) -> Literal["pass", "fail", "unclear"]:
        """pass: it is shown that less than the limit is lost. fail: that more is. unclear: too few items to tell."""
        if self.high < self.limit:
            return "pass"
        return "fail" if self.low >= self.limit else "unclear"

    @property
    def more_items(self) -> float:
        """The multiple of the items that is needed to show that the loss is below the limit, or above it, if it is what
        was measured; infinite if it is the limit."""
        room = self.limit - self.value
        reach = self.high - self.value if room > 0 else self.value - self.low
        return max(1.0, (reach / room) ** 2) if room else math.inf


def task_quality(items: Sequence[Items]) -> Quality:
    """Estimate the quality on one task, by variant: the accuracy, or the probability per byte. An accuracy of 0, which
    has no logarithm, counts as half an item. Raise ValueError if a variant has no items."""
    variants = list(aligned({str(number): variant for number, variant in enumerate(items)}).values())
    first = variants[0]
    measured, influences = zip(*map(_influences, variants), strict=True)
    size, is_accuracy = len(influences[0]), first.sizes is None
    scores = np.maximum(measured, FLIP / size if is_accuracy else LEAST)
    shares = by_cluster(np.array(influences), first.clusters) / scores[:, None]
    count = shares.shape[1]
    covariance = shares @ shares.T * (count / max(1, count - 1))
    if is_accuracy:
        covariance += np.diag([FLIP / (size * score) ** 2 for score in scores])
    return Quality(np.log(scores), covariance, count - 1)


def mean_quality(tasks: Sequence[Quality]) -> Quality:
    """Estimate the quality over all tasks: the logarithm of the mean of their scores; tasks have different items. Raise
    ValueError if there are no tasks."""
    if not tasks:
        raise ValueError("no tasks to compare")
    scores = np.exp([task.logs for task in tasks])
    parts = scores / scores.sum(axis=0)
    covariance = sum(part[:, None] * task.covariance * part for part, task in zip(parts, tasks, strict=True))
    return Quality(np.log(scores.mean(axis=0)), np.asarray(covariance))


def task_losses(tasks: Mapping[str, Quality], variant: int, reference: int, limit: float) -> dict[str, TaskLoss]:
    """Estimate the loss of one variant on each task.

    Args:
        variant, reference: positions among the variants.
        limit: the share that may be lost.
    """
    losses = {}
    for name, task in tasks.items():
        difference = float(task.logs[variant] - task.logs[reference])
        reach = quantile(ONE_SIDED, task.degrees) * math.sqrt(task.difference_variance(variant, reference))
        value, low, high = (-math.expm1(end) for end in (difference, difference + reach, difference - reach))
        losses[name] = TaskLoss(value, low, high, limit)
    return losses


def _influences(items: Items) -> tuple[float, Floats]:
    """Compute the score, and how much each item moves it (the influence function); squares add up to the variance."""
    values = items.values
    if not values.size:
        raise ValueError("no items to compare")
    if items.sizes is not None:
        rate, total = values.sum() / items.sizes.sum(), items.sizes.sum()
        score = math.exp(rate)
        return score, score * (values - rate * items.sizes) / total
    weights = np.ones(len(values)) if items.weights is None else items.weights
    score = float((values * weights).sum() / weights.sum())
    return score, weights * (values - score) / weights.sum()
