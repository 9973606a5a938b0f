"""Whether, and when, a failed attempt is tried again (Argo's ``retryStrategy``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.local.manifest import RetryStrategy
from pipeline.runs import expressions
from pipeline.runs.state import Phase


@dataclass(frozen=True)
class FailedAttempt:
    """How an attempt failed."""

    phase: Phase
    """Failed, or Error if the program succeeded and a promised output is missing."""
    message: str
    hint: str
    exit_code: str
    """A text, as in Argo (docs/retries.md); '-1' if the engine stopped the attempt."""

    def variables(self) -> Mapping[str, str]:
        return {
            "lastRetry.exitCode": self.exit_code,
            "lastRetry.status": self.phase,
            "lastRetry.message": self.message,
        }


def backoff_s(strategy: RetryStrategy | None, failure: FailedAttempt, attempts: int) -> float | None:
    """Seconds until the next attempt, after *attempts* of them; None if there is no next one."""
    if strategy is None or attempts > strategy.limit:
        return None
    if strategy.expression:
        condition = expressions.parse(strategy.expression, "expression")
        if not expressions.holds(condition, failure.variables().__getitem__):
            return None
    return strategy.backoff.duration * strategy.backoff.factor ** (attempts - 1)
