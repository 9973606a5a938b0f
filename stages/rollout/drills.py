"""Drills: they try on the live endpoint, under a steady load like that of clients, what it must withstand.

A drill has succeeded if its record's ``failures`` are empty.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from stages.parts.base.errors import Busy, DrillFailed, NothingToServe, SlipwayError, TransientError
from stages.parts.base.record import Record
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Slo, Workload
from stages.parts.endpoint.endpoint import Endpoint, api_key, endpoint
from stages.parts.records.rollout import under_way
from stages.parts.releases import release as releases
from stages.parts.releases.split import Split
from stages.parts.vllm.streaming import Access, Reply
from stages.rollout.commands import abort, roll_back
from stages.rollout.steady_load import SteadyLoad
from stages.rollout.target import Target

ROLLBACK_LIMIT_S: Final = 300.0
"""The default limit of ``drill_rollback``."""
RECOVERY_LIMIT_S: Final = 300.0
SETTLE_S: Final = 3.0
"""Load before and after the drilled event."""
POLL_S: Final = 0.2
SHOWN_ERRORS: Final = 3
PROMPT_TOKENS: Final = 128
OUTPUT_TOKENS: Final = 64
"""Both are used where the workload is a trace, which sets no lengths."""


class Answers(Record):
    """The outcome of a drill's requests."""

    requests: int
    failed: int
    errors: tuple[str, ...]
    """The first few."""
    releases: dict[str, int]
    """How many each release answered."""


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
        found = failed(self.answers)
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
        found = failed(self.answers)
        if self.rollback_s > self.limit_s:
            found.append(f"the rollback took {self.rollback_s:.1f} s, allowed {self.limit_s:g} s")
        return found


class CrashDrill(Record):
    """The result of killing a server."""

    release: str
    answers: Answers
    """Requests fail if the killed server had begun to answer them, or if no other server was up."""
    outage_s: float
    """From the first failed request to the first answer to one sent after the last failed one; 0: none failed."""
    recovered_s: float | None
    """Until another server was up in the killed one's place; None: not within five minutes."""

    def failures(self) -> list[str]:
        return (
            [] if self.recovered_s is not None else [f"{self.release} was not up again after {RECOVERY_LIMIT_S:.0f} s"]
        )


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
        ttft_p95_ms=p95(reply.ttft_ms for reply in replies if not reply.error),
        tpot_p95_ms=p95(reply.tpot_ms for reply in replies if not reply.error),
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
    limit_s: float = ROLLBACK_LIMIT_S,
    via: str = "",
) -> RollbackDrill:
    """Roll back under load to the release before the served one, and forward again.

    Args:
        via: see ``Access``.

    Raises:
        NothingToServe: nothing is served, or there is no release before.
        DrillFailed: no request is answered, or the platform did not act in time. The rollout under way is then given
            up.
        RolledBack: a release did not come up.
    """
    split = target.split()
    release, previous = _served_and_previous(store, split)
    access = access_to(store, target.client_url(), via)
    with _report_unfinished(store, release, say), steady(access, workload, workload.concurrency) as load:
        time.sleep(SETTLE_S)
        check_answers(load)
        seconds = []
        for goal, left in ((previous, release), (release, previous)):
            say(f"moving all traffic to {goal}")
            started = time.monotonic()
            with _abort_if_stuck(store, target, goal, say):
                roll_back(store, target, settings, to=goal)
            seconds.append(_last_sent_s(load, left, time.monotonic()) - started)
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
    store: ModelStore,
    target: Target,
    workload: Workload,
    say: Callable[[str], None],
    *,
    canary: bool = False,
    via: str = "",
) -> CrashDrill:
    """Kill a server of the stable release (or of the canary) under load.

    Args:
        via: see ``Access``.

    Raises:
        NothingToServe: nothing is served, or there is no canary.
        DrillFailed: no request is answered even before that.
        TransientError, AccessDenied: the server can't be killed.
    """
    split = target.split()
    release = split.canary if canary else split.stable
    if release is None:
        raise NothingToServe(f"no {'canary' if canary else 'release'} of {store.model} is being served")
    recovered_s = None
    with steady(access_to(store, target.client_url(), via), workload, workload.concurrency) as load:
        time.sleep(SETTLE_S)
        check_answers(load)
        say(f"killing a server of {release}")
        up_again = target.kill(release)
        killed = time.monotonic()
        while time.monotonic() - killed < RECOVERY_LIMIT_S:
            if up_again():
                recovered_s = round(time.monotonic() - killed, 1)
                say(f"up again after {recovered_s:.1f} s")
                break
            time.sleep(POLL_S)
        time.sleep(SETTLE_S)
    replies = load.replies()
    return CrashDrill(release=release, answers=answers(replies), outage_s=outage_s(replies), recovered_s=recovered_s)


def running_endpoint(store: ModelStore) -> Endpoint:
    """Raises: NothingToServe: there is no endpoint."""
    found = endpoint(store)
    if found is None:
        raise NothingToServe(f"{store.model} is not being served", hint=f"slipway serve {store.model}")
    return found


def check(failures: list[str], found: Answers) -> None:
    """Raises: DrillFailed: the drill did not succeed, and why."""
    if failures:
        raise DrillFailed("; ".join(failures), hint=f"the requests' errors: {', '.join(found.errors) or 'none'}")


def access_to(store: ModelStore, url: str, via: str = "") -> Access:
    """Args: url: the endpoint's base URL, without ``/v1``. via: see ``Access``."""
    found = endpoint(store)
    certificate = found.serving.get("tls_certificate") if found and found.url == url else None
    return Access(url, store.model, api_key(), via, certificate)


def steady(access: Access, workload: Workload, concurrency: int, *, pause_s: float = 0.0) -> SteadyLoad:
    return SteadyLoad(
        access,
        concurrency=concurrency,
        prompt_tokens=workload.prompt_tokens or PROMPT_TOKENS,
        output_tokens=workload.output_tokens or OUTPUT_TOKENS,
        pause_s=pause_s,
    )


def _served_and_previous(store: ModelStore, split: Split) -> tuple[str, str]:
    """Raises: NothingToServe: nothing is served, or there is no release before."""
    release = split.stable
    previous = releases.before(store, release) if release else None
    if release is None or previous is None:
        raise NothingToServe(
            f"{store.model} has no earlier release to go back to", hint=f"slipway releases {store.model}"
        )
    return release, previous


def _last_sent_s(load: SteadyLoad, release: str, since_s: float) -> float:
    """When the last request was sent that *release* answered; at least *since_s*."""
    time.sleep(SETTLE_S)
    return max([since_s, *(reply.sent_s for reply in load.replies() if reply.release == release)])


def check_answers(load: SteadyLoad) -> None:
    """Raises: DrillFailed: clients get no answer even now, so that the drill could show nothing."""
    replies = load.replies()
    if replies and all(reply.error for reply in replies):
        raise DrillFailed(
            f"no request is answered, and nothing was changed: {replies[-1].error}",
            hint="where the name of a cluster's endpoint can't be resolved: --set kserve.gateway_url=http://…",
        )


@contextlib.contextmanager
def _abort_if_stuck(store: ModelStore, target: Target, goal: str, say: Callable[[str], None]) -> Iterator[None]:
    """Raises: DrillFailed: the platform did not give *goal* all traffic in time."""
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
def _report_unfinished(store: ModelStore, release: str, say: Callable[[str], None]) -> Iterator[None]:
    """Say what a drill that was interrupted, by Ctrl-C for instance, left changed, and how to undo it."""
    try:
        yield
    except BaseException:
        if journal := under_way(store):
            say(f"the rollout of {journal.release} is under way: slipway rollout abort {store.model}")
        if (now := releases.current_release(store)) != release:
            say(f"{now} is in production: slipway rollback {store.model} --to {release}")
        raise


def answers(replies: Sequence[Reply]) -> Answers:
    counts: dict[str, int] = {}
    for reply in replies:
        if not reply.error:
            counts[reply.release] = counts.get(reply.release, 0) + 1
    errors = list(dict.fromkeys(reply.error for reply in replies if reply.error))
    return Answers(
        requests=len(replies),
        failed=sum(bool(reply.error) for reply in replies),
        errors=tuple(errors[:SHOWN_ERRORS]),
        releases=counts,
    )


def outage_s(replies: Sequence[Reply]) -> float:
    failed = [reply.ended_s for reply in replies if reply.error]
    if not failed:
        return 0.0
    answered = [reply.ended_s for reply in replies if not reply.error and reply.sent_s >= max(failed)]
    return round(min(answered, default=max(failed)) - min(failed), 2)


def failed(found: Answers) -> list[str]:
    return [f"{found.failed} of {found.requests} requests failed"] if found.failed else []


def p95(values: Iterable[float | None]) -> float | None:
    """The 95th percentile by nearest rank, so that it is a measured value."""
    known = sorted(value for value in values if value is not None)
    return round(known[max(0, -(-95 * len(known) // 100) - 1)], 1) if known else None
