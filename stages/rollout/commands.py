"""What a person asks of a rollout: approve it, give it up, or go back to an earlier release.

If another process runs the rollout, it is asked through a file and answers within seconds; otherwise the work is done
here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from stages.parts.base.errors import Busy, ConfigError, Conflict, NothingToServe, RolledBack, TransientError
from stages.parts.base.files import exclusive, write_json
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.store import ModelStore
from stages.parts.records.rollout import LOCK, REQUEST, Journal, OperatorRequest, journal_path, read_journal, under_way
from stages.parts.releases import release as releases
from stages.rollout.resume import another_under_way, begin
from stages.rollout.state_machine import StateMachine, roll_out
from stages.rollout.target import Target

POLL_S: Final = 0.2
ANSWER_TIMEOUT_S: Final = 600.0
"""A look at a canary takes seconds, draining it minutes."""


def promote(store: ModelStore, target: Target) -> Journal:
    """Approve the rollout under way and do not wait for time to pass: in the process that runs it, or here to its end.
    The evidence required of the canary stays the same. Raises NothingToServe if no rollout is under way, RolledBack if
    the canary turned out to be worse."""
    if (journal := under_way(store)) is None:
        hint = f"start one: slipway rollout start {store.model}"
        raise NothingToServe(f"no rollout of {store.model} is under way", hint=hint)
    request = OperatorRequest(id=journal.id, action="promote", reason="approved by a person", by=target.who())
    ended = _done_by_runner(store, request, lambda journal: journal.approved)
    if ended is None:
        ended = roll_out(store, target, journal.release, journal.settings)
    if ended.state == "rolled back":
        raise RolledBack(f"{ended.release} was rolled back: {ended.reason}")
    return ended


def publish(store: ModelStore, target: Target, settings: Rollout, release: str, reason: str) -> bool:
    """Put *release* in production for a person's *reason*, whatever a run found of it: by a rollout if the model is
    being served, otherwise at once. Returns whether it is served. Raises the errors of ``roll_out``; Conflict also if a
    rollout is under way."""
    with exclusive(store.lock(LOCK), f"the rollout of {store.model}", wait=False):
        if journal := under_way(store):
            raise another_under_way(store, journal)
        if target.split().stable is None:
            releases.promote_at_once(store, "publish", release, target.who(), reason)
            return False
        write_json(journal_path(store), begin(store, target, release, settings, reason=reason))
    roll_out(store, target, release, settings)
    return True


def abort(store: ModelStore, target: Target, reason: str = "given up by a person") -> str | None:
    """Give up the rollout under way: all traffic goes back to the stable release, and the canary is removed. A canary
    that the platform tries without a rollout is removed, too. Returns the release that was given up; None if nothing
    was under way. Raises Conflict if it is promoted already, at least on the platform, and stays."""
    if (journal := under_way(store)) is None:
        if stray := target.split().canary:
            target.withdraw(stray)
        return stray
    request = OperatorRequest(id=journal.id, action="abort", reason=reason, by=target.who())
    ended = _done_by_runner(store, request, lambda journal: journal.ended)
    if ended is None:
        with exclusive(store.lock(LOCK), f"the rollout of {store.model}"):
            current = under_way(store)
            ended = StateMachine(store, target, current).give_up(reason, request.by) if current else read_journal(store)
    if ended and ended.state == "promoted":
        hint = f"slipway rollback {store.model}"
        raise Conflict(f"{ended.release} is promoted already and can't be given up", hint=hint)
    return journal.release


def roll_back(store: ModelStore, target: Target, settings: Rollout, *, to: str | None = None) -> tuple[str, bool]:
    """Go back to the release that was in production before, or to any other. No weights are copied. Returns the
    release, and whether it is served: where nothing is, only the ``production`` link is moved.

    Raises:
        NothingToServe: there is no earlier release.
        UnknownName: *to* is not a release.
        Conflict: a rollout is under way.
        ConfigError: nothing is served on this platform, but the last rollout was on another one.
    """
    journal = under_way(store)
    if target.split().stable is None and journal is None:
        return _roll_back_unserved(store, target, to), False
    release = _earlier_release(store, journal, to)
    if journal and (journal.kind != "rollback" or journal.release != release):
        raise another_under_way(store, journal)
    roll_out(store, target, release, settings, rollback=True)
    return release, True


def _roll_back_unserved(store: ModelStore, target: Target, to: str | None) -> str:
    """Move only the link, once, also if that was interrupted before: a second move would go back yet another one."""
    last = read_journal(store)
    if last and last.target != target.name:
        raise ConfigError(
            f"nothing of {store.model} is served on {target.name}; it was rolled out on {last.target}",
            hint=f"slipway rollback {store.model} --platform, with a platform that serves on {last.target}",
        )
    with exclusive(store.lock(LOCK), f"the rollout of {store.model}", wait=False):
        move = releases.finish(store)
        if move and move.kind == "rollback" and (to is None or releases.find(store, to) == move.release):
            return move.release
        release = _earlier_release(store, None, to)
        releases.promote_at_once(store, "rollback", release, target.who(), "rolled back while nothing was served")
    return release


def _earlier_release(store: ModelStore, journal: Journal | None, to: str | None) -> str:
    """Choose the release to go back to: *to*, that of a rollback that was interrupted, or the one before."""
    if to:
        return releases.find(store, to)
    if journal and journal.kind == "rollback":
        return journal.release
    current = releases.current_release(store)
    if current and (former := releases.before(store, current)):
        return former
    text = f"{store.model} has no release before {current}" if current else f"no release of {store.model} is published"
    raise NothingToServe(text, hint=f"slipway releases {store.model}")


def _done_by_runner(store: ModelStore, request: OperatorRequest, done: Callable[[Journal], bool]) -> Journal | None:
    """Ask the process that runs the rollout, and wait until it is *done*; None if there is no such process."""
    request.write(store.path / REQUEST)
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with exclusive(store.lock(LOCK), f"the rollout of {store.model}", wait=False):
                present = read_journal(store)
                return present if present and present.id == request.id and present.ended else None
        except Busy:
            present = read_journal(store)
            if present and present.id == request.id and done(present):
                return present
            time.sleep(POLL_S)
    raise TransientError(f"the process that runs the rollout of {store.model} does not answer", hint="try again")
