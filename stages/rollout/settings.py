"""What a rollout can be told: its steps, how long it looks, and what counts as worse."""

from __future__ import annotations

import itertools
from typing import Annotated

from pydantic import Field, field_validator

from stages.settings import Positive, Settings

Percent = Annotated[int, Field(gt=0, le=100)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Ratio = Annotated[float, Field(ge=1)]


class Rollout(Settings):
    """How traffic is moved to a new release, and when it goes back.

    A latency limit is the stable release's figure times the ratio, plus the slack: the slack keeps a few milliseconds
    of a fast model from failing it, the ratio does the same for a slow one.
    """

    steps: tuple[Percent, ...] = (10, 50, 100)
    """Percent of new requests, ascending to 100. A first deployment gets all of it once it answers."""
    step_s: Seconds = 60
    """Each step lasts at least so long."""
    min_requests: Positive = 50
    """Each release must have answered as many within a step; fewer can't show a 95th percentile."""
    step_timeout_s: Seconds = 900
    """A step that has shown neither good nor bad by then is rolled back: no evidence is no success."""
    ready_timeout_s: Seconds = 1800
    """From deploying to the first answer; large models load for minutes."""
    poll_s: Annotated[float, Field(gt=0)] = 2
    synthetic: bool = True
    """Where clients send too little within ``step_s``, send short requests of our own to both releases alike."""
    own_timeout_s: Annotated[float, Field(gt=0)] = 30
    """One of these that is not answered by then has failed. A look at a canary that hangs takes about twice as long.
    Raise it where the stable release needs more for 16 tokens under load."""
    approval: bool = False
    """True: stop before 100 % until a person says ``slipway rollout promote``; then it is looked at once more."""
    ttft_ratio: Ratio = 1.25
    """Time to first token, p95, against the stable release's."""
    ttft_slack_ms: Seconds = 50
    tpot_ratio: Ratio = 1.25
    """Time per output token, p95."""
    tpot_slack_ms: Seconds = 5
    speed_ratio: Share = 0.75
    """Output tokens per second that each request in flight gets, at least this share of the stable release's in half of
    the looks. 0 turns it off."""
    error_slack: Share = 0.01
    """Failed requests may be more by this share of all."""
    significance: Annotated[float, Field(gt=0, lt=0.5)] = 0.01
    """Worse must also be beyond chance: the p-value below which it is. It is looked at many times, hence not 0.05."""
    agreement: Share = 0.9
    """How alike the answers to recorded questions must be to those that were recorded when the release was measured
    (``scoring.probes``). 0 turns the questions off."""
    restarts: Annotated[int, Field(ge=0)] = 1
    """A canary's server may be started anew so often in a rollout (a pod that moves); once more, and it counts as
    crashing."""

    @field_validator("steps")
    @classmethod
    def _ascending_to_all(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if not steps or steps[-1] != 100 or any(a >= b for a, b in itertools.pairwise(steps)):
            raise ValueError("steps must ascend and end with 100")
        return steps
