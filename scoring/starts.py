"""The speed of the variants, from the same requests to each of them, with the start of the server as the unit.

In a block, the server of each variant is started once and gets the same prompts at the same times. The logarithms of
the times are averaged over the requests of a start, so that the difference between two variants is the mean of the
requests' log-ratios. What the whole block has in common (the prompts, the machine's state) cancels out in a difference.
Requests and rounds are not counted as repetitions, because they share the start (Hurlbert 1984, Ecological Monographs
54, 187–211).

Each comparison has the noise of its own differences, block by block, so that starts that differ a lot are not hidden by
those of quieter variants; or that of all starts together where it is larger, since two starts may agree by chance. By
the latter a variant is judged that was started once only, as if it were some times as noisy.

From four blocks on, differences far from the rest count less, so that one slow start among ten does not decide: they
are weighted as by the likelihood of Student's t with three degrees of freedom (Lange, Little & Taylor 1989, JASA 84,
881).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np

from scoring.arrays import Floats

TAIL: Final = 3.0
"""Degrees of freedom of the likelihood that weights the differences: few, so that a difference far from the rest counts
little. With fewer, tests of a handful of differences are rarely right about their own noise."""
CALIBRATED: Final = 2.0
"""The variance of the weighted mean as a multiple of the squared scale over one less than the number of differences.
With it Student's t has the stated errors for normal noise (simulated for 4 to 16 differences, and limits from 0.1 to
2.5 %); where some differences are far from the rest, errors are rarer."""
LEAST_WEIGHTED: Final = 4
"""Blocks from which on differences are weighted: among three, none can be told from the rest."""
ONCE: Final = 3.0
"""How many times as noisy as all others a variant may be that was started once: nothing shows its own noise."""
LEAST_SCALE: Final = sys.float_info.min
"""Above 0, which nothing can be divided by."""
ROUNDS: Final = 50
"""Iterations of the weighting, which halves its error in one or two."""


class Spread(NamedTuple):
    """How far chance may have moved a combination of speeds."""

    variance: float
    """NaN if it is not known."""
    degrees: int
    """Degrees of freedom of the variance; 0 if it is not known."""


@dataclass(frozen=True)
class Effects:
    """What the starts show."""

    logs: Floats
    """Shape (blocks, variants, metrics); NaN where a variant was not started in a block. Blocks without any start
    are left out."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "logs", self.logs[np.isfinite(self.logs).any(axis=(1, 2))])

    @property
    def blocks(self) -> int:
        return len(self.logs)

    @cached_property
    def measured(self) -> Floats:
        """1 where a variant was started in a block, else 0; shape (blocks, variants)."""
        return np.isfinite(self.logs).all(axis=2).astype(float)

    @property
    def degrees(self) -> int:
        """The most degrees of freedom that the difference of two variants has."""
        common = self.measured.T @ self.measured
        return int(max((common[pair] for pair in combinations(range(len(common)), 2)), default=1)) - 1

    @cached_property
    def weights(self) -> Floats:
        """How much each start counts, shape (blocks, variants, metrics): as much as in its best comparison, since a
        start that is slow is so beside every other variant."""
        weights = np.zeros_like(self.logs)
        for pair in combinations(range(self.logs.shape[1]), 2):
            rows = np.flatnonzero(self.measured[:, pair].all(axis=1))
            for metric in range(self.logs.shape[2]):
                differences = self.logs[rows, pair[0], metric] - self.logs[rows, pair[1], metric]
                by_block = weighted(differences)[1]
                for place in pair:
                    weights[rows, place, metric] = np.maximum(weights[rows, place, metric], by_block)
        return np.where(weights > 0, weights, self.measured[..., None])

    @cached_property
    def means(self) -> Floats:
        """Shape (variants, metrics), by weighted least squares of an additive model of variants and blocks; at the mean
        of the blocks. Only the differences between variants are free of the blocks' noise."""
        return np.column_stack([self._fitted(metric) for metric in range(self.logs.shape[2])])

    def _fitted(self, metric: int) -> Floats:
        weights = self.weights[..., metric]
        values = np.where(self.measured > 0, self.logs[..., metric], 0.0)
        totals = weights.sum(axis=1)
        levels = (weights * values).sum(axis=1) / totals
        # The normal equations for the variants after the blocks are eliminated.
        information = np.diag(weights.sum(axis=0)) - (weights.T / totals) @ weights
        effects = np.linalg.pinv(information, hermitian=True) @ (weights * (values - levels[:, None])).sum(axis=0)
        blocks = levels - (weights @ effects) / totals
        fitted: Floats = effects + blocks.mean()
        return fitted

    @property
    def influences(self) -> Floats:
        """How far each block moved the means, shape (blocks, variants, metrics): the squares of their combinations add
        up to the variance of the same combination of means. 0 for a variant with a single start."""
        starts = self.measured.sum(axis=0)
        moved: Floats = self.weights * self.residuals / np.sqrt(np.maximum(starts * (starts - 1), 1))[:, None]
        return moved

    @cached_property
    def residuals(self) -> Floats:
        """What the additive model leaves of each start, shape (blocks, variants, metrics)."""
        values = np.where(self.measured[..., None] > 0, self.logs - self.means, 0.0)
        levels = (self.weights * values).sum(axis=1, keepdims=True) / self.weights.sum(axis=1, keepdims=True)
        residuals: Floats = self.measured[..., None] * (values - levels)
        return residuals

    @property
    def joint(self) -> int:
        """Degrees of freedom of the noise of all starts, if they were alike."""
        return int(self.measured.sum() - (self.measured.sum(axis=0) > 0).sum()) - self.blocks + 1

    @cached_property
    def residual(self) -> Floats:
        """The covariance of the noise of one start, if all starts were alike, shape (metrics, metrics)."""
        squares = np.einsum("bvm,bvn->mn", self.residuals * self.weights, self.residuals)
        return squares / self.joint if self.joint > 0 else np.full_like(squares, np.nan)

    def spread(self, contrast: Floats) -> Spread:
        """Estimate the noise of a combination of the means. *contrast*: the factor of each mean, shape (variants,
        metrics)."""
        involved = np.flatnonzero(contrast.any(axis=1))
        if not involved.size:
            return Spread(0.0, 0)
        rows = self.measured[:, involved].all(axis=1)
        combined = np.einsum("bvm,vm->b", self.logs[rows][:, involved], contrast[involved])
        if not combined.size or self.joint < 1:
            return Spread(float("nan"), 0)
        of_all = Spread(float(np.einsum("vm,vn,mn", contrast, contrast, self.residual)) / len(combined), self.joint)
        if len(combined) == 1:
            return of_all._replace(variance=ONCE**2 * of_all.variance)
        of_these = Spread(weighted(combined)[2], len(combined) - 1)
        return max(of_these, of_all, key=lambda spread: spread.variance)


def weighted(values: Floats) -> tuple[float, Floats, float]:
    """Average values of which some may be far from the rest. Returns the mean, the weight of each value (1 for all of
    fewer than four), and the variance of the mean; NaN for fewer than two values."""
    size = len(values)
    ones: Floats = np.ones(size)
    if size < LEAST_WEIGHTED or np.ptp(values) == 0:
        return float(values.mean()) if size else np.nan, ones, float(values.var(ddof=1)) / size if size > 1 else np.nan
    mean, weights = float(np.median(values)), ones.copy()
    scale = float(((values - mean) ** 2).mean())
    for _ in range(ROUNDS):
        weights = (TAIL + 1) / (TAIL + (values - mean) ** 2 / scale)
        mean = float(np.add.reduce(weights * values) / np.add.reduce(weights))
        scale = max(float(np.add.reduce(weights * (values - mean) ** 2) / size), LEAST_SCALE)
    return mean, weights, CALIBRATED * scale / (size - 1)


def log_means(values: Floats) -> Floats:
    """Average the logarithms of one start, over the requests that all variants answered.

    Args:
        values: shape (variants, requests), the same request in each column; NaN for a request without an answer.

    Returns:
        Shape (variants,).

    Raises:
        ValueError: the variants have no request in common.
    """
    common = (np.isfinite(values) & (values > 0)).all(axis=0)
    if not common.any():
        raise ValueError("the variants have no answered request in common")
    means: Floats = np.log(values[:, common]).mean(axis=1)
    return means


def comparable(logs: Floats, place: int) -> list[int]:
    """Find the variants that share a block with the one at *place*, directly or through others. *logs*: as those of
    ``Effects``."""
    measured = np.isfinite(logs).all(axis=2).astype(float)
    beside = measured.T @ measured > 0
    reached = beside[place]
    while (further := beside[reached].any(axis=0) | reached).sum() > reached.sum():
        reached = further
    return list(map(int, np.flatnonzero(reached)))
