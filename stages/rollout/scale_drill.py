"""The drill of scaling: more load than a release's replicas should have, until its autoscaler has brought more of them.

It comes on top of what clients send, and starts from as many replicas as are there. After it, one client stays, so that
a replica that is taken away too early is noticed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from stages.parts.base.errors import ConfigError, Conflict, NothingToServe, TransientError
from stages.parts.base.record import Record
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Workload
from stages.parts.vllm.streaming import Reply
from stages.rollout.drills import SETTLE_S, Answers, access_to, answers, check_answers, failed, p95, steady
from stages.rollout.steady_load import SteadyLoad
from stages.rollout.target import Autoscaled, Replicas, Target

POLL_S: Final = 1.0
EXCESS: Final = 1.25
"""A HorizontalPodAutoscaler accepts a load of up to 1.1 times what its replicas should have."""
PAUSE_S: Final = 1.0
"""The pause of the one client that stays, between its requests."""


@dataclass(frozen=True)
class Asked:
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
    """As many replicas as the load needs."""
    wanted_s: float | None
    """When the autoscaler had asked for the goal; None: not within the limit."""
    ready_s: float | None
    lacking: str
    """Why they were not ready in time, as far as the platform says it."""
    ttft_before_p95_ms: float | None
    """For requests that were sent before the new replicas were ready."""
    ttft_after_p95_ms: float | None


class ScaleDown(Record):
    """The way back, in seconds since the load's end."""

    first_s: float | None
    """When the first replica was taken away; None: not within the limit."""
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
    """None: not asked for, or the way up has failed."""
    answers: Answers

    def failures(self) -> list[str]:
        found, up, down = failed(self.answers), self.up, self.down
        within = f"within {self.limit_s:g} s" + (f": {up.lacking}" if up.lacking else "")
        if up.wanted_s is None:
            found.append(f"the autoscaler did not ask for {up.goal} replicas {within}")
        elif up.ready_s is None:
            found.append(f"{up.goal} replicas were asked for, but not ready {within}")
        elif down:
            if down.back_s is None:
                found.append(f"more than {self.replicas} replicas were left {self.limit_s:g} s after the load")
            if down.first_s is not None and down.first_s <= up.wanted_s:
                found.append(f"it scaled down after {down.first_s:.1f} s, sooner than up ({up.wanted_s:.1f} s)")
            if down.fewest < self.minimum:
                found.append(f"only {down.fewest} replicas were left, fewer than the minimum {self.minimum}")
        return found


def drill_scale(
    store: ModelStore,
    target: Target,
    workload: Workload,
    say: Callable[[str], None],
    asked: Asked,
    *,
    via: str = "",
) -> ScaleDrill:
    """Ask for more than the replicas of the stable release can take, until more of them are ready.

    Args:
        via: see ``Access``.

    Raises:
        ConfigError, NotInstalled: nothing scales there, and why.
        NothingToServe: nothing is served.
        Conflict: a canary gets a part of the load.
        TransientError: clients need all replicas as it is.
        DrillFailed: no request is answered.
    """
    release, scaled, before = _scaled(store, target)
    access = access_to(store, target.client_url(), via)
    goal, users = load_for(before)
    say(f"{users} requests in flight, where {before.there} × {before.concurrency} should be")
    with steady(access, workload, users) as load:
        up = _scale_up(scaled, release, goal, load, asked, say)
    replies, down = load.replies(), None
    if asked.down and up.ready_s is not None:
        with steady(access, workload, 1, pause_s=PAUSE_S) as client:
            down = _scale_down(scaled, release, before, asked, say)
        replies += client.replies()
    return ScaleDrill(
        release=release,
        replicas=before.there,
        minimum=before.minimum,
        maximum=before.maximum,
        concurrency=users,
        limit_s=asked.limit_s,
        up=up,
        down=down,
        answers=answers(replies),
    )


def load_for(now: Replicas) -> tuple[int, int]:
    """The replicas that the drill asks for, and the requests in flight that need them."""
    users = math.ceil(now.concurrency * max(now.there + 1, EXCESS * now.there))
    return min(now.maximum, math.ceil(users / now.concurrency)), users


def _scaled(store: ModelStore, target: Target) -> tuple[str, Autoscaled, Replicas]:
    """The release to drill, and its replicas now; raises as ``drill_scale`` does."""
    if not isinstance(target, Autoscaled):
        raise ConfigError(
            f"nothing scales on {target.name}: one machine has the same servers under any load",
            hint="name a platform that serves on KServe: --platform",
        )
    split = target.split()
    if split.stable is None:
        raise NothingToServe(f"{store.model} is not being served", hint=f"slipway rollout start {store.model}")
    if split.canary is not None:
        raise Conflict(
            f"{split.canary} is being tried, and gets a part of the load", hint=f"slipway rollout status {store.model}"
        )
    now = target.replicas(split.stable)
    if now.minimum == now.maximum:
        raise ConfigError(
            f"{split.stable} has {now.minimum} replicas under any load: its minimum is its maximum",
            hint="raise kserve.scaling.maximum; slipway rollout start applies it",
        )
    if now.there >= now.maximum:
        raise TransientError(
            f"{split.stable} has all of its {now.maximum} replicas already, so that none can be added",
            hint="try again under less load, or raise kserve.scaling.maximum",
        )
    return split.stable, target, now


def _scale_up(
    scaled: Autoscaled, release: str, goal: int, load: SteadyLoad, asked: Asked, say: Callable[[str], None]
) -> ScaleUp:
    started = time.monotonic()
    time.sleep(SETTLE_S)
    check_answers(load)
    wanted_s = _until(lambda: scaled.replicas(release).there >= goal, started, asked.limit_s)
    ready_s = None
    if wanted_s is not None:
        say(f"{goal} replicas are asked for after {wanted_s:.1f} s")
        ready_s = _until(lambda: scaled.replicas(release).ready >= goal, started, asked.limit_s)
    if ready_s is not None:
        say(f"ready after {ready_s:.1f} s; the load goes on for {asked.seconds:g} s")
        time.sleep(asked.seconds)
    slow, fast = _ttft_p95_ms(load.replies(), math.inf if ready_s is None else started + ready_s)
    return ScaleUp(
        goal=goal,
        wanted_s=wanted_s,
        ready_s=ready_s,
        lacking="" if ready_s is not None else scaled.replicas(release).lacking or scaled.waits_for(release),
        ttft_before_p95_ms=slow,
        ttft_after_p95_ms=fast,
    )


def _scale_down(
    scaled: Autoscaled, release: str, before: Replicas, asked: Asked, say: Callable[[str], None]
) -> ScaleDown:
    seen = [scaled.replicas(release).there]

    def left() -> int:
        seen.append(scaled.replicas(release).there)
        return seen[-1]

    ended = time.monotonic()
    first_s = _until(lambda: left() < seen[0], ended, asked.limit_s)
    if first_s is not None:
        say(f"a replica is taken away {first_s:.1f} s after the load")
    back_s = _until(lambda: left() <= before.there, ended, asked.limit_s)
    if back_s is not None:
        say(f"{before.there} are left after {back_s:.1f} s")
        _until(lambda: left() < before.minimum, time.monotonic(), asked.seconds)
    return ScaleDown(first_s=first_s, back_s=back_s, fewest=min(seen))


def _until(done: Callable[[], bool], since: float, limit_s: float) -> float | None:
    """How long after *since* it was *done*, in seconds; None: not within *limit_s*."""
    while True:
        if done():
            return round(time.monotonic() - since, 1)
        if time.monotonic() - since > limit_s:
            return None
        time.sleep(POLL_S)


def _ttft_p95_ms(replies: Sequence[Reply], ready: float) -> tuple[float | None, float | None]:
    """For requests that were sent before and after *ready*."""
    good = [reply for reply in replies if not reply.error]
    return (
        p95(each.ttft_ms for each in good if each.sent_s < ready),
        p95(each.ttft_ms for each in good if each.sent_s >= ready),
    )
