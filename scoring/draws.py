"""Bootstrap draws of the metrics from what was measured: rounds of load, requests in a round, items of a task.

The draws of a variant depend on the seed and its name alone, not on which others are drawn, nor on their order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from scoring.normalize import Floats

Indices = npt.NDArray[np.int64]
Samples = Mapping[str, Mapping[str, Floats]]
"""By variant and metric: draws of the metric, in its unit. Draw i of all of them belongs together."""

DRAWS: Final = 2000
"""A probability of 0.9 is then known to ±0.013 (95 %)."""
SEED: Final = 0
LATENCY_PERCENTILE: Final = 95.0
BLOCK_CELLS: Final = 4_000_000
"""Draws × items at a time: 32 MB of indices."""


@dataclass(frozen=True)
class Round:
    """One run of the load against one server."""

    latencies_ms: Floats
    """A request's end-to-end time, one per request; not empty."""
    output_tokens_per_s: float


@dataclass(frozen=True)
class Items:
    """What was measured of each item of one task; the same items in the same order for every variant."""

    values: Floats
    """Accuracy: 1 right, 0 wrong. Perplexity: log-likelihoods in nats."""
    sizes: Floats | None = None
    """Perplexity: bytes of each text. None for accuracy."""


def load_draws(
    rounds: Mapping[str, Sequence[Round]], *, paired: bool = False, draws: int = DRAWS, seed: int = SEED
) -> dict[str, dict[str, Floats]]:
    """Draws of latency (95th percentile over the requests of all rounds) and throughput (mean of the rounds).

    Hierarchical: n−1 of n rounds with replacement, then requests within each. n−1, not n: the variance of a mean of
    few rounds is otherwise too small by (n−1)/n, a third at three rounds (Rao & Wu 1988, JASA 83, 231–241). Latency
    and throughput of a draw come from the same rounds.

    A single round says nothing about the noise between rounds: throughput is then left out, and latency has the
    noise between requests alone, which is too little.

    Args:
        rounds: by variant, each at least one.
        paired: the variants took turns, round by round: the same rounds are drawn for all of them, so that what a
            round had in common (a busy machine) cancels out. False if each was measured in one go.

    Raises:
        ValueError: *paired*, but the variants have different numbers of rounds.
    """
    if paired and len({len(each) for each in rounds.values()}) > 1:
        raise ValueError("paired rounds, but not the same number of them for every variant")
    found: dict[str, dict[str, Floats]] = {}
    for variant, measured in rounds.items():
        chosen = _rounds(len(measured), draws, _generator(seed, "rounds" if paired else f"rounds of {variant}"))
        latencies = [each.latencies_ms for each in measured]
        found[variant] = {"latency": _percentiles(latencies, chosen, _generator(seed, f"requests of {variant}"))}
        if len(measured) > 1:
            speeds = np.array([each.output_tokens_per_s for each in measured])
            found[variant]["throughput"] = speeds[chosen].mean(axis=1)
    return found


def quality_draws(
    tasks: Mapping[str, Mapping[str, Items]], *, draws: int = DRAWS, seed: int = SEED
) -> dict[str, dict[str, Floats]]:
    """Draws of quality: the mean over tasks of the accuracy, or of 2^(−bits per byte), over resampled items.

    Paired: the same items are drawn for every variant, so that how hard they happen to be cancels out.

    Args:
        tasks: by variant, then by task.

    Raises:
        ValueError: the variants have not the same tasks with the same number of items, at least one each.
    """
    shapes = {tuple(sorted((task, len(items.values)) for task, items in each.items())) for each in tasks.values()}
    shape = shapes.pop() if len(shapes) == 1 else ()
    if not shape or not all(size for _, size in shape):
        raise ValueError("quality can be compared only on the same tasks with the same items, at least one each")
    scores = {variant: np.zeros(draws) for variant in tasks}
    for task, size in shape:
        for start, chosen in resampled(size, draws, _generator(seed, f"items of {task}")):
            for variant, each in tasks.items():
                scores[variant][start : start + len(chosen)] += _task_score(each[task], chosen) / len(shape)
    return {variant: {"quality": each} for variant, each in scores.items()}


def resampled(
    size: int, draws: int, generator: np.random.Generator, cells: int = BLOCK_CELLS
) -> Iterator[tuple[int, Indices]]:
    """Blocks of (first draw, indices of shape (draws of the block, size)), drawn with replacement.

    Args:
        cells: draws × items of a block, which do not change what is drawn.
    """
    block = max(1, cells // size)
    for start in range(0, draws, block):
        yield start, generator.integers(size, size=(min(block, draws - start), size))


def _rounds(count: int, draws: int, generator: np.random.Generator) -> Indices:
    return generator.integers(count, size=(draws, max(1, count - 1)))


def _percentiles(rounds: Sequence[Floats], chosen: Indices, generator: np.random.Generator) -> Floats:
    """Per draw the percentile over the requests resampled within the chosen rounds; every round counts equally."""
    sizes = np.array([len(each) for each in rounds])
    padded = np.zeros((len(rounds), sizes.max()))
    for row, each in zip(padded, rounds, strict=True):
        row[: len(each)] = each
    places = (generator.random((*chosen.shape, sizes.max())) * sizes[chosen][..., None]).astype(np.int64)
    requests = padded[chosen[..., None], places].reshape(len(chosen), -1)
    found: Floats = np.percentile(requests, LATENCY_PERCENTILE, axis=1)
    return found


def _task_score(items: Items, chosen: Indices) -> Floats:
    if items.sizes is None:
        mean: Floats = items.values[chosen].mean(axis=1)
        return mean
    bits_per_byte = -items.values[chosen].sum(axis=1) / items.sizes[chosen].sum(axis=1) / np.log(2)
    score: Floats = np.exp2(-bits_per_byte)
    return score


def _generator(seed: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng([seed, *purpose.encode()])
