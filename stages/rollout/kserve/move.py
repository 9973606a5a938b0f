"""Moves a model from one mode of KServe to another while clients are answered, and tries it under a load of its own.

The other mode's objects are made beside those that serve and must answer before they get the host name. For a while
both modes have a route for it: whichever the gateway prefers, servers of the same release answer. Only where that
shows in the load's answers are the former objects removed; otherwise the new ones are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Final

from stages.parts.base.errors import Conflict, DrillFailed, NothingToServe, SlipwayError, TransientError
from stages.parts.base.files import exclusive
from stages.parts.base.log import say
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import ModelStore, Record
from stages.parts.cluster.api import Cluster
from stages.parts.records.drills import Answers
from stages.parts.records.rollout import LOCK, Act, under_way
from stages.parts.releases import release as releases
from stages.rollout.kserve.applied import POLL_S
from stages.rollout.kserve.detect import in_mode, served_modes, target_in
from stages.rollout.kserve.modes import all_modes
from stages.rollout.kserve.settings import KServe
from stages.rollout.kserve.target import KServeTarget
from stages.rollout.observation import responds
from stages.rollout.resume import SCHEDULED_S, another_under_way
from stages.rollout.scene import SteadyLoad, access_to, answers, seconds_until

PROMPT_TOKENS, OUTPUT_TOKENS, CLIENTS, PAUSE_S = 16, 8, 2, 1.0
"""The load: enough requests to notice a gap of a second or two, few enough that servers which share a processor's
cores, where each one that answers keeps others waiting, can start beside it."""
ANSWER_S: Final = 30.0
LOOK_S: Final = 0.2
WAITING_S: Final = 30.0
"""Between two lines that say what is waited for."""


class Moved(Record):
    """The result of a move."""

    release: str
    before: str
    mode: str
    seconds: float
    answers: Answers | None
    """What the load was answered; None if nothing had to be moved."""


def movable_modes() -> list[str]:
    return [mode.name for mode in all_modes() if mode.movable]


def move(cluster: Cluster, store: ModelStore, serving: AskedServing, settings: KServe, mode: str) -> Moved:
    """Serve the release in production in *mode*. A move that was interrupted is completed.

    Raises:
        NothingToServe: the model is not served.
        Conflict: a rollout is under way, or the mode can't be moved to or from.
        ConfigError, NotInstalled: the cluster's KServe can't serve in *mode*.
        TransientError: the release did not answer in the other mode in time; nothing has changed.
        DrillFailed: no request is answered even before, or in the other mode; nothing has changed.
    """
    with exclusive(store.lock(LOCK), f"the rollout of {store.model}", wait=False):
        if journal := under_way(store):
            raise another_under_way(store, journal)
        before, release = _served(cluster, store, mode)
        if before == mode:
            return Moved(release=release, before=before, mode=mode, seconds=0, answers=None)
        old, new = (target_in(cluster, store, serving, in_mode(settings, name)) for name in (before, mode))
        if canary := old.split().canary:
            raise Conflict(f"{canary} is being tried", hint="end that rollout first")
        if old.hostname != new.hostname:
            raise Conflict(f"the endpoint would move from {old.hostname} to {new.hostname}", hint="see docs/rollout.md")
        user, began = new.who(), datetime.now().astimezone()
        access = access_to(store, old.client_url(), settings.gateway_url or "")
        with SteadyLoad(access, CLIENTS, (PROMPT_TOKENS, OUTPUT_TOKENS), PAUSE_S) as load:
            _until_answered(load, "no request is answered, and nothing was changed")
            _bring_up(store, old, new, release)
            _hand_over(load, old, new, release)
        reason = f"served in mode {mode}, no longer {before}"
        new.announce("ModeMoved", f"{release}: {reason}")
        act = Act(by=user, what="began", at=began)
        releases.remember(store, releases.move_at_once(store, "settings", release, release, reason, act))
    took_s = (datetime.now().astimezone() - began).total_seconds()
    return Moved(release=release, before=before, mode=mode, seconds=round(took_s, 1), answers=answers(load.replies()))


def _served(cluster: Cluster, store: ModelStore, mode: str) -> tuple[str, str]:
    """Find the mode to move from, and the release."""
    modes, release = served_modes(cluster).get(store.model, {}), releases.current_release(store)
    if not modes or release is None:
        raise NothingToServe(f"{store.model} is not served here", hint=f"slipway rollout start {store.model}")
    others, movable = [other for other in modes if other != mode], movable_modes()
    if {mode, *others} - {*movable} or len(others) > 1:
        text = f"{store.model} can't be moved from {', '.join(modes)} to {mode}: only between {' and '.join(movable)}"
        raise Conflict(text, hint="see 'Another mode' in docs/rollout.md")
    return (others or [mode])[0], release


def _bring_up(store: ModelStore, old: KServeTarget, new: KServeTarget, release: str) -> None:
    """Wait until the new mode's servers answer; if they don't, remove them."""
    new.check_room(release)
    with _undone(old, new, release):
        say(f"rollout: starting {release} in mode {new.installation.mode} beside mode {old.installation.mode}")
        new.deploy(release)
        began_s = last_line_s = time.monotonic()
        deadline = began_s + SCHEDULED_S + new.serving_of(release).startup_timeout_s
        while why := _lacking(store, new, release):
            if time.monotonic() > deadline:
                raise TransientError(f"{release} did not come up in mode {new.installation.mode}: {why}")
            if time.monotonic() > last_line_s + WAITING_S:
                last_line_s = time.monotonic()
                say(f"rollout: {why} ({last_line_s - began_s:.0f} s of at most {deadline - began_s:.0f} s)")
            time.sleep(POLL_S)


def _lacking(store: ModelStore, new: KServeTarget, release: str) -> str:
    """Why it can't get requests yet; empty if it can."""
    try:
        if not new.ready(release):
            return new.waits_for(release) or "its servers are not ready"
        return "" if responds(store, new, release) else "it did not answer a completion"
    except TransientError as error:
        return str(error)


def _hand_over(load: SteadyLoad, old: KServeTarget, new: KServeTarget, release: str) -> None:
    """Give the new mode the host name, and remove the former objects once requests are answered."""
    with _undone(old, new, release):
        new.promote(release)
        old.leave_host()
        say(f"rollout: mode {new.installation.mode} has the host name")
        _until_answered(load, f"no request is answered in mode {new.installation.mode}")
    say(f"rollout: removing what mode {old.installation.mode} left")
    old.remove_services()
    new.wait_for_propagation(release, 100)


@contextlib.contextmanager
def _undone(old: KServeTarget, new: KServeTarget, release: str) -> Iterator[None]:
    """If the block fails, or is interrupted, go back to how it was."""
    try:
        yield
    except BaseException:
        say(f"rollout: going back to mode {old.installation.mode}")
        try:
            old.promote(release)
            new.leave_host()
            new.remove_services()
        except SlipwayError as error:
            say(f"rollout: could not go back: {error}; slipway rollout move goes on with it")
        raise


def _until_answered(load: SteadyLoad, failure: str) -> None:
    """Wait for a good answer to a request sent from now on."""
    since_s = time.monotonic()

    def answered() -> bool:
        return any(not reply.error for reply in load.replies() if reply.sent_s >= since_s)

    if seconds_until(answered, since_s, ANSWER_S, LOOK_S) is None:
        errors = [reply.error for reply in load.failed()]
        hint = "where the endpoint's name can't be resolved: --set kserve.gateway_url=http://…"
        raise DrillFailed(f"{failure}: {errors[-1] if errors else 'none came back'}", hint=hint)
