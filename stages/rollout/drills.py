"""Drills that end a server of the live endpoint, under a steady load like that of clients; and what all drills use."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Self

import httpx

from scoring.percentiles import p95
from stages.parts.base.errors import Busy, DrillFailed, NothingToServe, SlipwayError, TransientError
from stages.parts.base.log import say
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Workload
from stages.parts.endpoint.endpoint import api_key, endpoint
from stages.parts.records.drills import Answers, Drill
from stages.parts.records.rollout import under_way
from stages.parts.releases import release as releases
from stages.parts.releases.pinned import MeasuredWith
from stages.parts.vllm.client import REQUEST_TIMEOUT_S, VOCABULARY, Access, Reply, http, stream_completion, trusting
from stages.parts.vllm.server_log import cold_start
from stages.parts.vllm.sizing import SLOWER
from stages.rollout.commands import abort, roll_back
from stages.rollout.target import Target

ROLLBACK_LIMIT_S: Final = 300.0
RECOVERY_LIMIT_S: Final = 300.0
NOTICED_S: Final = 30.0
"""What a cold start may take besides ``SLOWER`` times as long as was measured: until the end is noticed and, on a
cluster, a node found."""
SETTLE_S: Final = 3.0
"""Load before and after the drilled event."""
POLL_S: Final = 0.2
PROMPT_TOKENS: Final = 128
OUTPUT_TOKENS: Final = 64
"""Both are used where the workload is a trace, which sets no lengths."""
PAUSE_AFTER_FAILURE_S: Final = 0.1


class SteadyLoad:
    """Keeps *concurrency* requests in flight while its block runs; at the end each is allowed to finish. Fewer are in
    flight if users pause for *pause_s* between an answer and the next request."""

    def __init__(
        self, access: Access, *, concurrency: int, prompt_tokens: int, output_tokens: int, pause_s: float = 0.0
    ) -> None:
        self._access, self._pause_s = access, pause_s
        self._prompt_tokens, self._output_tokens = prompt_tokens, output_tokens
        self._ending = threading.Event()
        self._replies: list[Reply] = []
        self._users = [threading.Thread(target=self._keep_asking, args=(n,)) for n in range(concurrency)]

    def replies(self) -> list[Reply]:
        """List the outcomes of all requests that have ended so far."""
        return list(self._replies)

    def failed(self) -> list[Reply]:
        return [reply for reply in self.replies() if reply.error]

    def ask_no_more(self) -> None:
        self._ending.set()

    def __enter__(self) -> Self:
        for user in self._users:
            user.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ask_no_more()
        for user in self._users:
            user.join()

    def _keep_asking(self, user: int) -> None:
        draw = random.Random(user)
        with httpx.Client(
            trust_env=False, timeout=REQUEST_TIMEOUT_S, verify=trusting(self._access.certificate)
        ) as client:
            while not self._ending.is_set():
                prompt = draw.choices(VOCABULARY, k=self._prompt_tokens)
                reply = stream_completion(client, self._access, prompt, self._output_tokens)
                self._replies.append(reply)
                self._ending.wait(max(self._pause_s, PAUSE_AFTER_FAILURE_S if reply.error else 0.0))


def drill_rollback(store: ModelStore, target: Target, workload: Workload, settings: Rollout, *, via: str = "") -> Drill:
    """Roll back under load to the release before the served one, and forward again; *via*: see ``Access``.

    Raises:
        NothingToServe: nothing is served, or there is no release before.
        DrillFailed: no request is answered, or the platform did not act in time. The rollout under way is then given
            up.
        RolledBack: a release did not come up.
    """
    split = target.split()
    release = split.stable
    previous = releases.before(store, release) if release else None
    if release is None or previous is None:
        raise NothingToServe(
            f"{store.model} has no earlier release to go back to", hint=f"slipway releases {store.model}"
        )
    with _report_unfinished(store, release), clients(store, target, workload, workload.concurrency, via) as load:
        seconds = []
        for goal, left in ((previous, release), (release, previous)):
            say(f"moving all traffic to {goal}")
            started = time.monotonic()
            with _abort_if_stuck(store, target, goal):
                roll_back(store, target, settings, to=goal)
            ended = time.monotonic()
            time.sleep(SETTLE_S)
            last_sent = [reply.sent_s for reply in load.replies() if reply.release == left]
            seconds.append(max([ended, *last_sent]) - started)
            say(f"{goal} gets all requests after {seconds[-1]:.1f} s")
    answered, reasons = answers(load.replies()), []
    if seconds[0] > ROLLBACK_LIMIT_S:
        reasons.append(f"the rollback took {seconds[0]:.1f} s, allowed {ROLLBACK_LIMIT_S:g} s")
    figures = {"previous": previous, "warm": split.standby == previous}
    figures |= {"rollback_s": round(seconds[0], 2), "forward_s": round(seconds[1], 2)}
    return Drill(release=release, answers=answered, figures=figures, failures=tuple(answered.failures() + reasons))


def drill_crash(store: ModelStore, target: Target, workload: Workload, *, via: str = "") -> Drill:
    """Kill a server of the stable release under load; *via*: see ``Access``.

    Raises:
        NothingToServe: nothing is served.
        DrillFailed: no request is answered even before that.
        TransientError, AccessDenied: the server can't be killed.
    """
    release = served(store, target)
    with clients(store, target, workload, workload.concurrency, via) as load:
        say(f"killing a server of {release}")
        up_again = target.kill(release)
        recovered_s = seconds_until(up_again, time.monotonic(), RECOVERY_LIMIT_S, POLL_S)
        time.sleep(SETTLE_S)
    replies, lacking = load.replies(), f"{release} was not up again after {RECOVERY_LIMIT_S:.0f} s"
    figures = {"outage_s": outage_s(replies), "recovered_s": recovered_s}
    failures = (lacking,) if recovered_s is None else ()
    return Drill(release=release, answers=answers(replies), figures=figures, failures=failures)


def drill_cold(store: ModelStore, target: Target, workload: Workload, *, via: str = "") -> Drill:
    """Kill a server of the stable release without load, and time the parts of the next start; raises as
    ``drill_crash``."""
    release, access = served(store, target), access_to(store, target.client_url(), via)
    engine, limit_s = MeasuredWith.of(store.releases / release).engine, target.serving_of(release).startup_timeout_s
    if engine:
        limit_s = min(limit_s, round(SLOWER * engine.ready_s + NOTICED_S))
    prompt, replies, killed_at = [*VOCABULARY][: workload.prompt_tokens or PROMPT_TOKENS], list[Reply](), time.time()
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
    figures |= {"total_s": total_s, "measured_s": engine.ready_s if engine else None}
    return Drill(release=release, answers=answers(replies), figures=figures, failures=tuple(reasons))


def served(store: ModelStore, target: Target) -> str:
    """Name the release that clients get; raise NothingToServe without one."""
    if release := target.split().stable:
        return release
    hint = f"slipway serve {store.model}, or on a cluster: slipway rollout start {store.model}"
    raise NothingToServe(f"{store.model} is not being served on {target.name}", hint=hint)


def access_to(store: ModelStore, url: str, via: str = "") -> Access:
    """Choose how to reach the endpoint at a base URL (without ``/v1``); *via*: see ``Access``."""
    running = endpoint(store)
    certificate = running.serving.get("tls_certificate") if running and running.url == url else None
    return Access(url, store.model, api_key(), via, certificate)


def steady(access: Access, workload: Workload, concurrency: int, *, pause_s: float = 0.0) -> SteadyLoad:
    return SteadyLoad(
        access,
        concurrency=concurrency,
        prompt_tokens=workload.prompt_tokens or PROMPT_TOKENS,
        output_tokens=workload.output_tokens or OUTPUT_TOKENS,
        pause_s=pause_s,
    )


@contextlib.contextmanager
def clients(store: ModelStore, target: Target, workload: Workload, concurrency: int, via: str) -> Iterator[SteadyLoad]:
    """Keep that many requests in flight, as clients send them, from ``SETTLE_S`` before the block; raise DrillFailed if
    none was answered by then, so that a drill could show nothing."""
    with steady(access_to(store, target.client_url(), via), workload, concurrency) as load:
        time.sleep(SETTLE_S)
        replies = load.replies()
        if replies and all(reply.error for reply in replies):
            raise DrillFailed(
                f"no request is answered, and nothing was changed: {replies[-1].error}",
                hint="where the name of a cluster's endpoint can't be resolved: --set kserve.gateway_url=http://…",
            )
        yield load


@contextlib.contextmanager
def _abort_if_stuck(store: ModelStore, target: Target, goal: str) -> Iterator[None]:
    """Raise DrillFailed if the platform does not give *goal* all traffic in time."""
    try:
        yield
    except TransientError as error:
        journal = under_way(store)
        if isinstance(error, Busy) or journal is None or journal.release != goal:
            raise  # the rollout has not begun, or is another one
        say(f"giving it up: {error}")
        try:
            abort(store, target, f"the drill timed out: {error}")
        except SlipwayError as another:
            say(f"it could not be given up: {another}")
        raise DrillFailed(f"{goal} did not get all requests: {error}", hint=error.hint) from error


@contextlib.contextmanager
def _report_unfinished(store: ModelStore, release: str) -> Iterator[None]:
    """Say what a drill that was interrupted, by Ctrl-C for instance, left changed, and how to undo it."""
    try:
        yield
    except BaseException:
        if journal := under_way(store):
            say(f"the rollout of {journal.release} is under way: slipway rollout abort {store.model}")
        if (current := releases.current_release(store)) != release:
            say(f"{current} is in production: slipway rollback {store.model} --to {release}")
        raise


def seconds_until(done: Callable[[], bool], since: float, limit_s: float, poll_s: float) -> float | None:
    """Wait until it is *done*. Returns the seconds since *since*, or None after *limit_s*."""
    while True:
        if done():
            return round(time.monotonic() - since, 1)
        if time.monotonic() - since > limit_s:
            return None
        time.sleep(poll_s)


def answers(replies: Sequence[Reply]) -> Answers:
    errors = [reply.error for reply in replies if reply.error]
    return Answers(
        requests=len(replies),
        failed=len(errors),
        refused=sum(reply.refused for reply in replies),
        errors=tuple(dict.fromkeys(errors))[:3],
        releases=dict(Counter(reply.release for reply in replies if not reply.error)),
    )


def outage_s(replies: Sequence[Reply]) -> float:
    failures = [reply.ended_s for reply in replies if reply.error]
    if not failures:
        return 0.0
    answered = [reply.ended_s for reply in replies if not reply.error and reply.sent_s >= max(failures)]
    return round(min(answered, default=max(failures)) - min(failures), 2)


def p95_ms(values: Iterable[float | None]) -> float | None:
    value = p95(values)
    return None if value is None else round(value, 1)
