"""Whether a server still answers as it did when it was measured, from the probabilities that it gives to tokens.

Free-running text is no measure: two runs of the same weights differ as soon as one near-tie falls the other way
(batching and kernels change the last bits), and everything after that token is another text. Probabilities are
compared instead, token by token on a given text ("teacher forcing"), so that one flip is one small difference:

likeness     how alike the recorded and the new probabilities of the *recorded* answer's tokens are: the geometric mean
             over tokens of min(p, q) / max(p, q). Other weights fail here, also those that are merely sure of
             something else; and another tokenization of the prompt, which makes it another question.
consistency  whether what the server *says* freely is what it holds likeliest when it reads it: the geometric mean over
             the new answer's tokens of p(token) / p(likeliest). Broken decoding over sound weights fails here (a
             corrupt cache, a wrong kernel, a sampler that ignores the temperature): reading a text takes another path.

Both are 1 for the same server without noise and close to it with noise: a token near a tie costs its gap, not a text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class Compared:
    """One prompt's answer, recorded and now."""

    likeness: float
    consistency: float
    same_tokens: int
    """How many of the first tokens are those recorded: for a person to read, not for a verdict."""

    @property
    def agreement(self) -> float:
        return min(self.likeness, self.consistency)


def compared(
    recorded: Sequence[float],
    again: Sequence[float],
    answered: Sequence[float],
    likeliest: Sequence[float],
    same_tokens: int = 0,
) -> Compared:
    """All are natural logarithms of probabilities, one per token.

    Args:
        recorded: of the recorded answer's tokens, when they were recorded.
        again: of the same tokens, now.
        answered: of the tokens that the server now says by itself.
        likeliest: of the likeliest token at each of those places.

    Raises:
        ValueError: not as many on both sides, none at all, or not finite.
    """
    likeness = math.exp(-fmean(abs(new - old) for old, new in _pairs(recorded, again)))
    consistency = math.exp(-fmean(max(0.0, best - said) for said, best in _pairs(answered, likeliest)))
    return Compared(likeness, consistency, same_tokens)


def agreement(probes: Sequence[Compared]) -> float:
    """The mean over probes, 0–1; 1 is the same. No probe agrees with nothing: 0."""
    return fmean(each.agreement for each in probes) if probes else 0.0


def common_prefix(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    return next(
        (place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )


def _pairs(ours: Sequence[float], theirs: Sequence[float]) -> list[tuple[float, float]]:
    pairs = list(zip(ours, theirs, strict=True))
    if not pairs or not all(math.isfinite(value) for pair in pairs for value in pair):
        raise ValueError("log-probabilities that are missing or not finite")
    return pairs
