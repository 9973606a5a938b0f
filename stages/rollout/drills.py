"""Drills: they try on the live endpoint, under a steady load like that of clients, what it must withstand.

A drill has succeeded if its record's ``failures`` are empty.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Self

import httpx

from scoring.percentiles import p95
from stages.parts.base.errors import Busy, DrillFailed, NothingToServe, SlipwayError, TransientError
from stages.parts.base.log import say
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.store import ModelStore, Record
from stages.parts.base.workload import Slo, Workload
from stages.parts.endpoint.endpoint import Endpoint, api_key, endpoint
from stages.parts.records.rollout import under_way
from stages.parts.releases import release as releases
from stages.parts.vllm.client import REQUEST_TIMEOUT_S, VOCABULARY, Access, Reply, stream_completion, trusting
from stages.rollout.commands import abort, roll_back
from stages.rollout.target import Target

ROLLBACK_LIMIT_S: Final = 300.0
"""The default limit of ``drill_rollback``."""
RECOVERY_LIMIT_S: Final = 300.0
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

    def __enter__(self) -> Self:
        for user in self._users:
            user.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
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


class Answers(Record):
    """The outcome of a drill's requests."""

    requests: int
    failed: int
    errors: tuple[str, ...]
    """The first few."""
    releases: dict[str, int]
    """How many each release answered."""

    def failures(self) -> list[str]:
        return [f"{self.failed} of {self.requests} requests failed"] if self.failed else []


class LoadDrill(Record):
    """The result under twice the expected peak."""

    concurrency: int
    seconds: float
    answers: Answers
    ttft_p95_ms: float | None
    tpot_p95_ms: float | None
    output_tokens_per_s: float
    slo: Slo | None

    def failures(self) -> list[str]:
        reasons = self.answers.failures()
        if self.answers.requests == 0:
            reasons.append("no request was answered")
        latencies = (("TTFT", self.ttft_p95_ms, "ttft_ms"), ("TPOT", self.tpot_p95_ms, "tpot_ms"))
        for name, value, target in latencies if self.slo else ():
            limit = getattr(self.slo, target)
            if value is None or value > limit:
                shown = "unknown" if value is None else f"{value:.0f} ms"
                reasons.append(f"{name} p95 {shown}, allowed {limit:g} ms")
        return reasons


class RollbackDrill(Record):
    """The result of a rollback to the previous release, and of the way forward again."""

    release: str
    previous: str
    warm: bool
    """Whether the previous release's server was on standby."""
    rollback_s: float
    """From the command until no new request reaches *release*."""
    limit_s: float
    forward_s: float
    answers: Answers

    def failures(self) -> list[str]:
        reasons = self.answers.failures()
        if self.rollback_s > self.limit_s:
            reasons.append(f"the rollback took {self.rollback_s:.1f} s, allowed {self.limit_s:g} s")
        return reasons


class CrashDrill(Record):
    """The result of killing a server."""

    release: str
    answers: Answers
    """Requests fail if the killed server had begun to answer them, or if no other server was up."""
    outage_s: float
    """From the first failed request to the first answer to one sent after the last failed one; 0 if none failed."""
    recovered_s: float | None
    """Until another server was up in the killed one's place; None if none was within five minutes."""

    def failures(self) -> list[str]:
        if self.recovered_s is not None:
            return []
        return [f"{self.release} was not up again after {RECOVERY_LIMIT_S:.0f} s"]


def drill_load(access: Access, workload: Workload, *, peak: int, seconds: float, slo: Slo | None) -> LoadDrill:
    """Keep 2 × *peak* requests in flight for *seconds*."""
    with steady(access, workload, 2 * peak) as load:
        started = time.monotonic()
        time.sleep(seconds)
        took_s = time.monotonic() - started
        tokens = sum(reply.tokens for reply in load.replies())
    replies = load.replies()
    return LoadDrill(
        concurrency=2 * peak,
        seconds=round(took_s, 1),
        answers=answers(replies),
        ttft_p95_ms=p95_ms(reply.ttft_ms for reply in replies if not reply.error),
        tpot_p95_ms=p95_ms(reply.tpot_ms for reply in replies if not reply.error),
        output_tokens_per_s=round(tokens / took_s, 1),
        slo=slo,
    )


def drill_rollback(
    store: ModelStore,
    target: Target,
    workload: Workload,
    settings: Rollout,
    *,
    limit_s: float = ROLLBACK_LIMIT_S,
    via: str = "",
) -> RollbackDrill:
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
    return RollbackDrill(
        release=release,
        previous=previous,
        warm=split.standby == previous,
        rollback_s=round(seconds[0], 2),
        limit_s=limit_s,
        forward_s=round(seconds[1], 2),
        answers=answers(load.replies()),
    )


def drill_crash(
    store: ModelStore, target: Target, workload: Workload, *, canary: bool = False, via: str = ""
) -> CrashDrill:
    """Kill a server of the stable release (or of the canary) under load; *via*: see ``Access``.

    Raises:
        NothingToServe: nothing is served, or there is no canary.
        DrillFailed: no request is answered even before that.
        TransientError, AccessDenied: the server can't be killed.
    """
    split = target.split()
    release = split.canary if canary else split.stable
    if release is None:
        raise NothingToServe(f"no {'canary' if canary else 'release'} of {store.model} is being served")
    with clients(store, target, workload, workload.concurrency, via) as load:
        say(f"killing a server of {release}")
        up_again = target.kill(release)
        recovered_s = seconds_until(up_again, time.monotonic(), RECOVERY_LIMIT_S, POLL_S)
        if recovered_s is not None:
            say(f"up again after {recovered_s:.1f} s")
        time.sleep(SETTLE_S)
    replies = load.replies()
    return CrashDrill(release=release, answers=answers(replies), outage_s=outage_s(replies), recovered_s=recovered_s)


def running_endpoint(store: ModelStore) -> Endpoint:
    """Read the endpoint of this machine; raise NothingToServe if there is none."""
    running = endpoint(store)
    if running is None:
        raise NothingToServe(f"{store.model} is not being served", hint=f"slipway serve {store.model}")
    return running


def failure_of(failures: list[str], answers: Answers) -> DrillFailed | None:
    """Return the error of a drill that did not succeed."""
    hint = f"the requests' errors: {', '.join(answers.errors) or 'none'}"
    return DrillFailed("; ".join(failures), hint=hint) if failures else None


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
