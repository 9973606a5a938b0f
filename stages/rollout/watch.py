"""Looks at a release in production: its recorded prompts, a short fixed load, and what its server counts.

Each look goes through the endpoint, as clients do. ``scoring.watch`` judges it by those before.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from statistics import median
from typing import Final

import psutil

from stages.parts.base.errors import NothingToServe, ServerFailed, SlipwayError, TransientError
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.store import ModelStore
from stages.parts.machine.hardware import hardware
from stages.parts.records.production import Production
from stages.parts.records.rollout import LOCAL, ZERO, Counters, under_way
from stages.parts.records.watch import Look, judged, seen
from stages.parts.releases import release as releases
from stages.parts.vllm.client import Access, engine_version, http, longest_request, stream_completion
from stages.parts.vllm.probes import check_probes
from stages.rollout.commands import roll_back
from stages.rollout.drills import access_to
from stages.rollout.observation import agreement
from stages.rollout.slices import ANSWER_TOKENS, Timing, prompt_of, timing
from stages.rollout.target import Target

REQUESTS: Final = 200
"""Of a look's load: of which 5 % fail if one in twenty does, by ten, so that three looks show it."""
USERS: Final = 4
PROMPT_TOKENS: Final = 32
TIMEOUT_S: Final = 30.0
LOAD_S: Final = 120.0
"""After that, no more requests of the load are sent."""
BUSY: Final = 0.9
"""The part of the machine's cores that is busy, without requests of clients, if others keep it busy."""
BUSY_S: Final = 0.5
FULL: Final = 0.95
"""The part of the KV cache in use beyond which it is full."""


def look(store: ModelStore, target: Target, via: str = "") -> Look | None:
    """Look at the release in production, judge it and keep what was seen; None while another one is being tried, which
    answers a part of the requests.

    Raises:
        NothingToServe: nothing is served.
        TransientError, ServerFailed: the platform does not say what is served.
    """
    split, started, at = target.split(), time.monotonic(), datetime.now(UTC)
    if split.stable is None:
        raise NothingToServe(f"{store.model} is not being served", hint=f"slipway serve {store.model}")
    if split.canary or under_way(store):
        return None
    release, access = split.stable, access_to(store, target.client_url(), via)
    since = max((move.ended_at for move in releases.history(store) if move.result == "promoted"), default=None)
    former = seen(store).of(release, since)
    last = former[-1] if former else None
    before = _counters(target, release)
    causes, outside = _causes(store, target, release, before, last)
    agreed, asked, failed = _answers(store, access, release)
    timings = _load(access, at)
    failed += sum(not each.answered for each in timings)
    asked += len(timings)
    after = _counters(target, release)
    clients_asked, clients_failed = _of_clients(last, after, asked, failed)
    answered = [each for each in timings if each.answered]
    context: int | None = None
    with contextlib.suppress(SlipwayError):
        context = longest_request(access)
    promised = [target.serving_of(release).max_model_len, *(each.context for each in former)]
    return judged(
        store,
        Look(
            release=release,
            agreement=agreed,
            requests=asked + clients_asked,
            failed=failed + clients_failed,
            ttft_ms=round(1000 * median(each.ttft_s for each in answered), 3) if answered else None,
            tpot_ms=round(1000 * median(each.tpot_s for each in answered), 3) if answered else None,
            in_flight=before.running + before.waiting,
            context=context,
            promised=max(filter(None, promised), default=None),
            counted=(after.answered, after.failed),
            instance=after.instance,
            causes=tuple(causes),
            outside=outside,
            seconds=round(time.monotonic() - started, 1),
            at=at,
        ),
        since,
    )


def go_back(store: ModelStore, target: Target, settings: Rollout, look: Look) -> str:
    """Roll back after an alarm, if an earlier release is sound and the cause is the release. Returns what was done, or
    why nothing was; raises as ``roll_back``."""
    if look.outside and set(look.alarms) <= {"ttft", "tpot"}:
        return f"not rolled back: an earlier release would be as slow; {'; '.join(look.causes)}"
    earlier = releases.before(store, look.release)
    if earlier is None:
        return "not rolled back: there is no earlier release"
    if (looks := seen(store).of(earlier)) and looks[-1].alarms:
        return f"not rolled back: there was an alarm of {earlier} too, {', '.join(looks[-1].alarms)}"
    if target.split().standby == earlier:
        with contextlib.suppress(TransientError):
            agreed = agreement(store, target, earlier)
            if agreed is not None and agreed < settings.agreement:
                return f"not rolled back: {earlier} does not answer as it was measured either, agreement {agreed:.4f}"
    roll_back(store, target, settings, to=earlier)
    return f"rolled back to {earlier}"


def _answers(store: ModelStore, access: Access, release: str) -> tuple[float | None, int, int]:
    """Ask the recorded prompts. Returns how far the answers agree, the number of requests, and that of failed ones."""
    recorded = releases.probes(store, release)
    if not recorded:
        return None, 0, 0
    try:
        return check_probes(access, recorded), 2, 0
    except (ServerFailed, TransientError):
        return None, 2, 1


def _load(access: Access, at: datetime) -> list[Timing]:
    """Send the load, whose prompts no cache knows: their names have the time of the look."""
    deadline = time.monotonic() + LOAD_S

    def send(number: int) -> Timing | None:
        if time.monotonic() > deadline:
            return None
        prompt = prompt_of(f"{at.isoformat()} {number}", PROMPT_TOKENS)
        return timing(stream_completion(http(access.certificate), access, prompt, ANSWER_TOKENS, TIMEOUT_S))

    with ThreadPoolExecutor(USERS) as pool:
        return list(filter(None, pool.map(send, range(REQUESTS))))


def _counters(target: Target, release: str) -> Counters:
    with contextlib.suppress(ServerFailed, TransientError):
        return target.counters(release)
    return ZERO


def _of_clients(last: Look | None, now: Counters, asked: int, failed: int) -> tuple[int, int]:
    """Count the requests of clients, and those that failed, since the last look, without the present look's own."""
    if last is None or last.instance != now.instance:
        return 0, 0
    more_answered, more_failed = now.answered - last.counted[0], now.failed - last.counted[1]
    clients_failed = max(0, round(more_failed) - failed)
    return max(0, round(more_answered) - (asked - failed)) + clients_failed, clients_failed


def _causes(
    store: ModelStore, target: Target, release: str, now: Counters, last: Look | None
) -> tuple[list[str], bool]:
    """Say what may make the release other than it was measured, and whether any of it is outside of the release."""
    inside, outside = [], []
    if last and last.instance and now.instance not in ("", last.instance):
        inside.append("its server was restarted")
    measured = Production.read_if_intact(store.releases / release / releases.METRICS)
    with contextlib.suppress(ServerFailed, TransientError):
        version = engine_version(target.url(release))
        if measured and version and version != measured.engine.version:
            inside.append(f"engine {version}, measured with {measured.engine.version}")
    if now.waiting:
        outside.append(f"{now.waiting:.0f} requests of clients are in the queue")
    if now.cache_used > FULL:
        outside.append(f"the KV cache is {now.cache_used:.0%} full")
    with contextlib.suppress(SlipwayError):
        if neighbours := target.neighbours(release):
            outside.append(f"beside it serves {', '.join(neighbours)}")
    if target.name == LOCAL:
        here = hardware()
        if measured and (here.cpu, here.gpus) != (measured.hardware.cpu, measured.hardware.gpus):
            inside.append(f"hardware: {', '.join(here.gpus) or here.cpu}, not as it was measured on")
        busy = psutil.cpu_percent(BUSY_S) / 100
        if busy > BUSY and not now.running:
            outside.append(f"other programs keep {busy:.0%} of this machine's cores busy")
    return [*inside, *outside], bool(outside)
