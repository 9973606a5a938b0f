"""The settings of a rollout."""

from __future__ import annotations

import itertools
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from stages.parts.base.settings import Percent, Positive, Ratio, Seconds, Settings, Share


class Mirror(Settings):
    """Copies of clients' requests, which the canary gets before any client is sent to it; nobody gets its answers."""

    percent: Percent = 100
    """Share of new requests of which it gets copies. With 100, it carries the stable release's load."""
    duration_s: Annotated[float, Field(gt=0)] = 300


class Rollout(Settings):
    """How traffic is moved to a new release, and when it is moved back.

    A latency limit is the stable release's figure times the ratio, plus the slack. The slack tolerates a few
    milliseconds of a fast model; the ratio tolerates as much, in proportion, of a slow one.
    """

    replaced: ClassVar = {
        "significance": "rollout.error_rate is that of a whole rollout, all its looks and checks together",
        "speed_ratio": "rollout.tpot_ratio limits the time per output token of the same requests to both releases",
    }

    steps: tuple[Percent, ...] = (10, 50, 90, 100)
    """Percentages of new requests, ascending to 100. A first release gets 100 % once it answers. Latencies are compared
    sharply up to 50 %, and most fairly at 50 %, where both releases carry the same load. Beyond, they are compared with
    those of the stable release at a similar load, which takes a step with a small share, such as 10 %."""
    mirror: Mirror | None = None
    """A step before the first one, without any client at the canary: it is judged by copies of their requests, too.
    None: without."""
    step_s: Seconds = 60
    """The shortest time of each step."""
    min_requests: Positive = 50
    """Each release must have answered that many within a step; the pairs alone are as many."""
    step_timeout_s: Seconds = 900
    """If a step has shown neither good nor bad results by then, the rollout goes back: no evidence is no success."""
    ready_timeout_s: Seconds | Literal["auto"] = "auto"
    """The longest time from deploying to the first answer. auto: what ``serving.startup_timeout_s`` comes to, and 15
    minutes more, in which a node is found or added and the image pulled."""
    poll_s: Annotated[float, Field(gt=0)] = 2
    synthetic: bool = True
    """Send pairs: the same request to both releases at the same moment, about one a second. Without them, latencies are
    those of the clients' requests, which must then be alike at both releases: False is wrong for clients that stick to
    a server."""
    own_timeout_s: Annotated[float, Field(gt=0)] = 30
    """A request of a pair that is not answered by then has failed. A look at a canary that hangs takes as long. Raise
    it if the stable release needs longer for 16 tokens under load."""
    approval: bool = False
    """True: stop before 100 % until a person runs ``slipway rollout promote``; then observe the canary once more."""
    ttft_ratio: Ratio = 1.25
    """Time to first token, relative to the stable release's."""
    ttft_slack_ms: Seconds = 20
    tpot_ratio: Ratio = 1.1
    """Time per output token, relative to the stable release's. The nearer it is to 1, the longer it takes to show that
    a good canary is within the limit."""
    tpot_slack_ms: Seconds = 1
    error_slack: Share = 0.01
    """The canary's share of failed requests may exceed the stable release's by this much, and so may the share of those
    that are answered far too late."""
    error_rate: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """The probability that a canary as good as the stable release is rolled back by chance: over the whole rollout, all
    looks, steps and checks together."""
    agreement: Share = 0.9
    """How far the answers to the recorded questions must agree with those that were recorded when the release was
    measured (``scoring.probes``). 0 turns the questions off."""
    restarts: Annotated[int, Field(ge=0)] = 1
    """How often a canary's server may restart during a rollout, for instance because a pod moves. One more restart
    counts as crashing."""

    @field_validator("steps")
    @classmethod
    def _ascending_to_all(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if not steps or steps[-1] != 100 or any(a >= b for a, b in itertools.pairwise(steps)):
            raise ValueError("steps must ascend and end with 100")
        return steps
