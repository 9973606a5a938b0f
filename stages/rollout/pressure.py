"""Drills of a live endpoint under more than it usually has to take. Each compares the endpoint with itself, before.

Requests come at random moments, whether or not earlier ones are answered (an open loop): a slow server gets no fewer.
"""

from __future__ import annotations

import contextlib
import random
import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import httpx
import psutil

from stages.parts.base.errors import ConfigError, DrillFailed, SlipwayError
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Workload
from stages.parts.endpoint.endpoint import endpoint
from stages.parts.records.drills import Drill
from stages.parts.records.production import Production
from stages.parts.records.rollout import LOCAL, ZERO, Counters
from stages.parts.releases.release import METRICS
from stages.parts.vllm.client import Access, Reply, http, longest_request, stream_completion, trusting
from stages.rollout import drills
from stages.rollout.drills import SteadyLoad, served
from stages.rollout.scale_drill import ScaleLimits, drill_scale
from stages.rollout.slices import prompt_of
from stages.rollout.target import Target

MOST_IN_FLIGHT: Final = 512
TIMEOUT_S: Final = 30.0
RECOVERY_S: Final = 30.0
POLL_S: Final = 0.2
SLOWER: Final = 4.0  # this and the following limits: docs/drills.md says why
NOISE_MS: Final = 50.0
COLLAPSE: Final = 0.7
REFUSED_MS: Final = 2000.0
LATE_MS: Final = 10_000.0
FILES: Final = 16
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
Times = tuple[float | None, float | None]
"""95th percentiles to the first token and per token, in ms; None where nothing was answered."""


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

    @property
    def access(self) -> Access:
        return drills.access_to(self.store, self.target.client_url(), self.via)

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of the requests' prompts and answers."""
        return self.workload.prompt_tokens or drills.PROMPT_TOKENS, self.workload.output_tokens or drills.OUTPUT_TOKENS

    def peak(self) -> float:
        """Choose the peak in requests per second: the given one, the workload's rate, or what the release was measured
        to serve within the targets; raise ConfigError if none is known."""
        decision = Production.read_if_intact(self.store.releases / served(self.store, self.target) / METRICS)
        tokens_per_s = decision.chosen.raw.get("throughput", 0.0) if decision else 0.0
        if peak := self.peak_per_s or self.workload.request_rate_per_s or tokens_per_s / self.lengths[1]:
            return peak
        raise ConfigError("the peak is not known: the release was not measured here", hint="add --peak")

    def lasting(self, short_s: float, long_s: float) -> float:
        return short_s if self.short else long_s

    def counters(self) -> Counters:
        """Read the servers' counters; all are zero where these can't be reached, as from outside of a cluster."""
        with contextlib.suppress(SlipwayError):
            return self.target.counters(served(self.store, self.target))
        return ZERO

    def files(self) -> int:
        """Count the open files and connections of the endpoint's processes; 0 where they are not on this machine."""
        running = endpoint(self.store) if self.target.name == LOCAL else None
        roots, count = [psutil.Process(running.pid)] if running else [], 0
        for process in [*roots, *(child for root in roots for child in root.children(recursive=True))]:
            with contextlib.suppress(psutil.NoSuchProcess):
                count += process.num_fds()
        return count

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
        replies = self.send(self.peak() / 2, max(self.lasting(4, 20), 16 / self.peak()))
        if all(reply.error for reply in replies):
            why = replies[-1].error if replies else "none was sent"
            raise DrillFailed(f"no request is answered at half of the peak: {why}", hint="slipway watch --once")
        return Before(times_of(replies), counters, files)

    def judged(self, replies: Sequence[Reply], before: Before, reasons: list[str], **figures: Any) -> Drill:
        """Judge what each drill asks: no request is lost, and the endpoint is as before in time."""
        errors = [reply.error for reply in replies if reply.error and not reply.refused]
        reasons += [f"{len(errors)} of {len(replies)} requests were lost: {errors[0]}"] if errors else []
        began, now = time.monotonic(), self.counters()
        while (lacking := self._lacking(before)) and time.monotonic() - began < RECOVERY_S:
            time.sleep(POLL_S)
        figures["recovered_s"] = None if lacking else round(time.monotonic() - began, 1)
        reasons += [f"not as before within {RECOVERY_S:.0f} s: {lacking}"] if lacking else []
        if before.counters.instance and now.instance not in ("", before.counters.instance):
            reasons.append("its server was restarted")
        release = served(self.store, self.target)
        return Drill(release=release, answers=drills.answers(replies), figures=figures, failures=tuple(reasons))

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


def drill_load(scene: Scene) -> Drill:
    """Send the peak, then twice the peak."""
    seconds, before, peak, slo = scene.lasting(8, 60), scene.before(), scene.peak(), scene.workload.slo
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
    replies = scene.send(10 * scene.peak(), scene.lasting(4, 20))
    refused_ms = drills.p95_ms(1000 * (each.ended_s - each.sent_s) for each in replies if each.refused)
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
    answer, replies = {"output_tokens": SHORT_TOKENS}, []
    for beside in (0, 1):
        short = SteadyLoad(access, concurrency=users, prompt_tokens=SHORT_TOKENS, **answer)
        with short, SteadyLoad(access, concurrency=beside, prompt_tokens=context - SHORT_TOKENS, **answer) as longest:
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
    before, started, access = scene.before(), scene.target.counters(served(scene.store, scene.target)), scene.access
    context, fullest, loads = longest_request(access), 0.0, list[SteadyLoad]()
    output, until = min(context // 4, GROWING_TOKENS), time.monotonic() + scene.lasting(16, 120)
    with contextlib.ExitStack() as standing, contextlib.ExitStack() as ending:
        while fullest < FULL and time.monotonic() < until and USERS * len(loads) < MOST_USERS:
            load = SteadyLoad(access, concurrency=USERS, prompt_tokens=context - output, output_tokens=output)
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
        drills.seconds_until(lambda: scene.more_running(before) <= 0, time.monotonic(), RECOVERY_S, POLL_S)
        others = scene.send(scene.peak() / 2, scene.lasting(5, 30))
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


def times_of(replies: Sequence[Reply]) -> Times:
    """Compute the 95th percentiles of the requests that were answered."""
    good = [reply for reply in replies if not reply.error]
    return drills.p95_ms(reply.ttft_ms for reply in good), drills.p95_ms(reply.tpot_ms for reply in good)


def _named(who: str, times: Times) -> dict[str, float | None]:
    return {f"{who}ttft_p95_ms": times[0], f"{who}tpot_p95_ms": times[1]}


def _answered_per_s(replies: Sequence[Reply]) -> float:
    answered = [reply for reply in replies if not reply.error]
    times = [time for reply in answered for time in (reply.sent_s, reply.ended_s)] or [0.0, 1.0]
    return round(len(answered) / (max(times) - min(times)), 2)


BY_NAME: Final[dict[str, Callable[[Scene], Drill]]] = {
    "load": drill_load,
    "overload": drill_overload,
    "long-context": drill_long_context,
    "kv-full": drill_kv_full,
    "slow-client": drill_slow_client,
    "crash": lambda scene: drills.drill_crash(scene.store, scene.target, scene.workload, via=scene.via),
    "cold": lambda scene: drills.drill_cold(scene.store, scene.target, scene.workload, via=scene.via),
    "scale": lambda it: drill_scale(
        it.store, it.target, it.workload, ScaleLimits(seconds=it.lasting(5, 30), down=not it.short), via=it.via
    ),
    "rollback": lambda it: drills.drill_rollback(it.store, it.target, it.workload, it.settings, via=it.via),
}
