"""The speed of the variants, from the same requests to each of them, with the start of the server as the unit.

In a block, the server of each variant is started once and gets the same prompts at the same times. The logarithms of
the times are averaged over the requests of a start, so that the difference between two variants is the mean of the
requests' log-ratios. What the whole block has in common (the prompts, the machine's state) is removed by an additive
model of variants and blocks; what remains is the noise of a start. Requests and rounds are not counted as repetitions,
because they share the start (Hurlbert 1984, Ecological Monographs 54, 187–211).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scoring.arrays import Floats


@dataclass(frozen=True)
class Effects:
    """The least-squares estimates of the additive model."""

    means: Floats
    """Shape (variants, metrics), at the mean of the blocks. Only differences between variants are free of the blocks'
    noise."""
    spread: Floats
    """Shape (variants, variants): the covariance of ``means`` is ``spread`` times ``residual``, for differences."""
    residual: Floats
    """Shape (metrics, metrics): covariance of the noise of one start; NaN without a degree of freedom."""
    degrees: int
    """(variants − 1)·(blocks − 1) if every variant was started in every block."""
    blocks: int


def log_means(values: Floats) -> Floats:
    """The mean logarithm of one start, from the requests that all variants answered.

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
    found: Floats = np.log(values[:, common]).mean(axis=1)
    return found


def effects(logs: Floats) -> Effects:
    """Fit the additive model.

    Args:
        logs: shape (blocks, variants, metrics); NaN where a variant was not started in a block.

    Raises:
        ValueError: there is a variant without a start, or two that share no block directly or through others.
    """
    logs = logs[np.isfinite(logs).any(axis=(1, 2))]
    measured = np.isfinite(logs[..., 0]).astype(float)
    counts, variants = measured.sum(axis=1), measured.shape[1]
    # The normal equations for the variants after the blocks are eliminated.
    information = np.diag(measured.sum(axis=0)) - (measured.T / counts) @ measured
    if np.linalg.matrix_rank(information, tol=1e-9) < variants - 1:
        raise ValueError("variants without a start, or that share no block, cannot be compared")
    values = np.where(measured[..., None] > 0, logs, 0.0)
    levels = values.sum(axis=1) / counts[:, None]
    spread = np.linalg.pinv(information, hermitian=True)
    own = spread @ (values - measured[..., None] * levels[:, None]).sum(axis=0)
    blocks = levels - (measured @ own) / counts[:, None]
    residuals = measured[..., None] * (values - own - blocks[:, None])
    degrees = int(measured.sum()) - variants - len(counts) + 1
    squares = np.einsum("bvm,bvn->mn", residuals, residuals)
    residual = squares / degrees if degrees > 0 else np.full_like(squares, np.nan)
    return Effects(own + blocks.mean(axis=0), spread, residual, degrees, len(counts))
