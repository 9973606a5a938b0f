"""Drills of a live endpoint under more than it usually has to take. Each compares the endpoint with itself, before.

That of scaling sends more than a release's replicas should have, until its autoscaler has brought more of them. It
comes on top of what clients send, and starts from as many replicas as are there. After it, one client stays, so that a
replica that is taken away too early is noticed.
"""

from __future__ import annotations

import contextlib
import math
import resource
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx

from stages.parts.base.errors import ConfigError, Conflict, TransientError
from stages.parts.base.log import say
from stages.parts.records.drills import Drill
from stages.parts.vllm.client import Reply, longest_request, stream_completion, trusting
from stages.rollout.scene import POLL_S, RECOVERY_S, Scene, SteadyLoad, Times, answers, p95_ms, seconds_until, times_of
from stages.rollout.slices import prompt_of
from stages.rollout.target import Replicas

COLLAPSE: Final = 0.7  # this and the following limits: docs/drills.md says why
REFUSED_MS: Final = 2000.0
LATE_MS: Final = 10_000.0
FULL: Final = 0.95
FILLING_S: Final = 1.0
GROWING_TOKENS: Final = 256
"""The longest answers that fill the KV cache: some blocks more than there were for the prompt."""
USERS: Final = 8
"""At most that many ask short requests beside a long one; and that many more fill the KV cache after ``FILLING_S``."""
MOST_USERS: Final = 256
SHORT_TOKENS: Final = 32
OPENING: Final = 16  # slow clients that wait for their first bytes at a time
OPENED_S: Final = 120.0
BROKEN_OFF: Final = "broken off by its client"
LOOK_S: Final = 1.0
LIMIT_S: Final = 900.0
"""For the way up and for the way back, each: a node may have to be added, and a model loads for minutes."""
LASTING_S: Final = (5.0, 30.0)
"""How long the load goes on once the replicas are ready, and how long those that stay at the end are watched: of a
short drill, and of another one."""
EXCESS: Final = 1.25
"""A HorizontalPodAutoscaler accepts a load of up to 1.1 times what its replicas should have."""
PAUSE_S: Final = 1.0
"""The pause of the one client that stays, between its requests."""


def drill_load(scene: Scene) -> Drill:
    """Send the peak, then twice the peak."""
    seconds, before, peak, slo = scene.lasting(8, 60), scene.before(), scene.peak, scene.workload.slo
    sent = [scene.send(times * peak, seconds) for times in (1, 2)]
    once, twice = map(_answered_per_s, sent)
    reasons = [f"{twice} answers/s at twice the peak, {once} at the peak"] if twice < COLLAPSE * once else []
    rates = {"peak_per_s": round(peak, 2), "answered_at_peak_per_s": once, "answered_per_s": twice}
    if slo:
        times = [(each.ttft_ms or 0.0, each.tpot_ms or 0.0) for each in sent[1] if not each.error]
        met = sum(ttft_ms <= slo.ttft_ms and tpot_ms <= slo.tpot_ms for ttft_ms, tpot_ms in times)
        rates["within_targets"] = round(met / max(1, len(sent[1])), 3)
    return scene.judged(sent[1], before, reasons, **rates, **_named("", times_of(sent[1])))


def drill_overload(scene: Scene) -> Drill:
    """Send ten times the peak."""
    before = scene.before()
    replies = scene.send(10 * scene.peak, scene.lasting(4, 20))
    refused_ms = p95_ms(1000 * (each.ended_s - each.sent_s) for each in replies if each.refused)
    times, reasons = times_of(replies), []
    if (refused_ms or 0.0) > REFUSED_MS:
        reasons.append(f"refusals took {refused_ms:.0f} ms (p95), allowed {REFUSED_MS:.0f} ms")
    if (times[0] or 0.0) > LATE_MS:
        reasons.append(f"{times[0]:.0f} ms to the first token (p95): requests wait instead of being refused")
    return scene.judged(replies, before, reasons, refused_p95_ms=refused_ms, **_named("", times))


def drill_long_context(scene: Scene) -> Drill:
    """Keep a request of the maximum length beside short ones."""
    before, access, seconds = scene.before(), scene.access, scene.lasting(6, 30)
    context, users = longest_request(access), min(scene.workload.concurrency, USERS)
    replies = []
    for beside in (0, 1):
        short = SteadyLoad(access, users, (SHORT_TOKENS, SHORT_TOKENS))
        with short, SteadyLoad(access, beside, (context - SHORT_TOKENS, SHORT_TOKENS)) as longest:
            time.sleep(seconds)
        replies.append(short.replies())
    alone, during, (long_ttft_ms, _) = times_of(replies[0]), times_of(replies[1]), times_of(longest.replies())
    reasons = scene.slower("short requests beside a long one", during, alone)
    reasons += [] if long_ttft_ms else [f"no request of {context} tokens was answered"]
    figures = _named("short_", during) | _named("alone_", alone)
    figures |= {"context_tokens": context, "long_ttft_p95_ms": long_ttft_ms}
    return scene.judged([*replies[1], *longest.replies()], before, reasons, **figures)


def drill_kv_full(scene: Scene) -> Drill:
    """Add long requests until the KV cache is full; raise TransientError where nothing tells how full it is."""
    before, started, access = scene.before(), scene.target.counters(scene.release), scene.access
    context, fullest, loads = longest_request(access), 0.0, list[SteadyLoad]()
    output, until = min(context // 4, GROWING_TOKENS), time.monotonic() + scene.lasting(16, 120)
    with contextlib.ExitStack() as standing, contextlib.ExitStack() as ending:
        while fullest < FULL and time.monotonic() < until and USERS * len(loads) < MOST_USERS:
            load = SteadyLoad(access, USERS, (context - output, output))
            loads.append(standing.enter_context(load))
            ending.callback(load.ask_no_more)  # of all, before the first is waited for
            time.sleep(FILLING_S)
            fullest = max(fullest, scene.counters().cache_used)
        time.sleep(scene.lasting(2, 30) if fullest >= FULL else 0)
    preempted, reasons = scene.counters().preempted - started.preempted, []
    if fullest < FULL and preempted <= 0:
        reasons.append(f"{USERS * len(loads)} requests filled {fullest:.0%} of the KV cache, so that nothing is shown")
    replies = [reply for load in loads for reply in load.replies()]
    figures = {"users": USERS * len(loads), "cache_used": round(fullest, 3), "preemptions": preempted}
    return scene.judged(replies, before, reasons, **figures)


def drill_slow_client(scene: Scene) -> Drill:
    """Keep streams open that are read slowly, and broken off at the end."""
    before, count = scene.before(), round(scene.lasting(100, 1000))
    with slow_clients(scene, count) as errors:
        # What they asked for is computed first: the drill is of slow reading, not of load.
        seconds_until(lambda: scene.more_running(before) <= 0, time.monotonic(), RECOVERY_S, POLL_S)
        others = scene.send(scene.peak / 2, scene.lasting(5, 30))
    during = times_of(others)
    reasons = scene.slower(f"others beside {count} slow streams", during, before.times_ms)
    reasons += [f"{len(errors)} of {count} slow streams failed: {errors[0]}"] if errors else []
    figures = _named("others_", during) | _named("alone_", before.times_ms)
    return scene.judged(others, before, reasons, streams=count, **figures)


@contextlib.contextmanager
def slow_clients(scene: Scene, count: int) -> Iterator[list[str]]:
    """Keep that many streams open while the block runs, of which nothing is read but the headers. After it half of them
    are broken off, the others read to the end. Yields why some failed, once all are open or have failed."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    over, opened, errors, access = threading.Event(), list[httpx.Response](), list[str](), scene.access
    output, until, limits = scene.lengths[1], time.monotonic() + OPENED_S, httpx.Limits(max_connections=None)

    def hold(response: httpx.Response) -> None:
        if response.is_success:
            opened.append(response)
            number = len(opened)
            if over.wait() and number % 2:
                raise httpx.CloseError(BROKEN_OFF)

    def read(client: httpx.Client, number: int) -> None:
        prompt = prompt_of(f"{until} {number}", SHORT_TOKENS)
        reply = stream_completion(client, access, prompt, output)
        while reply.refused and not over.wait(POLL_S):
            reply = stream_completion(client, access, prompt, output)
        if reply.error and not reply.refused and BROKEN_OFF not in reply.error:
            errors.append(reply.error)

    hooks, trusted = {"response": [hold]}, trusting(access.certificate)
    with (
        httpx.Client(trust_env=False, verify=trusted, limits=limits, event_hooks=hooks) as client,
        ThreadPoolExecutor(count) as pool,
    ):
        try:
            for number in range(count):
                pool.submit(read, client, number)
                while number - len(opened) - len(errors) >= (OPENING if number < count - 1 else 0):
                    if time.monotonic() > until:
                        errors.append(f"only {len(opened)} were open after {OPENED_S:.0f} s")
                    time.sleep(0.01)
            yield errors
        finally:
            over.set()


def _named(who: str, times: Times) -> dict[str, float | None]:
    return {f"{who}ttft_p95_ms": times[0], f"{who}tpot_p95_ms": times[1]}


def _answered_per_s(replies: Sequence[Reply]) -> float:
    answered = [reply for reply in replies if not reply.error]
    times = [time for reply in answered for time in (reply.sent_s, reply.ended_s)] or [0.0, 1.0]
    return round(len(answered) / (max(times) - min(times)), 2)


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
        hint = f"slipway rollout status {scene.store.model}"
        raise Conflict(f"{canary} is being tried, and gets a part of the load", hint=hint)
    present = scene.target.replicas(release)
    if present.minimum == present.maximum:
        text = f"{release} has {present.minimum} replicas under any load: its minimum is its maximum"
        raise ConfigError(text, hint="raise kserve.scaling.maximum; slipway rollout start applies it")
    if present.running >= present.maximum:
        text = f"{release} has all of its {present.maximum} replicas already, so that none can be added"
        raise TransientError(text, hint="try again under less load, or raise kserve.scaling.maximum")
    return present


def _scale_up(scene: Scene, goal: int, load: SteadyLoad, started: float) -> dict[str, Any]:
    target, release, lasting_s = scene.target, scene.release, scene.lasting(*LASTING_S)
    wanted_s = seconds_until(lambda: target.replicas(release).running >= goal, started, LIMIT_S, LOOK_S)
    ready_s = None
    if wanted_s is not None:
        say(f"{goal} replicas are asked for after {wanted_s:.1f} s")
        ready_s = seconds_until(lambda: target.replicas(release).ready >= goal, started, LIMIT_S, LOOK_S)
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
    first_s = seconds_until(lambda: left() < counts[0], ended, LIMIT_S, LOOK_S)
    if first_s is not None:
        say(f"a replica is taken away {first_s:.1f} s after the load")
    back_s = seconds_until(lambda: left() <= before.running, ended, LIMIT_S, LOOK_S)
    if back_s is not None:
        say(f"{before.running} are left after {back_s:.1f} s")
        seconds_until(lambda: left() < before.minimum, time.monotonic(), scene.lasting(*LASTING_S), LOOK_S)
    return {"first_s": first_s, "back_s": back_s, "fewest": min(counts)}
