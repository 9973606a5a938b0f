"""Whether a server still answers as it did when it was measured, judged by its token probabilities.

Generated text cannot be compared: two runs of the same weights differ as soon as one near-tie is decided differently
(batching and kernels change the last bits), and every later token belongs to another text. Instead, probabilities are
compared token by token on a given text ("teacher forcing"), so that one flip is one small difference:

likeness     how similar the recorded and the new probabilities of the *recorded* answer's tokens are: the geometric
             mean over tokens of min(p, q) / max(p, q). Other weights fail here, even if they are just as certain of
             other tokens, and so does another tokenization of the prompt.
consistency  whether the tokens that the server *generates* are the likeliest ones when it scores the same text: the
             geometric mean over the new answer's tokens of p(token) / p(likeliest). Broken decoding with correct
             weights fails here (a corrupt cache, a wrong kernel, a sampler that ignores the temperature), because
             scoring takes another code path.

Both are 1 for the same server without noise, and close to 1 with noise: a flip near a tie costs only the small gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean


def agreement(
    recorded: Sequence[float], again: Sequence[float], answered: Sequence[float], likeliest: Sequence[float]
) -> float:
    """Compute the lesser of both from natural logarithms of probabilities, one per token.

    Args:
        recorded: of the recorded answer's tokens, when they were recorded.
        again: of the same tokens, now.
        answered: of the tokens that the server generates now.
        likeliest: of the likeliest token at each of those positions.

    Raises:
        ValueError: the numbers of values differ, are 0, or a value is not finite.
    """
    likeness = math.exp(-fmean(abs(new - old) for old, new in _pairs(recorded, again)))
    consistency = math.exp(-fmean(max(0.0, best - generated) for generated, best in _pairs(answered, likeliest)))
    return min(likeness, consistency)


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Count the first tokens that are the same."""
    return next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def _pairs(ours: Sequence[float], theirs: Sequence[float]) -> list[tuple[float, float]]:
    pairs = list(zip(ours, theirs, strict=True))
    if not pairs or not all(math.isfinite(value) for pair in pairs for value in pair):
        raise ValueError("log-probabilities that are missing or not finite")
    return pairs
