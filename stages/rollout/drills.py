"""Drills: what the endpoint must withstand, tried on the living one, under a steady load of requests like clients'.

What counts as held is said by each record's ``failures``: empty if it was.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from stages.parts.base.errors import Busy, DrillFailed, NothingToServe, SlipwayError, TransientError
from stages.parts.base.record import Record
from stages.parts.base.settings import Rollout, Slo, Workload
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.record import Endpoint, api_key, endpoint
from stages.parts.records.rollout import LOCAL, under_way
from stages.parts.releases import release as releases
from stages.rollout.control import abort, roll_back
from stages.rollout.steady import Reply, SteadyLoad
from stages.rollout.target import Target

ROLLBACK_LIMIT_S: Final = 300.0
"""Unless another one is asked for."""
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
    limit_s: float
    """For it."""
    forward_s: float
    answers: Answers

    def failures(self) -> list[str]:
        found = _failed(self.answers)
        if self.rollback_s > self.limit_s:
            found.append(f"the rollback took {self.rollback_s:.1f} s, allowed {self.limit_s:g} s")
        return found


class CrashDrill(Record):
    """A server that is killed."""

    release: str
    answers: Answers
    """Those that failed had begun to be answered by the killed server, or came while no other stood by."""
    outage_s: float
    """From the first failed request to the first answer to one sent after the last failed one; 0: none failed."""
    recovered_s: float | None
    """Until there was another one in the killed server's place; None: not within five minutes."""

    def failures(self) -> list[str]:
        return (
            [] if self.recovered_s is not None else [f"{self.release} was not up again after {RECOVERY_LIMIT_S:.0f} s"]
        )


def drill_load(
    store: ModelStore, url: str, workload: Workload, *, peak: int, seconds: float, slo: Slo | None, via: str = ""
) -> LoadDrill:
    """Keep 2 × *peak* requests in flight for *seconds*. Of *via*, see ``SteadyLoad``."""
    with steady(store, url, workload, 2 * peak, via) as load:
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
    limit_s: float = ROLLBACK_LIMIT_S,
    via: str = "",
) -> RollbackDrill:
    """Roll back to the release before the served one under load, and forward again. Of *via*, see ``SteadyLoad``.

    Raises:
        NothingToServe: nothing is served, or there is no release before.
        DrillFailed: no request is answered, or the platform did not do what it was asked in time. What is under way
            is then given up.
        RolledBack: a release did not come up.
    """
    split = target.split()
    release = split.stable
    previous = releases.before(store, release) if release else None
    if release is None or previous is None:
        raise NothingToServe(
            f"{store.model} has no earlier release to go back to", hint=f"slipway releases {store.model}"
        )
    seconds = []
    with (
        _saying_what_is_left(store, release, say),
        steady(store, target.endpoint(), workload, workload.concurrency, via) as load,
    ):
        time.sleep(SETTLE_S)
        _check_answers(load)
        for goal, left in ((previous, release), (release, previous)):
            say(f"going to {goal}")
            started = time.monotonic()
            with _given_up_if_stuck(store, target, goal, say):
                roll_back(store, target, settings, to=goal, target_name=target_name)
            done = time.monotonic()
            time.sleep(SETTLE_S)
            late = [each.sent_s for each in load.replies() if each.release == left and each.sent_s > done]
            seconds.append(max([done, *late]) - started)
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
    """Kill a server of the stable release (or of the canary) under load. Of *via*, see ``SteadyLoad``.

    Raises:
        NothingToServe: nothing is served, or there is no canary.
        DrillFailed: no request is answered as it is.
        TransientError, AccessDenied: it can't be killed.
    """
    split = target.split()
    release = split.canary if canary else split.stable
    if release is None:
        raise NothingToServe(f"{store.model} has no {'canary' if canary else 'release'} that is being served")
    recovered_s = None
    with steady(store, target.endpoint(), workload, workload.concurrency, via) as load:
        time.sleep(SETTLE_S)
        _check_answers(load)
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


def steady(store: ModelStore, url: str, workload: Workload, concurrency: int, via: str = "") -> SteadyLoad:
    return SteadyLoad(
        url,
        store.model,
        api_key(),
        concurrency=concurrency,
        prompt_tokens=workload.prompt_tokens or PROMPT_TOKENS,
        output_tokens=workload.output_tokens or OUTPUT_TOKENS,
        via=via,
    )


def _check_answers(load: SteadyLoad) -> None:
    """Raises: DrillFailed: clients get no answer as it is, so that nothing could be seen."""
    replies = load.replies()
    if replies and all(each.error for each in replies):
        raise DrillFailed(
            f"no request is answered, and nothing was changed: {replies[-1].error}",
            hint="where a cluster's endpoint is not known by its name: --set kserve.gateway_url=http://…",
        )


@contextlib.contextmanager
def _given_up_if_stuck(store: ModelStore, target: Target, goal: str, say: Callable[[str], None]) -> Iterator[None]:
    """Raises: DrillFailed: the platform did not bring *goal* into force in time."""
    try:
        yield
    except TransientError as error:
        journal = under_way(store)
        if isinstance(error, Busy) or journal is None or journal.release != goal:
            raise  # it has not begun, or is another's
        say(f"giving it up: {error}")
        try:
            abort(store, target, f"the drill did not get there: {error}")
        except SlipwayError as another:
            say(f"it could not be given up: {another}")
        raise DrillFailed(f"{goal} did not get all requests: {error}", hint=error.hint) from error


@contextlib.contextmanager
def _saying_what_is_left(store: ModelStore, release: str, say: Callable[[str], None]) -> Iterator[None]:
    """Of a drill that does not come to its end, Ctrl-C included: what is not as it was, and the way back."""
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
