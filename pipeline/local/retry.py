"""Whether, and when, a failed attempt is tried again (Argo's ``retryStrategy``)."""

from __future__ import annotations

from pipeline.local.manifest import RetryStrategy
from pipeline.runs import expressions
from pipeline.runs.state import FailedAttempt


def backoff_s(strategy: RetryStrategy | None, failure: FailedAttempt, attempts: int) -> float | None:
    """Seconds until the next attempt, after *attempts* of them; None if there is no next one."""
    if strategy is None or attempts > strategy.limit:
        return None
    if strategy.expression:
        condition = expressions.parse(strategy.expression, "expression")
        variables = {  # Argo's, of which the exit code is a text (docs/retries.md)
            "lastRetry.exitCode": str(failure.exit_code),
            "lastRetry.status": failure.phase,
            "lastRetry.message": failure.message,
        }
        if not expressions.holds(condition, variables.__getitem__):
            return None
    return strategy.backoff.duration * strategy.backoff.factor ** (attempts - 1)
