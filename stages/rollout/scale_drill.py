"""The drill of scaling: more load than a release's replicas should have, until its autoscaler has brought more of them.

It comes on top of what clients send, and starts from as many replicas as are there. After it, one client stays, so that
a replica that is taken away too early is noticed.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final

from stages.parts.base.errors import ConfigError, Conflict, NothingToServe, TransientError
from stages.parts.base.log import say
from stages.parts.base.store import ModelStore, Record
from stages.parts.base.workload import Workload
from stages.rollout.drills import Answers, SteadyLoad, access_to, answers, clients, p95_ms, seconds_until, steady
from stages.rollout.target import Replicas, Target

POLL_S: Final = 1.0
EXCESS: Final = 1.25
"""A HorizontalPodAutoscaler accepts a load of up to 1.1 times what its replicas should have."""
PAUSE_S: Final = 1.0
"""The pause of the one client that stays, between its requests."""


@dataclass(frozen=True)
class ScaleLimits:
    """How far the drill goes."""

    limit_s: float = 900.0
    """For the way up and for the way back, each: a node may have to be added, and a model loads for minutes."""
    seconds: float = 30.0
    """How long the load goes on once the replicas are ready, and how long those that stay at the end are watched."""
    down: bool = False
    """Whether to wait until they are gone again."""


class ScaleUp(Record):
    """The way up, in seconds since the load's start."""

    goal: int
    """How many replicas the load needs."""
    wanted_s: float | None
    """When the autoscaler had asked for the goal; None if not within the limit."""
    ready_s: float | None
    lacking: str
    """Why they were not ready in time, as far as the platform says it."""
    ttft_before_p95_ms: float | None
    """For requests that were sent before the new replicas were ready."""
    ttft_after_p95_ms: float | None


class ScaleDown(Record):
    """The way back, in seconds since the load's end."""

    first_s: float | None
    """When the first replica was taken away; None if not within the limit."""
    back_s: float | None
    """When no more were left than before the drill."""
    fewest: int


class ScaleDrill(Record):
    """The result of asking for more than the replicas can take."""

    release: str
    replicas: int
    """Before the drill."""
    minimum: int
    maximum: int
    concurrency: int
    """The requests that the drill keeps in flight."""
    limit_s: float
    up: ScaleUp
    down: ScaleDown | None
    """None if it was not asked for, or the way up has failed."""
    answers: Answers

    def failures(self) -> list[str]:
        reasons, up, down = self.answers.failures(), self.up, self.down
        within = f"within {self.limit_s:g} s" + (f": {up.lacking}" if up.lacking else "")
        if up.wanted_s is None:
            reasons.append(f"the autoscaler did not ask for {up.goal} replicas {within}")
        elif up.ready_s is None:
            reasons.append(f"{up.goal} replicas were asked for, but not ready {within}")
        elif down:
            if down.back_s is None:
                reasons.append(f"more than {self.replicas} replicas were left {self.limit_s:g} s after the load")
            if down.first_s is not None and down.first_s <= up.wanted_s:
                reasons.append(f"it scaled down after {down.first_s:.1f} s, sooner than up ({up.wanted_s:.1f} s)")
            if down.fewest < self.minimum:
                reasons.append(f"only {down.fewest} replicas were left, fewer than the minimum {self.minimum}")
        return reasons


def drill_scale(
    store: ModelStore, target: Target, workload: Workload, limits: ScaleLimits, *, via: str = ""
) -> ScaleDrill:
    """Ask for more than the replicas of the stable release can take, until more are ready; *via*: see ``Access``.

    Raises:
        ConfigError, NotInstalled: nothing scales there, and why.
        NothingToServe: nothing is served.
        Conflict: a canary gets a part of the load.
        TransientError: clients need all replicas as it is.
        DrillFailed: no request is answered.
    """
    release, before = _scaled(store, target)
    goal, users = load_for(before)
    say(f"{users} requests in flight, where {before.running} × {before.concurrency} should be")
    started = time.monotonic()
    with clients(store, target, workload, users, via) as load:
        up = _scale_up(target, release, goal, load, started, limits)
    replies, down = load.replies(), None
    if limits.down and up.ready_s is not None:
        with steady(access_to(store, target.client_url(), via), workload, 1, pause_s=PAUSE_S) as client:
            down = _scale_down(target, release, before, limits)
        replies += client.replies()
    return ScaleDrill(
        release=release,
        replicas=before.running,
        minimum=before.minimum,
        maximum=before.maximum,
        concurrency=users,
        limit_s=limits.limit_s,
        up=up,
        down=down,
        answers=answers(replies),
    )


def load_for(present: Replicas) -> tuple[int, int]:
    """Compute the replicas that the drill asks for, and the requests in flight that need them."""
    users = math.ceil(present.concurrency * max(present.running + 1, EXCESS * present.running))
    return min(present.maximum, math.ceil(users / present.concurrency)), users


def _scaled(store: ModelStore, target: Target) -> tuple[str, Replicas]:
    """Find the release to drill, and its replicas now; raises as ``drill_scale``."""
    split = target.split()
    if split.stable is None:
        raise NothingToServe(f"{store.model} is not being served", hint=f"slipway rollout start {store.model}")
    if split.canary is not None:
        raise Conflict(
            f"{split.canary} is being tried, and gets a part of the load", hint=f"slipway rollout status {store.model}"
        )
    present = target.replicas(split.stable)
    if present.minimum == present.maximum:
        raise ConfigError(
            f"{split.stable} has {present.minimum} replicas under any load: its minimum is its maximum",
            hint="raise kserve.scaling.maximum; slipway rollout start applies it",
        )
    if present.running >= present.maximum:
        raise TransientError(
            f"{split.stable} has all of its {present.maximum} replicas already, so that none can be added",
            hint="try again under less load, or raise kserve.scaling.maximum",
        )
    return split.stable, present


def _scale_up(
    target: Target, release: str, goal: int, load: SteadyLoad, started: float, limits: ScaleLimits
) -> ScaleUp:
    wanted_s = seconds_until(lambda: target.replicas(release).running >= goal, started, limits.limit_s, POLL_S)
    ready_s = None
    if wanted_s is not None:
        say(f"{goal} replicas are asked for after {wanted_s:.1f} s")
        ready_s = seconds_until(lambda: target.replicas(release).ready >= goal, started, limits.limit_s, POLL_S)
    if ready_s is not None:
        say(f"ready after {ready_s:.1f} s; the load goes on for {limits.seconds:g} s")
        time.sleep(limits.seconds)
    ready = math.inf if ready_s is None else started + ready_s
    good = [reply for reply in load.replies() if not reply.error]
    return ScaleUp(
        goal=goal,
        wanted_s=wanted_s,
        ready_s=ready_s,
        lacking="" if ready_s is not None else target.replicas(release).lacking or target.waits_for(release),
        ttft_before_p95_ms=p95_ms(reply.ttft_ms for reply in good if reply.sent_s < ready),
        ttft_after_p95_ms=p95_ms(reply.ttft_ms for reply in good if reply.sent_s >= ready),
    )


def _scale_down(target: Target, release: str, before: Replicas, limits: ScaleLimits) -> ScaleDown:
    counts = [target.replicas(release).running]

    def left() -> int:
        counts.append(target.replicas(release).running)
        return counts[-1]

    ended = time.monotonic()
    first_s = seconds_until(lambda: left() < counts[0], ended, limits.limit_s, POLL_S)
    if first_s is not None:
        say(f"a replica is taken away {first_s:.1f} s after the load")
    back_s = seconds_until(lambda: left() <= before.running, ended, limits.limit_s, POLL_S)
    if back_s is not None:
        say(f"{before.running} are left after {back_s:.1f} s")
        seconds_until(lambda: left() < before.minimum, time.monotonic(), limits.seconds, POLL_S)
    return ScaleDown(first_s=first_s, back_s=back_s, fewest=min(counts))
