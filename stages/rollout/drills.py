"""Drills that end a server of the live endpoint, under a steady load like that of clients; and all drills by name."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from stages.parts.base.errors import Busy, DrillFailed, NothingToServe, SlipwayError, TransientError
from stages.parts.base.log import say
from stages.parts.records.drills import Drill
from stages.parts.records.rollout import under_way
from stages.parts.releases import release as releases
from stages.parts.releases.pinned import MeasuredWith
from stages.parts.vllm.client import VOCABULARY, Reply, http, stream_completion
from stages.parts.vllm.server_log import cold_start
from stages.parts.vllm.sizing import SLOWER
from stages.rollout import pressure
from stages.rollout.commands import abort, roll_back
from stages.rollout.scene import POLL_S, SETTLE_S, Scene, answers, seconds_until

ROLLBACK_LIMIT_S: Final = 300.0
RECOVERY_LIMIT_S: Final = 300.0
NOTICED_S: Final = 30.0
"""What a cold start may take besides ``SLOWER`` times as long as was measured: until the end is noticed and, on a
cluster, a node found."""


def drill_rollback(scene: Scene) -> Drill:
    """Roll back under load to the release before the served one, and forward again.

    Raises:
        NothingToServe: nothing is served, or there is no release before.
        DrillFailed: no request is answered, or the platform did not act in time. The rollout under way is then given
            up.
        RolledBack: a release did not come up.
    """
    store, release, standby = scene.store, scene.release, scene.target.split().standby
    if (previous := releases.before(store, release)) is None:
        hint = f"slipway releases {store.model}"
        raise NothingToServe(f"{store.model} has no earlier release to go back to", hint=hint)
    with _report_unfinished(scene), scene.clients(scene.workload.concurrency) as load:
        seconds = []
        for goal, left in ((previous, release), (release, previous)):
            say(f"moving all traffic to {goal}")
            started = time.monotonic()
            with _abort_if_stuck(scene, goal):
                roll_back(store, scene.target, scene.settings, to=goal)
            ended = time.monotonic()
            time.sleep(SETTLE_S)
            last_sent = [reply.sent_s for reply in load.replies() if reply.release == left]
            seconds.append(round(max([ended, *last_sent]) - started, 2))
            say(f"{goal} gets all requests after {seconds[-1]:.1f} s")
    slow = f"the rollback took {seconds[0]:.1f} s, allowed {ROLLBACK_LIMIT_S:g} s"
    reasons = answers(load.replies()).failures() + ([slow] if seconds[0] > ROLLBACK_LIMIT_S else [])
    figures = {"warm": standby == previous, "rollback_s": seconds[0], "forward_s": seconds[1]}
    return scene.ended(load.replies(), reasons, previous=previous, **figures)


def drill_crash(scene: Scene) -> Drill:
    """Kill a server of the stable release under load.

    Raises:
        NothingToServe: nothing is served.
        DrillFailed: no request is answered even before that.
        TransientError, AccessDenied: the server can't be killed.
    """
    release = scene.release
    with scene.clients(scene.workload.concurrency) as load:
        say(f"killing a server of {release}")
        up_again = scene.target.kill(release)
        recovered_s = seconds_until(up_again, time.monotonic(), RECOVERY_LIMIT_S, POLL_S)
        time.sleep(SETTLE_S)
    replies, lacking = load.replies(), f"{release} was not up again after {RECOVERY_LIMIT_S:.0f} s"
    reasons = [lacking] if recovered_s is None else []
    return scene.ended(replies, reasons, outage_s=outage_s(replies), recovered_s=recovered_s)


def drill_cold(scene: Scene) -> Drill:
    """Kill a server of the stable release without load, and time the parts of the next start; raises as
    ``drill_crash``."""
    release, target, access = scene.release, scene.target, scene.access
    engine = MeasuredWith.of(scene.store.releases / release).engine
    limit_s = target.serving_of(release).startup_timeout_s
    if engine:
        limit_s = min(limit_s, round(SLOWER * engine.ready_s + NOTICED_S))
    prompt, replies, killed_at = [*VOCABULARY][: scene.lengths[0]], list[Reply](), time.time()
    up_again, began = target.kill(release), time.monotonic()

    def answers_again() -> bool:
        replies.extend([stream_completion(http(access.certificate), access, prompt, 1)] if up_again() else [])
        return any(not reply.error for reply in replies)

    total_s, figures, reasons = seconds_until(answers_again, began, limit_s, POLL_S), dict[str, Any](), list[str]()
    if total_s is None:
        reasons.append(f"{release} did not answer within {limit_s} s")
    else:
        process_at, log = target.last_start(release)
        process_s = round(max(0.0, process_at - killed_at), 1) if process_at else 0.0
        start = cold_start(log, total_s - process_s, (replies[-1].ttft_ms or 0.0) / 1000)
        figures = {"process_s": process_s, **(start.model_dump() if start else {})}
    return scene.ended(replies, reasons, **figures, total_s=total_s, measured_s=engine.ready_s if engine else None)


@contextlib.contextmanager
def _abort_if_stuck(scene: Scene, goal: str) -> Iterator[None]:
    """Raise DrillFailed if the platform does not give *goal* all traffic in time."""
    try:
        yield
    except TransientError as error:
        journal = under_way(scene.store)
        if isinstance(error, Busy) or journal is None or journal.release != goal:
            raise  # the rollout has not begun, or is another one
        say(f"giving it up: {error}")
        try:
            abort(scene.store, scene.target, f"the drill timed out: {error}")
        except SlipwayError as another:
            say(f"it could not be given up: {another}")
        raise DrillFailed(f"{goal} did not get all requests: {error}", hint=error.hint) from error


@contextlib.contextmanager
def _report_unfinished(scene: Scene) -> Iterator[None]:
    """Say what a drill that was interrupted, by Ctrl-C for instance, left changed, and how to undo it."""
    store, release = scene.store, scene.release
    try:
        yield
    except BaseException:
        if journal := under_way(store):
            say(f"the rollout of {journal.release} is under way: slipway rollout abort {store.model}")
        if (current := releases.current_release(store)) != release:
            say(f"{current} is in production: slipway rollback {store.model} --to {release}")
        raise


def outage_s(replies: Sequence[Reply]) -> float:
    failures = [reply.ended_s for reply in replies if reply.error]
    if not failures:
        return 0.0
    answered = [reply.ended_s for reply in replies if not reply.error and reply.sent_s >= max(failures)]
    return round(min(answered, default=max(failures)) - min(failures), 2)


BY_NAME: Final[dict[str, Callable[[Scene], Drill]]] = {
    "load": pressure.drill_load,
    "overload": pressure.drill_overload,
    "long-context": pressure.drill_long_context,
    "kv-full": pressure.drill_kv_full,
    "slow-client": pressure.drill_slow_client,
    "crash": drill_crash,
    "cold": drill_cold,
    "scale": pressure.drill_scale,
    "rollback": drill_rollback,
}
