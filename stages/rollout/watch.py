"""Looks at a release in production: its recorded prompts, a short fixed load, and what its server counts.

Each look goes through the endpoint, as clients do. ``scoring.watch`` judges it by those before.
"""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime
from statistics import median
from typing import Final

import psutil

from scoring.watch import USERS
from stages.parts.base.errors import ServerFailed, TransientError
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.endpoint import serving_here
from stages.parts.machine.hardware import hardware
from stages.parts.records.rollout import LOCAL, Counters, under_way
from stages.parts.records.watch import Look, judged, seen
from stages.parts.releases import release as releases
from stages.parts.releases.pinned import MeasuredWith
from stages.parts.vllm.client import Access, engine_version, longest_request
from stages.parts.vllm.probes import check_probes
from stages.rollout.commands import roll_back
from stages.rollout.observation import agreement
from stages.rollout.scene import access_to, counters_of, served
from stages.rollout.slices import Timing, send_pairs
from stages.rollout.target import Target

REQUESTS: Final = 200
"""Of a look's load: of which 5 % fail if one in twenty does, by ten, so that three looks show it."""
PROMPT_TOKENS: Final = 32
TIMEOUT_S: Final = 30.0
LOAD_S: Final = 120.0
"""After that, no more requests of the load are sent."""
BUSY: Final = 90.0
"""Percent of the machine's cores that are busy, without requests of clients, if others keep it busy."""


def look(store: ModelStore, target: Target, via: str = "") -> Look | None:
    """Look at the release in production, judge it and keep what was seen; None while another one is being tried, which
    answers a part of the requests.

    Raises:
        NothingToServe: nothing is served.
        TransientError, ServerFailed: the platform does not say what is served.
    """
    release, at = served(store, target), datetime.now(UTC)
    if target.split().canary or under_way(store):
        return None
    access, serving = access_to(store, target.client_url(), via), target.serving_of(release)
    since = max((move.ended_at for move in releases.history(store) if move.result == "promoted"), default=None)
    former, before = seen(store).of(release, since), counters_of(target, release)
    outside, inside, clients, clients_failed = _outside(store, target, before), [], 0, 0
    if former and former[-1].instance == before.instance:  # both counted since the same start
        answered, failed = former[-1].counted
        clients_failed = max(0, round(before.failed - failed))
        clients = max(0, round(before.answered - answered)) + clients_failed
    elif former and former[-1].instance and before.instance:
        inside.append("its server was restarted")
    probes, agreed, context, stack = releases.probes(store, release), None, None, dict[str, str]()
    with contextlib.suppress(ServerFailed, TransientError):
        agreed = check_probes(access, probes) if probes else None
    timings = _load(access, at)
    with contextlib.suppress(ServerFailed, TransientError):
        context = longest_request(access)
        stack["vLLM"] = engine_version(target.url(release)).partition("+")[0]
    here = hardware() if target.name == LOCAL else None
    if moved := MeasuredWith.of(store.releases / release).moved(stack, here, serving.dtype):
        inside.append(f"it {moved}")
    after, timed = counters_of(target, release), [timing for timing in timings if timing.answered]
    shown = Look(
        release=release,
        at=at,
        agreement=agreed,
        requests=bool(probes) + len(timings) + clients,
        failed=(bool(probes) and agreed is None) + len(timings) - len(timed) + clients_failed,
        ttft_ms=round(1000 * median(timing.ttft_s for timing in timed), 3) if timed else None,
        tpot_ms=round(1000 * median(timing.tpot_s for timing in timed), 3) if timed else None,
        in_flight=before.running + before.waiting,
        context=context,
        promised=max(filter(None, [serving.max_model_len, *(each.context for each in former)]), default=None),
        counted=(after.answered, after.failed),
        instance=after.instance,
        causes=(*inside, *outside),
        outside=bool(outside),
    )
    return judged(store, shown, since)


def go_back(store: ModelStore, target: Target, settings: Rollout, look: Look) -> str:
    """Roll back after an alarm, if an earlier release is sound and the cause is the release. Returns what was done, or
    why nothing was; raises as ``roll_back``."""
    earlier = releases.before(store, look.release)
    if look.outside and set(look.alarms) <= {"ttft", "tpot"}:
        return f"not rolled back: an earlier release would be as slow; {'; '.join(look.causes)}"
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


def _load(access: Access, at: datetime) -> list[Timing]:
    """Send the load, whose prompts no cache knows: their names have the time of the look."""
    timings: list[Timing] = []
    deadline = time.monotonic() + LOAD_S
    while len(timings) < REQUESTS and time.monotonic() < deadline:
        names = [f"{at.isoformat()} {len(timings) + user}" for user in range(USERS)]
        timings += [timed for (timed,) in send_pairs([access], names, PROMPT_TOKENS, 0.0, TIMEOUT_S)]
    return timings


def _outside(store: ModelStore, target: Target, now: Counters) -> list[str]:
    """Say what would make any release slow."""
    queue = f"{now.waiting:.0f} requests of clients wait, with {now.cache_used:.0%} of the KV cache in use"
    causes = [queue] if now.waiting else []
    if target.name == LOCAL:
        others = (each.model for each in serving_here(store.root))
        causes += [f"{model} is served beside it" for model in others if model != store.model]
        if not now.running and (busy := psutil.cpu_percent(0.5)) > BUSY:
            causes.append(f"other programs keep {busy:.0f}% of this machine's cores busy")
    return causes
