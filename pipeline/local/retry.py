"""Whether, and when, a failed attempt is tried again (Argo's ``retryStrategy``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.local import expressions
from pipeline.local.manifest import RetryStrategy
from pipeline.local.state import Phase


@dataclass(frozen=True)
class Failure:
    """One attempt that ended badly."""

    phase: Phase
    """Failed, or Error: the program ended well, but what it promised is missing."""
    message: str
    hint: str
    exit_code: str
    """As Argo shows it (docs/retries.md): a text; '-1' if it says nothing, because we ended the attempt."""
    seconds: float

    def variables(self) -> Mapping[str, str]:
        return {
            "lastRetry.exitCode": self.exit_code,
            "lastRetry.status": self.phase,
            "lastRetry.duration": f"{self.seconds:.0f}",
            "lastRetry.message": self.message,
        }


def backoff_s(strategy: RetryStrategy | None, failure: Failure, attempts: int, elapsed_s: float) -> float | None:
    """Seconds until the next attempt; None if there is none.

    Args:
        attempts: made so far.
        elapsed_s: since the first one started.
    """
    if strategy is None or attempts > strategy.limit or not _wanted(strategy, failure):
        return None
    backoff = strategy.backoff
    wait_s = min(backoff.duration * backoff.factor ** (attempts - 1), backoff.cap or float("inf"))
    if backoff.max_duration is not None and elapsed_s + wait_s > backoff.max_duration:
        return None
    return wait_s


def _wanted(strategy: RetryStrategy, failure: Failure) -> bool:
    if strategy.policy not in ("Always", "OnFailure" if failure.phase == "Failed" else "OnError"):
        return False
    if not strategy.expression:
        return True
    expression = expressions.parse(strategy.expression, expressions.RETRY)
    return expressions.decide(expression, failure.variables().__getitem__) is True
