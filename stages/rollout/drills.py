"""Drills: what the endpoint must withstand, tried on the living one, under a steady load of requests like clients'.

What counts as held is said by each record's ``failures``: empty if it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import psutil

from stages import releases
from stages.errors import DrillFailed, NothingToServe
from stages.records import Record
from stages.rollout.control import roll_back
from stages.rollout.settings import Rollout
from stages.rollout.steady import Reply, SteadyLoad
from stages.rollout.target import Target
from stages.rollout.targets import LOCAL
from stages.serve.endpoint import Endpoint, api_key, endpoint
from stages.settings import Slo, Workload
from stages.store import ModelStore

ROLLBACK_LIMIT_S: Final = 300.0
RECOVERY_LIMIT_S: Final = 300.0
SETTLE_S: Final = 3.0
"""Of load before and after what is drilled."""
POLL_S: Final = 0.2
SHOWN_ERRORS: Final = 3
PROMPT_TOKENS: Final = 128
OUTPUT_TOKENS: Final = 64
"""Where the workload is a trace, which sets none."""


class Answers(Record):
    """What became of a drill's requests."""

    requests: int
    failed: int
    errors: tuple[str, ...]
    """The first few."""
    releases: dict[str, int]
    """How many each release answered."""


class LoadDrill(Record):
    """Twice the expected peak."""

    concurrency: int
    seconds: float
    answers: Answers
    ttft_p95_ms: float | None
    tpot_p95_ms: float | None
    output_tokens_per_s: float
    slo: Slo | None

    def failures(self) -> list[str]:
        found = _failed(self.answers)
        if self.answers.requests == 0:
            found.append("no request was answered")
        if self.slo:
            for name, value, limit in (
                ("TTFT", self.ttft_p95_ms, self.slo.ttft_ms),
                ("TPOT", self.tpot_p95_ms, self.slo.tpot_ms),
            ):
                if value is None or value > limit:
                    found.append(
                        f"{name} p95 {'unknown' if value is None else f'{value:.0f} ms'}, allowed {limit:g} ms"
                    )
        return found


class RollbackDrill(Record):
    """To the release before, and back."""

    release: str
    previous: str
    warm: bool
    """Whether the previous release's server was standing by."""
    rollback_s: float
    """From the command until no new request reaches *release*."""
    forward_s: float
    answers: Answers

    def failures(self) -> list[str]:
        found = _failed(self.answers)
        if self.rollback_s > ROLLBACK_LIMIT_S:
            found.append(f"the rollback took {self.rollback_s:.0f} s, allowed {ROLLBACK_LIMIT_S:.0f} s")
        return found


class CrashDrill(Record):
    """A server that is killed."""

    release: str
    answers: Answers
    """Those that failed had begun to be answered by the killed server, or came while no other stood by."""
    outage_s: float
    """From the first failed request to the first answer to one sent after the last failed one; 0: none failed."""
    recovered_s: float | None
    """Until the killed server was up again; None: not within five minutes."""

    def failures(self) -> list[str]:
        return (
            [] if self.recovered_s is not None else [f"{self.release} was not up again after {RECOVERY_LIMIT_S:.0f} s"]
        )


def drill_load(
    store: ModelStore, url: str, workload: Workload, *, peak: int, seconds: float, slo: Slo | None
) -> LoadDrill:
    """Keep 2 × *peak* requests in flight for *seconds*."""
    with steady(store, url, workload, 2 * peak) as load:
        started = time.monotonic()
        time.sleep(seconds)
        took_s = time.monotonic() - started
        tokens = sum(each.tokens for each in load.replies())
    replies = load.replies()
    return LoadDrill(
        concurrency=2 * peak,
        seconds=round(took_s, 1),
        answers=answers(replies),
        ttft_p95_ms=_p95(each.ttft_ms for each in replies if not each.error),
        tpot_p95_ms=_p95(each.tpot_ms for each in replies if not each.error),
        output_tokens_per_s=round(tokens / took_s, 1),
        slo=slo,
    )


def drill_rollback(
    store: ModelStore,
    target: Target,
    workload: Workload,
    settings: Rollout,
    say: Callable[[str], None],
    *,
    target_name: str = LOCAL,
) -> RollbackDrill:
    """Roll back to the release before the served one under load, and forward again.

    Raises:
        NothingToServe: nothing is served, or there is no release before.
    """
    split = target.split()
    release = split.stable
    previous = releases.before(store, release) if release else None
    if release is None or previous is None:
        raise NothingToServe(
            f"{store.model} has no earlier release to go back to", hint=f"slipway releases {store.model}"
        )
    seconds = []
    with steady(store, target.endpoint(), workload, workload.concurrency) as load:
        time.sleep(SETTLE_S)
        for goal in (previous, release):
            say(f"going to {goal}")
            started = time.monotonic()
            roll_back(store, target, settings, to=goal, target_name=target_name)
            done = time.monotonic()
            time.sleep(SETTLE_S)
            late = [each.sent_s for each in load.replies() if each.release not in (goal, "") and each.sent_s > done]
            seconds.append(max([done, *late]) - started)
            say(f"{goal} gets all requests after {seconds[-1]:.1f} s")
    return RollbackDrill(
        release=release,
        previous=previous,
        warm=split.standby == previous,
        rollback_s=round(seconds[0], 2),
        forward_s=round(seconds[1], 2),
        answers=answers(load.replies()),
    )


def drill_crash(
    store: ModelStore, workload: Workload, say: Callable[[str], None], *, canary: bool = False
) -> CrashDrill:
    """Kill the server of the stable release (or the canary's) on this machine with SIGKILL, under load.

    Raises:
        NothingToServe: it is not up.
    """
    found = living(store)
    release = found.canary if canary else found.release
    server = found.server(release or "")
    if release is None or server is None or server.pid is None:
        raise NothingToServe(f"{store.model} has no {'canary' if canary else 'server'} that is up")
    recovered_s = None
    with steady(store, found.url, workload, workload.concurrency) as load:
        time.sleep(SETTLE_S)
        say(f"killing the server of {release}")
        for process in psutil.Process(server.pid).children():  # the pid is its guard's
            process.kill()
        killed = time.monotonic()
        while time.monotonic() - killed < RECOVERY_LIMIT_S:
            now = endpoint(store)
            state = now.server(release) if now else None
            if state and state.state == "up" and state.pid != server.pid:
                recovered_s = round(time.monotonic() - killed, 1)
                say(f"up again after {recovered_s:.1f} s")
                break
            time.sleep(POLL_S)
        time.sleep(SETTLE_S)
    replies = load.replies()
    return CrashDrill(release=release, answers=answers(replies), outage_s=outage_s(replies), recovered_s=recovered_s)


def living(store: ModelStore) -> Endpoint:
    """Raises: NothingToServe: there is no endpoint."""
    found = endpoint(store)
    if found is None:
        raise NothingToServe(f"{store.model} is not being served", hint=f"slipway serve {store.model}")
    return found


def check(drill: LoadDrill | RollbackDrill | CrashDrill) -> None:
    """Raises: DrillFailed: naming what did not hold."""
    if failures := drill.failures():
        raise DrillFailed(
            "; ".join(failures), hint=f"the requests' errors: {', '.join(drill.answers.errors) or 'none'}"
        )


def steady(store: ModelStore, url: str, workload: Workload, concurrency: int) -> SteadyLoad:
    return SteadyLoad(
        url,
        store.model,
        api_key(),
        concurrency=concurrency,
        prompt_tokens=workload.prompt_tokens or PROMPT_TOKENS,
        output_tokens=workload.output_tokens or OUTPUT_TOKENS,
    )


def answers(replies: Sequence[Reply]) -> Answers:
    counts: dict[str, int] = {}
    for each in replies:
        if not each.error:
            counts[each.release] = counts.get(each.release, 0) + 1
    errors = list(dict.fromkeys(each.error for each in replies if each.error))
    return Answers(
        requests=len(replies),
        failed=sum(bool(each.error) for each in replies),
        errors=tuple(errors[:SHOWN_ERRORS]),
        releases=counts,
    )


def outage_s(replies: Sequence[Reply]) -> float:
    failed = [each.ended_s for each in replies if each.error]
    if not failed:
        return 0.0
    answered = [each.ended_s for each in replies if not each.error and each.sent_s >= max(failed)]
    return round(min(answered, default=max(failed)) - min(failed), 2)


def _failed(found: Answers) -> list[str]:
    return [f"{found.failed} of {found.requests} requests failed"] if found.failed else []


def _p95(values: Iterable[float | None]) -> float | None:
    """The nearest rank, so that it is a value that was measured."""
    known = sorted(each for each in values if each is not None)
    return round(known[max(0, -(-95 * len(known) // 100) - 1)], 1) if known else None
