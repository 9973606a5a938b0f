"""Bootstrap draws of the metrics from the measurements: starts of a server, rounds of load on each start, requests in a
round, items of a task.

The draws of a variant depend only on the seed and its name, not on the other variants or their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from scoring.arrays import Floats
from scoring.student import Z_95

Indices = npt.NDArray[np.int64]
Draws = Mapping[str, Mapping[str, Floats]]
"""Draws of each metric in its unit, for each variant. The draws with the same index belong together."""

DRAWS: Final = 2000
"""This determines a probability of 0.9 to ±0.013 (95 %)."""
SEED: Final = 0
STUDENT_95: Final = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""t(0.975, ν) for ν = 1, 2, …"""
LATENCY_PERCENTILE: Final = 95.0
SHARES: Final = frozenset({"goodput_share"})
"""The constrained measures that are a share of requests; the others are percentiles over them."""
BLOCK_CELLS: Final = 4_000_000
"""Draws × items computed at a time: 32 MB of indices."""


@dataclass(frozen=True)
class Round:
    """One run of the load against one server."""

    latencies_ms: Floats
    """The end-to-end time of each request; not empty."""
    output_tokens_per_s: float
    start: int = 0
    """The start of the server."""
    good_tokens_per_s: float | None = None
    """Output tokens per second of the requests that met the latency targets; None without targets."""
    others: Mapping[str, Floats] = field(default_factory=dict)
    """Other constrained measures by their names in ``scoring.constraints.MEASURES``: a number for each request, in the
    order of ``latencies_ms``. The same names in every round."""


@dataclass(frozen=True)
class Items:
    """The measured values of the items of one task."""

    values: Floats
    """Accuracy: 1 right, 0 wrong. Perplexity: log-likelihoods in nats. Shape (items,), or (starts, items) if every
    start of the server was measured."""
    sizes: Floats | None = None
    """Perplexity: the bytes of each text. None for accuracy."""
    weights: Floats | None = None
    """Accuracy: how much each item counts; None if all count equally, unlike in a group of tasks of different sizes."""
    names: tuple[str, ...] | None = None
    """Identifies the question of each item: items of the same name are paired. None: items are paired by position."""
    clusters: tuple[str, ...] | None = None
    """What each item shares with others, such as the text that several questions are about: answers within a cluster
    are not independent. None: no item shares anything."""

    def named(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.values.shape[-1]))) if self.names is None else self.names

    def clustered(self) -> Iterator[tuple[str, str]]:
        """The name and the cluster of each item; one that shares nothing is a cluster by itself."""
        return zip(self.named(), self.clusters or self.named(), strict=True)

    def at(self, places: Indices) -> Items:
        """The items at these positions."""
        sizes, weights = (each if each is None else each[places] for each in (self.sizes, self.weights))
        names = self.named()
        clusters = self.clusters and tuple(self.clusters[place] for place in places)
        return Items(self.values[..., places], sizes, weights, tuple(names[place] for place in places), clusters)


def load_draws(
    rounds: Mapping[str, Sequence[Round]], *, draws: int = DRAWS, seed: int = SEED
) -> dict[str, dict[str, Floats]]:
    """Draws of latency (95th percentile over the requests of all rounds), throughput (mean over rounds), ``goodput``
    (mean over rounds, if every round has it), and ``Round.others`` (95th percentile, or the mean of a share).

    The bootstrap is hierarchical: n−1 of n starts of the server with replacement, then rounds within each start, then
    requests within each round; with a single start, n−1 of n rounds. With n instead of n−1, the variance of the mean of
    a few values would be too small by (n−1)/n, which is a third for three (Rao & Wu 1988, JASA 83, 231–241). All
    metrics of a draw come from the same rounds.

    A single round says nothing about the noise between rounds: throughput is then left out, and latency only has the
    noise between requests, which is too small.

    Args:
        rounds: by variant, at least one each.
    """
    found: dict[str, dict[str, Floats]] = {}
    for variant, measured in rounds.items():
        starts = [each.start for each in measured]
        chosen = _rounds(starts, draws, _generator(seed, f"rounds of {variant}"))
        latencies = [each.latencies_ms for each in measured]
        places = _requests(latencies, chosen, _generator(seed, f"requests of {variant}"))
        found[variant] = {"latency": _percentiles(_at(latencies, chosen, places))}
        for name in measured[0].others:
            drawn = _at([each.others[name] for each in measured], chosen, places)
            found[variant][name] = drawn.mean(axis=1) if name in SHARES else _percentiles(drawn)
        if len(measured) > 1:
            speeds = np.array([each.output_tokens_per_s for each in measured])
            found[variant]["throughput"] = speeds[chosen].mean(axis=1)
            good = [each.good_tokens_per_s for each in measured if each.good_tokens_per_s is not None]
            if len(good) == len(measured):
                found[variant]["goodput"] = np.array(good)[chosen].mean(axis=1)
    return found


def allowing_for_few(
    drawn: Mapping[str, Mapping[str, Floats]], rounds: Mapping[str, Sequence[Round]]
) -> dict[str, dict[str, Floats]]:
    """The draws of ``load_draws``, widened because a few rounds determine a standard deviation only roughly.

    They are widened around their geometric mean by Student's factor t(0.975, ν) / 1.96.
    ν is pooled over the variants, because the variation of the rounds comes from the machine,
    which is the same for all: Σ(n−1) over n starts of the server, or n rounds of a single start.
    """
    counts = [len({each.start for each in measured}) for measured in rounds.values()]
    units = [starts if starts > 1 else len(measured) for starts, measured in zip(counts, rounds.values(), strict=True)]
    degrees = sum(unit - 1 for unit in units)
    if degrees < 1:
        return {variant: dict(each) for variant, each in drawn.items()}
    factor = student_95(degrees) / Z_95
    return {
        variant: {metric: _spread(values, factor) for metric, values in each.items()} for variant, each in drawn.items()
    }


def student_95(degrees: int) -> float:
    """The 97.5th percentile of Student's t: from a table, or for 10 degrees and more from its expansion in 1/ν (error
    below 0.003)."""
    if degrees <= len(STUDENT_95):
        return STUDENT_95[degrees - 1]
    return Z_95 + (Z_95**3 + Z_95) / (4 * degrees) + (5 * Z_95**5 + 16 * Z_95**3 + 3 * Z_95) / (96 * degrees**2)


def quality_draws(
    tasks: Mapping[str, Mapping[str, Items]], *, draws: int = DRAWS, seed: int = SEED
) -> dict[str, dict[str, Floats]]:
    """Draws of quality: the mean over tasks of the accuracy, or of 2^(−bits per byte), of resampled items.

    The items are paired: the same ones are drawn for every variant, so that their difficulty cancels out. An item that
    a variant was not asked does not count in its score, so different questions add noise. With several starts, n−1 of n
    are drawn with replacement for each variant, and their answers are averaged.

    Args:
        tasks: by variant, then by task.

    Raises:
        ValueError: the variants do not have the same tasks with at least one item each.
    """
    names = {tuple(sorted(each)) for each in tasks.values()}
    shape = names.pop() if len(names) == 1 else ()
    if not shape or not all(items.values.size for each in tasks.values() for items in each.values()):
        raise ValueError("quality can be compared only on the same tasks, with at least one item each")
    scores = {variant: np.zeros(draws) for variant in tasks}
    for task in shape:
        items = aligned({variant: each[task] for variant, each in tasks.items()})
        shares = {variant: _start_shares(each, draws, seed, variant) for variant, each in items.items()}
        size = next(iter(items.values())).values.shape[-1]
        for start, chosen in resampled(size, draws, _generator(seed, f"items of {task}")):
            place = slice(start, start + len(chosen))
            for variant, each in items.items():
                scores[variant][place] += _task_score(each, chosen, shares[variant][place]) / len(shape)
    return {variant: {"quality": each} for variant, each in scores.items()}


def aligned(items: Mapping[str, Items]) -> dict[str, Items]:
    """One task's items in the same order for all variants; an item that a variant was not asked counts nothing for
    it."""
    if len({item.named() for item in items.values()}) == 1:
        return dict(items)
    shared = {name: cluster for item in items.values() for name, cluster in item.clustered()}
    names = sorted(shared)
    places = {name: place for place, name in enumerate(names)}
    clusters = tuple(shared[name] for name in names)
    return {variant: replace(_spaced(each, places), clusters=clusters) for variant, each in items.items()}


def common(first: Items, second: Items) -> tuple[Items, Items]:
    """The items that both were asked, in the same order."""
    places = {name: place for place, name in enumerate(second.named())}
    both = [(place, places[name]) for place, name in enumerate(first.named()) if name in places]
    ours, theirs = np.array(both, dtype=np.int64).reshape(-1, 2).T
    return first.at(ours), second.at(theirs)


def resampled(
    size: int, draws: int, generator: np.random.Generator, cells: int = BLOCK_CELLS
) -> Iterator[tuple[int, Indices]]:
    """Blocks of (first draw, indices of shape (draws of the block, size)), drawn with replacement.

    Args:
        cells: draws × items of a block; they do not affect what is drawn.
    """
    block = max(1, cells // size)
    for start in range(0, draws, block):
        yield start, generator.integers(size, size=(min(block, draws - start), size))


def _spread(values: Floats, factor: float) -> Floats:
    if values.min() == values.max():
        return values
    if not (values > 0).all():  # goodput may be 0 in a round, which has no logarithm
        around: Floats = np.clip(values.mean() + factor * (values - values.mean()), 0, None)
        return around
    logarithms = np.log(values)
    spread: Floats = np.exp(logarithms.mean() + factor * (logarithms - logarithms.mean()))
    return spread


def _rounds(starts: Sequence[int], draws: int, generator: np.random.Generator) -> Indices:
    """The positions of the rounds of each draw."""
    names = sorted(set(starts))
    if len(names) < 2:
        return generator.integers(len(starts), size=(draws, max(1, len(starts) - 1)))
    places = [[place for place, start in enumerate(starts) if start == name] for name in names]
    size = min(map(len, places))
    picked = generator.integers(len(names), size=(draws, len(names) - 1))
    counts = np.array([len(each) for each in places])[picked][..., None]
    within = (generator.random((*picked.shape, size)) * counts).astype(np.int64)
    padded = np.array([each + [0] * (max(map(len, places)) - len(each)) for each in places])
    chosen: Indices = padded[picked[..., None], within].reshape(draws, -1)
    return chosen


def _requests(rounds: Sequence[Floats], chosen: Indices, generator: np.random.Generator) -> Indices:
    """The positions of the resampled requests by draw and chosen round; every round counts equally."""
    sizes = np.array([len(each) for each in rounds])
    drawn: Floats = generator.random((*chosen.shape, sizes.max())) * sizes[chosen][..., None]
    return drawn.astype(np.int64)


def _at(rounds: Sequence[Floats], chosen: Indices, places: Indices) -> Floats:
    """The values at those positions of the chosen rounds, by draw."""
    padded = np.zeros((len(rounds), max(map(len, rounds))))
    for row, each in zip(padded, rounds, strict=True):
        row[: len(each)] = each
    found: Floats = padded[chosen[..., None], places].reshape(len(chosen), -1)
    return found


def _percentiles(drawn: Floats) -> Floats:
    found: Floats = np.percentile(drawn, LATENCY_PERCENTILE, axis=1)
    return found


def _start_shares(items: Items, draws: int, seed: int, variant: str) -> Floats:
    """The share of each start in the answers by draw, with sum 1; the same for every task of a variant."""
    starts = len(np.atleast_2d(items.values))
    picked = _generator(seed, f"starts of {variant}").integers(starts, size=(draws, max(1, starts - 1)))
    shares: Floats = (picked[..., None] == np.arange(starts)).mean(axis=1)
    return shares


def _spaced(items: Items, places: Mapping[str, int]) -> Items:
    """*items* at the *places* of their names; 0 elsewhere."""
    at = np.array([places[name] for name in items.named()])

    def spaced(given: Floats) -> Floats:
        found = np.zeros((*given.shape[:-1], len(places)))
        found[..., at] = given
        return found

    if items.sizes is not None:
        return Items(spaced(items.values), sizes=spaced(items.sizes))
    weights = np.ones(len(at)) if items.weights is None else items.weights
    return Items(spaced(items.values), weights=spaced(weights))


def _task_score(items: Items, chosen: Indices, shares: Floats) -> Floats:
    values = np.atleast_2d(items.values if items.weights is None else items.values * items.weights)
    total: Floats = (np.stack([value[chosen].sum(axis=1) for value in values], axis=1) * shares).sum(axis=1)
    counted = items.weights if items.sizes is None else items.sizes
    if counted is None:
        return total / chosen.shape[1]
    counts = counted[chosen].sum(axis=1)
    mean: Floats = shares @ values.sum(axis=1) / counted.sum()  # for draws without any of the variant's items
    np.divide(total, counts, out=mean, where=counts > 0)
    score: Floats = mean if items.sizes is None else np.exp2(mean / np.log(2))
    return score


def _generator(seed: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng([seed, *purpose.encode()])
