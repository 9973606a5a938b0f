"""The items of a quality task, paired by name between variants: flipped answers, and the change of the mean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scoring.arrays import Floats
from scoring.results import Change
from scoring.student import quantile

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Items:
    """The measured values of the items of one task."""

    values: Floats
    """Accuracy: 1 right, 0 wrong. Perplexity: log-likelihoods in nats. Shape (items,)."""
    sizes: Floats | None = None
    """Perplexity: the bytes of each text. None for accuracy."""
    weights: Floats | None = None
    """Accuracy: how much each item counts; None if all count equally, unlike in a group of tasks of different sizes."""
    names: tuple[str, ...] | None = None
    """Identifies the question of each item: items of the same name are paired. Without names, by position."""
    clusters: tuple[str, ...] | None = None
    """What each item shares with others, such as the text that several questions are about: answers within a cluster
    are not independent. None if no item shares anything."""

    def named(self) -> tuple[str, ...]:
        return tuple(map(str, range(len(self.values)))) if self.names is None else self.names

    def at(self, places: Indices) -> Items:
        sizes, weights = (array if array is None else array[places] for array in (self.sizes, self.weights))
        names = self.named()
        clusters = self.clusters and tuple(self.clusters[place] for place in places)
        return Items(self.values[places], sizes, weights, tuple(names[place] for place in places), clusters)


def aligned(items: Mapping[str, Items]) -> dict[str, Items]:
    """Bring one task's items into one order for all variants; one that a variant was not asked counts 0 for it."""
    if len({(len(item.values), item.names) for item in items.values()}) == 1:
        return dict(items)
    # An item that shares nothing is a cluster by itself.
    pairs = (zip(item.named(), item.clusters or item.named(), strict=True) for item in items.values())
    shared = dict(itertools.chain.from_iterable(pairs))
    names = sorted(shared)
    places = {name: place for place, name in enumerate(names)}
    clusters = tuple(shared[name] for name in names)
    return {variant: replace(_spaced(item, places), clusters=clusters) for variant, item in items.items()}


def common(first: Items, second: Items) -> tuple[Items, Items]:
    """Select the items that both were asked, in the same order."""
    places = {name: place for place, name in enumerate(second.named())}
    pairs = [(place, places[name]) for place, name in enumerate(first.named()) if name in places]
    ours, theirs = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return first.at(ours), second.at(theirs)


def growth(before: Floats, after: Floats) -> Change:
    """Compute by what share the sum of *after* is above that of *before*, the counts of the same items; with the 95 %
    interval of the ratio of two means (Cochran 1977, Sampling Techniques, chapter 6). Raises: ValueError: there are
    fewer than two items."""
    size = len(before)
    if size < 2:
        raise ValueError(f"{size} items show no noise")
    ratio = float(after.sum() / before.sum())
    error = float((after - ratio * before).std(ddof=1)) / math.sqrt(size) / float(before.mean())
    reach = quantile(0.975, size - 1) * error
    return Change(value=ratio - 1, low=ratio - 1 - reach, high=ratio - 1 + reach)


def _spaced(items: Items, places: Mapping[str, int]) -> Items:
    """Put *items* at the *places* of their names, and 0 elsewhere."""
    at = [places[name] for name in items.named()]

    def spaced(values: Floats) -> Floats:
        row = np.zeros(len(places))
        row[at] = values
        return row

    if items.sizes is not None:
        return Items(spaced(items.values), sizes=spaced(items.sizes))
    weights = np.ones(len(at)) if items.weights is None else items.weights
    return Items(spaced(items.values), weights=spaced(weights))


def by_cluster(influences: Floats, clusters: tuple[str, ...] | None) -> Floats:
    """Sum the influences of the items within each cluster, because these are sampled together; shape (…, clusters)."""
    if clusters is None:
        return influences
    _, places = np.unique(clusters, return_inverse=True)
    sums: Floats = np.apply_along_axis(lambda values: np.bincount(places, values), -1, influences)
    return sums


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
