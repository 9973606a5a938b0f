"""The drill of scaling: more load than a release's replicas should have, until its autoscaler has brought more of them.

It comes on top of what clients send, and starts from as many replicas as are there. After it, one client stays, so that
a replica that is taken away too early is noticed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, Final

from stages.parts.base.errors import ConfigError, Conflict, TransientError
from stages.parts.base.log import say
from stages.parts.records.drills import Drill
from stages.rollout.scene import Scene, SteadyLoad, answers, p95_ms, seconds_until
from stages.rollout.target import Replicas

POLL_S: Final = 1.0
LIMIT_S: Final = 900.0
"""For the way up and for the way back, each: a node may have to be added, and a model loads for minutes."""
LASTING_S: Final = (5.0, 30.0)
"""How long the load goes on once the replicas are ready, and how long those that stay at the end are watched: of a
short drill, and of another one."""
EXCESS: Final = 1.25
"""A HorizontalPodAutoscaler accepts a load of up to 1.1 times what its replicas should have."""
PAUSE_S: Final = 1.0
"""The pause of the one client that stays, between its requests."""


def drill_scale(scene: Scene) -> Drill:
    """Ask for more than the replicas of the stable release can take, until more are ready; then, unless the drill is
    *short*, until they are gone again.

    Raises:
        ConfigError, NotInstalled: nothing scales there, and why.
        NothingToServe: nothing is served.
        Conflict: a canary gets a part of the load.
        TransientError: clients need all replicas as it is.
        DrillFailed: no request is answered.
    """
    before = _scaled(scene)
    goal, users = load_for(before)
    say(f"{users} requests in flight, where {before.running} × {before.concurrency} should be")
    started = time.monotonic()
    with scene.clients(users) as load:
        up = _scale_up(scene, goal, load, started)
    replies, down = load.replies(), dict[str, Any]()
    if not scene.short and up["ready_s"] is not None:
        with scene.steady(1, PAUSE_S) as client:
            down = _scale_down(scene, before)
        replies += client.replies()
    figures: dict[str, Any] = {"replicas": before.running, "goal": goal, "concurrency": users, **up, **down}
    figures |= {"minimum": before.minimum, "maximum": before.maximum, "limit_s": LIMIT_S}
    return scene.ended(replies, answers(replies).failures() + failures_of(figures), **figures)


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


def _scaled(scene: Scene) -> Replicas:
    """Count the replicas of the release to drill; raises as ``drill_scale``."""
    release = scene.release
    if canary := scene.target.split().canary:
        raise Conflict(
            f"{canary} is being tried, and gets a part of the load", hint=f"slipway rollout status {scene.store.model}"
        )
    present = scene.target.replicas(release)
    if present.minimum == present.maximum:
        raise ConfigError(
            f"{release} has {present.minimum} replicas under any load: its minimum is its maximum",
            hint="raise kserve.scaling.maximum; slipway rollout start applies it",
        )
    if present.running >= present.maximum:
        raise TransientError(
            f"{release} has all of its {present.maximum} replicas already, so that none can be added",
            hint="try again under less load, or raise kserve.scaling.maximum",
        )
    return present


def _scale_up(scene: Scene, goal: int, load: SteadyLoad, started: float) -> dict[str, Any]:
    target, release, lasting_s = scene.target, scene.release, scene.lasting(*LASTING_S)
    wanted_s = seconds_until(lambda: target.replicas(release).running >= goal, started, LIMIT_S, POLL_S)
    ready_s = None
    if wanted_s is not None:
        say(f"{goal} replicas are asked for after {wanted_s:.1f} s")
        ready_s = seconds_until(lambda: target.replicas(release).ready >= goal, started, LIMIT_S, POLL_S)
    if ready_s is not None:
        say(f"ready after {ready_s:.1f} s; the load goes on for {lasting_s:g} s")
        time.sleep(lasting_s)
    ready = math.inf if ready_s is None else started + ready_s
    good = [reply for reply in load.replies() if not reply.error]
    return {
        "wanted_s": wanted_s,
        "ready_s": ready_s,
        "lacking": "" if ready_s is not None else target.replicas(release).lacking or target.waits_for(release),
        "ttft_before_p95_ms": p95_ms(reply.ttft_ms for reply in good if reply.sent_s < ready),
        "ttft_after_p95_ms": p95_ms(reply.ttft_ms for reply in good if reply.sent_s >= ready),
    }


def _scale_down(scene: Scene, before: Replicas) -> dict[str, Any]:
    counts = [scene.target.replicas(scene.release).running]

    def left() -> int:
        counts.append(scene.target.replicas(scene.release).running)
        return counts[-1]

    ended = time.monotonic()
    first_s = seconds_until(lambda: left() < counts[0], ended, LIMIT_S, POLL_S)
    if first_s is not None:
        say(f"a replica is taken away {first_s:.1f} s after the load")
    back_s = seconds_until(lambda: left() <= before.running, ended, LIMIT_S, POLL_S)
    if back_s is not None:
        say(f"{before.running} are left after {back_s:.1f} s")
        seconds_until(lambda: left() < before.minimum, time.monotonic(), scene.lasting(*LASTING_S), POLL_S)
    return {"first_s": first_s, "back_s": back_s, "fewest": min(counts)}
