"""The drill of scaling: more load than a release's replicas should have, until its autoscaler has brought more of them.

It comes on top of what clients send, and starts from as many replicas as are there. After it, one client stays, so that
a replica that is taken away too early is noticed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stages.parts.base.errors import ConfigError, Conflict, NothingToServe, TransientError
from stages.parts.base.log import say
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Workload
from stages.parts.records.drills import Drill
from stages.rollout.drills import SteadyLoad, access_to, answers, clients, p95_ms, seconds_until, steady
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


def drill_scale(store: ModelStore, target: Target, workload: Workload, limits: ScaleLimits, *, via: str = "") -> Drill:
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
    replies, down = load.replies(), dict[str, Any]()
    if limits.down and up["ready_s"] is not None:
        with steady(access_to(store, target.client_url(), via), workload, 1, pause_s=PAUSE_S) as client:
            down = _scale_down(target, release, before, limits)
        replies += client.replies()
    figures: dict[str, Any] = {"replicas": before.running, "goal": goal, "concurrency": users, **up, **down}
    figures |= {"minimum": before.minimum, "maximum": before.maximum, "limit_s": limits.limit_s}
    answered = answers(replies)
    failures = tuple(answered.failures() + failures_of(figures))
    return Drill(release=release, answers=answered, figures=figures, failures=failures)


def failures_of(figures: Mapping[str, Any]) -> list[str]:
    """Say what did not come or go in time, by the figures of docs/drills.md; those of the way back may be missing."""
    limit_s, goal, wanted_s, first_s = (figures.get(name) for name in ("limit_s", "goal", "wanted_s", "first_s"))
    within, reasons = f"within {limit_s:g} s" + (f": {figures['lacking']}" if figures["lacking"] else ""), []
    if wanted_s is None:
        return [f"the autoscaler did not ask for {goal} replicas {within}"]
    if figures["ready_s"] is None:
        return [f"{goal} replicas were asked for, but not ready {within}"]
    if "back_s" in figures and figures["back_s"] is None:
        reasons.append(f"more than {figures['replicas']} replicas were left {limit_s:g} s after the load")
    if first_s is not None and first_s <= wanted_s:
        reasons.append(f"it scaled down after {first_s:.1f} s, sooner than up ({wanted_s:.1f} s)")
    if figures.get("fewest", math.inf) < figures["minimum"]:
        reasons.append(f"only {figures['fewest']} replicas were left, fewer than the minimum {figures['minimum']}")
    return reasons


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
) -> dict[str, Any]:
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
    return {
        "wanted_s": wanted_s,
        "ready_s": ready_s,
        "lacking": "" if ready_s is not None else target.replicas(release).lacking or target.waits_for(release),
        "ttft_before_p95_ms": p95_ms(reply.ttft_ms for reply in good if reply.sent_s < ready),
        "ttft_after_p95_ms": p95_ms(reply.ttft_ms for reply in good if reply.sent_s >= ready),
    }


def _scale_down(target: Target, release: str, before: Replicas, limits: ScaleLimits) -> dict[str, Any]:
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
    return {"first_s": first_s, "back_s": back_s, "fewest": min(counts)}
