"""The live endpoint as drills see it: under a load like that of clients, and beside how it was before.

Of two kinds of load, ``SteadyLoad`` waits for each answer. ``Scene.send`` sends requests at random moments, whether or
not earlier ones are answered (an open loop): a slow server gets no fewer.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, Self

import httpx
import psutil

from scoring.percentiles import p95
from stages.parts.base.errors import ConfigError, DrillFailed, NothingToServe, SlipwayError
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Workload
from stages.parts.endpoint.endpoint import api_key, endpoint
from stages.parts.records.drills import Answers, Drill
from stages.parts.records.production import Production
from stages.parts.records.rollout import LOCAL, ZERO, Counters
from stages.parts.releases.release import METRICS
from stages.parts.vllm.client import REQUEST_TIMEOUT_S, VOCABULARY, Access, Reply, http, stream_completion, trusting
from stages.rollout.slices import prompt_of
from stages.rollout.target import Target

SETTLE_S: Final = 3.0
"""Load before and after the drilled event."""
POLL_S: Final = 0.2
PROMPT_TOKENS: Final = 128
OUTPUT_TOKENS: Final = 64
"""Both are used where the workload is a trace, which sets no lengths."""
PAUSE_AFTER_FAILURE_S: Final = 0.1
MOST_IN_FLIGHT: Final = 512
TIMEOUT_S: Final = 30.0
RECOVERY_S: Final = 30.0
SLOWER: Final = 4.0  # this and the following limits: docs/drills.md says why
NOISE_MS: Final = 50.0
FILES: Final = 16
Times = tuple[float | None, float | None]
"""95th percentiles to the first token and per token, in ms; None where nothing was answered."""


class SteadyLoad:
    """Keeps a request of each of its *users* in flight while its block runs; at the end each is allowed to finish.

    Fewer are in flight if users pause for *pause_s* between an answer and the next request. *lengths* are the tokens
    of prompts and answers."""

    def __init__(self, access: Access, users: int, lengths: tuple[int, int], pause_s: float = 0.0) -> None:
        self._access, self._lengths, self._pause_s = access, lengths, pause_s
        self._ending = threading.Event()
        self._replies: list[Reply] = []
        self._users = [threading.Thread(target=self._keep_asking, args=(n,)) for n in range(users)]

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
        draw, access, (prompt_tokens, output_tokens) = random.Random(user), self._access, self._lengths
        with httpx.Client(trust_env=False, timeout=REQUEST_TIMEOUT_S, verify=trusting(access.certificate)) as client:
            while not self._ending.is_set():
                prompt = draw.choices(VOCABULARY, k=prompt_tokens)
                reply = stream_completion(client, access, prompt, output_tokens)
                self._replies.append(reply)
                self._ending.wait(max(self._pause_s, PAUSE_AFTER_FAILURE_S if reply.error else 0.0))


class Before(NamedTuple):
    """The endpoint before a drill, at half of the peak."""

    times_ms: Times
    counters: Counters
    files: int


@dataclass(frozen=True)
class Scene:
    """What is drilled, and with which requests. *via*: see ``Access``."""

    store: ModelStore
    target: Target
    workload: Workload
    settings: Rollout
    via: str = ""
    peak_per_s: float | None = None
    """Requests per second at the expected peak; None: see ``peak``."""
    short: bool = False

    @cached_property
    def release(self) -> str:
        """The release that clients get; raises NothingToServe without one."""
        return served(self.store, self.target)

    @property
    def access(self) -> Access:
        return access_to(self.store, self.target.client_url(), self.via)

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of the requests' prompts and answers."""
        return self.workload.prompt_tokens or PROMPT_TOKENS, self.workload.output_tokens or OUTPUT_TOKENS

    @cached_property
    def peak(self) -> float:
        """The peak in requests per second: the given one, the workload's rate, or what the release was measured to
        serve within the targets; raises ConfigError if none is known."""
        decision = Production.read_if_intact(self.store.releases / self.release / METRICS)
        tokens_per_s = decision.chosen.raw.get("throughput", 0.0) if decision else 0.0
        if peak := self.peak_per_s or self.workload.request_rate_per_s or tokens_per_s / self.lengths[1]:
            return peak
        raise ConfigError("the peak is not known: the release was not measured here", hint="add --peak")

    def lasting(self, short_s: float, long_s: float) -> float:
        return short_s if self.short else long_s

    def counters(self) -> Counters:
        return counters_of(self.target, self.release)

    def files(self) -> int:
        """Count the open files and connections of the endpoint's processes; 0 where they are not on this machine."""
        running = endpoint(self.store) if self.target.name == LOCAL else None
        roots, count = [psutil.Process(running.pid)] if running else [], 0
        for process in [*roots, *(child for root in roots for child in root.children(recursive=True))]:
            with contextlib.suppress(psutil.NoSuchProcess):
                count += process.num_fds()
        return count

    def steady(self, users: int, pause_s: float = 0.0) -> SteadyLoad:
        """Make a steady load of the workload's requests."""
        return SteadyLoad(self.access, users, self.lengths, pause_s)

    @contextlib.contextmanager
    def clients(self, users: int) -> Iterator[SteadyLoad]:
        """Keep that many requests in flight, from ``SETTLE_S`` before the block; raise DrillFailed if none was answered
        by then, so that a drill could show nothing."""
        with self.steady(users) as load:
            time.sleep(SETTLE_S)
            replies = load.replies()
            if replies and all(reply.error for reply in replies):
                hint = "where the name of a cluster's endpoint can't be resolved: --set kserve.gateway_url=http://…"
                raise DrillFailed(f"no request is answered, and nothing was changed: {replies[-1].error}", hint=hint)
            yield load

    def send(self, rate_per_s: float, seconds: float) -> list[Reply]:
        """Send requests of the workload at random moments, at this mean rate."""
        prompt, output = self.lengths
        access, due_s, sent = self.access, 0.0, []
        client, began = http(access.certificate), time.monotonic()
        with ThreadPoolExecutor(MOST_IN_FLIGHT) as pool:
            try:
                while (due_s := due_s + random.expovariate(rate_per_s)) < seconds:
                    time.sleep(max(0.0, began + due_s - time.monotonic()))
                    tokens = prompt_of(f"{began} {due_s}", prompt)
                    sent.append(pool.submit(stream_completion, client, access, tokens, output, TIMEOUT_S))
                return [each.result() for each in sent]
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def before(self) -> Before:
        """Send half of the peak; raise DrillFailed if nothing is answered, so that a drill could show nothing."""
        counters, files = self.counters(), self.files()
        replies = self.send(self.peak / 2, max(self.lasting(4, 20), 16 / self.peak))
        if all(reply.error for reply in replies):
            why = replies[-1].error if replies else "none was sent"
            raise DrillFailed(f"no request is answered at half of the peak: {why}", hint="slipway watch --once")
        return Before(times_of(replies), counters, files)

    def ended(self, replies: Sequence[Reply], reasons: Iterable[str], **figures: Any) -> Drill:
        """Record how the release withstood it; *reasons* say why it did not."""
        return Drill(release=self.release, answers=answers(replies), figures=figures, failures=tuple(reasons))

    def judged(self, replies: Sequence[Reply], before: Before, reasons: list[str], **figures: Any) -> Drill:
        """Judge what each drill asks: no request is lost, and the endpoint is as before in time."""
        errors = [reply.error for reply in replies if reply.error and not reply.refused]
        reasons += [f"{len(errors)} of {len(replies)} requests were lost: {errors[0]}"] if errors else []
        began, now = time.monotonic(), self.counters()
        while (lacking := self._lacking(before)) and time.monotonic() - began < RECOVERY_S:
            time.sleep(POLL_S)
        recovered_s = None if lacking else round(time.monotonic() - began, 1)
        reasons += [f"not as before within {RECOVERY_S:.0f} s: {lacking}"] if lacking else []
        if before.counters.instance and now.instance not in ("", before.counters.instance):
            reasons.append("its server was restarted")
        return self.ended(replies, reasons, **figures, recovered_s=recovered_s)

    def more_running(self, before: Before) -> float:
        counters = self.counters()
        return counters.running + counters.waiting - before.counters.running - before.counters.waiting

    def _lacking(self, before: Before) -> str:
        prompt = prompt_of(str(time.monotonic()), self.lengths[0])
        reply = stream_completion(http(self.access.certificate), self.access, prompt, 1, TIMEOUT_S)
        running, files = self.more_running(before), self.files() - before.files
        slower = self.slower("a request", (reply.ttft_ms, None), before.times_ms)
        slower += [f"{running:.0f} requests still run"] if running > 0 else []
        slower += [f"{files} more files are open"] if files > FILES else []
        return reply.error or "; ".join(slower)

    def slower(self, who: str, times_ms: Times, before_ms: Times) -> list[str]:
        """Say which of the times are too long."""
        reasons, slo = [], self.workload.slo
        for name, value, usual in zip(("ttft_ms", "tpot_ms"), times_ms, before_ms, strict=True):
            allowed = max(SLOWER * (usual or 0.0) + NOISE_MS, getattr(slo, name) if slo else 0.0)
            if value is not None and value > allowed:
                before = f"{usual or 0:.0f} ms before"
                reasons.append(f"{who}: {name[:4].upper()} {value:.0f} ms, {before}, allowed {allowed:.0f} ms")
        return reasons


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


def counters_of(target: Target, release: str) -> Counters:
    """Read a release's counters; all are zero where they can't be reached, as from outside of a cluster."""
    with contextlib.suppress(SlipwayError):
        return target.counters(release)
    return ZERO


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


def times_of(replies: Sequence[Reply]) -> Times:
    """Compute the 95th percentiles of the requests that were answered."""
    good = [reply for reply in replies if not reply.error]
    return p95_ms(reply.ttft_ms for reply in good), p95_ms(reply.tpot_ms for reply in good)


def p95_ms(values: Iterable[float | None]) -> float | None:
    value = p95(values)
    return None if value is None else round(value, 1)
