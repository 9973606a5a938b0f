"""What a person asks of a rollout: go on, give up, go back to an earlier release.

Where another process runs the rollout, it is asked by a file and answers within seconds; else it is done here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Final

from stages.parts.base.errors import Busy, ConfigError, Conflict, NothingToServe, RolledBack, TransientError
from stages.parts.base.settings import Rollout
from stages.parts.base.store import ModelStore, exclusive
from stages.parts.records.rollout import LOCAL, LOCK, Journal, Request, ask, read_journal, under_way
from stages.parts.releases import release as releases
from stages.parts.releases.history import remember_at_once
from stages.rollout.machine import Machine, roll_out
from stages.rollout.target import Target

POLL_S: Final = 0.2
ANSWER_TIMEOUT_S: Final = 600.0
"""A look at a canary takes seconds, draining it minutes."""


def promote(store: ModelStore, target: Target) -> Journal:
    """Approve the rollout under way, and go on without waiting: by whoever runs it, or here to its end. What a canary
    has to show stays the same.

    Raises:
        NothingToServe: no rollout is under way.
        RolledBack: the canary turned out to be worse.
    """
    journal = under_way(store)
    if journal is None:
        raise NothingToServe(
            f"no rollout of {store.model} is under way", hint=f"start one: slipway rollout start {store.model}"
        )
    ask(store, Request(id=journal.id, action="promote", reason="approved by a person"))
    ended = _by_its_runner(store, journal, lambda now: now.approved)
    if ended is None:
        ended = roll_out(store, target, journal.release, journal.settings, target_name=journal.target)
    if ended.state == "rolled back":
        raise RolledBack(f"{ended.release} was rolled back: {ended.reason}")
    return ended


def abort(store: ModelStore, target: Target, reason: str = "given up by a person") -> str | None:
    """Give up the rollout under way: all traffic back to the stable release, the canary removed. A canary that the
    platform tries without a rollout of ours is removed too.

    Returns:
        The release that was given up; None if nothing was under way.

    Raises:
        Conflict: it is promoted already, on the platform at least, and stays.
    """
    journal = under_way(store)
    if journal is None:
        stray = target.split().canary
        if stray:
            target.withdraw(stray)
        return stray
    ask(store, Request(id=journal.id, action="abort", reason=reason))
    ended = _by_its_runner(store, journal, lambda now: now.ended)
    if ended is None:
        with exclusive(store.lock(LOCK), f"the rollout of {store.model}"):
            current = under_way(store)
            ended = Machine(store, target, current).give_up(reason) if current else read_journal(store)
    if ended and ended.state == "promoted":
        raise Conflict(
            f"{ended.release} is promoted already, and can't be given up", hint=f"slipway rollback {store.model}"
        )
    return journal.release


def roll_back(
    store: ModelStore, target: Target, settings: Rollout, *, to: str | None = None, target_name: str = LOCAL
) -> tuple[str, bool]:
    """Go back to the release that was in production before, or to any other. No weights are copied.

    Returns:
        The release, and whether it is served (False: nothing is, and the ``production`` link alone was moved).

    Raises:
        NothingToServe: there is no earlier release.
        UnknownName: *to* is no release.
        Conflict: a rollout is under way.
        ConfigError: nothing is served on this platform, but perhaps on the one of the last rollout.
    """
    current, journal = releases.current_release(store), under_way(store)
    if to:
        release: str | None = releases.find(store, to)
    elif journal and journal.kind == "rollback":
        release = journal.release  # one that was cut off
    else:
        release = releases.before(store, current) if current else None
    if not release:
        raise NothingToServe(
            f"{store.model} has no release before {current}"
            if current
            else f"no release of {store.model} is published",
            hint=f"slipway releases {store.model}",
        )
    if journal and (journal.kind != "rollback" or journal.release != release):
        raise Conflict(
            f"the rollout of {journal.release} is under way ({journal.state}, {journal.percent} %)",
            hint=f"give it up first: slipway rollout abort {store.model}",
        )
    if target.split().stable is not None or journal:
        roll_out(store, target, release, settings, rollback=True, target_name=target_name)
        return release, True
    last = read_journal(store)
    if last and last.target != target_name:
        raise ConfigError(
            f"nothing of {store.model} is served on {target_name}; it was rolled out on {last.target}",
            hint=f"slipway rollback {store.model} --platform, and one that serves on {last.target}",
        )
    with exclusive(store.lock(LOCK), f"the rollout of {store.model}", wait=False):
        started = datetime.now().astimezone()
        releases.promote(store, release)
        remember_at_once(store, "rollback", release, current, "rolled back while nothing was served", started)
    return release, False


def _by_its_runner(store: ModelStore, journal: Journal, done: Callable[[Journal], bool]) -> Journal | None:
    """Wait until the process that runs the rollout has done what it was asked; None if there is no such process.

    Raises:
        TransientError: it does not answer.
    """
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with exclusive(store.lock(LOCK), f"the rollout of {store.model}", wait=False):
                now = read_journal(store)
                return now if now and now.id == journal.id and now.ended else None
        except Busy:
            now = read_journal(store)
            if now and now.id == journal.id and done(now):
                return now
            time.sleep(POLL_S)
    raise TransientError(f"the process that runs the rollout of {store.model} does not answer", hint="try again")
