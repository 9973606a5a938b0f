"""Decides which rollout is to be run: a new one, the one under way, or none because another one is."""

from __future__ import annotations

import os
import uuid
from datetime import UTC, datetime
from typing import Final

from stages.parts.base.errors import ConfigError, Conflict, NothingToServe, check_known
from stages.parts.base.program import RUN_VARIABLE
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.store import ModelStore
from stages.parts.records.rollout import Act, Journal, RolloutKind, read_journal, under_way
from stages.parts.releases import release as releases
from stages.parts.releases.release import Split
from stages.rollout.target import Target

DEPLOY: Final = "deploy"
PROMOTE: Final = "promote"
SCHEDULED_S: Final = 900
"""Until a server starts: a node is found or added, and the image pulled."""


def resume(store: ModelStore, release: str, target_name: str) -> Journal | None:
    """Find the rollout of *release* that is under way, which this run takes over, or that this very run has ended;
    raise Conflict if another release is being rolled out, or this one on another platform."""
    last, run = read_journal(store), os.environ.get(RUN_VARIABLE)
    if last is None:
        return None
    if last.ended:
        return last if last.release == release and bool(run) and last.run == run else None
    if last.release != release:
        raise another_under_way(store, last)
    if last.target != target_name:
        hint = f"add --platform with a platform that serves on {last.target}"
        raise Conflict(f"the rollout of {release} is under way on {last.target}, not {target_name}", hint=hint)
    return last.changed(run=run or last.run)


def begin(
    store: ModelStore, target: Target, release: str, settings: Rollout, *, rollback: bool = False, reason: str = ""
) -> Journal:
    """Plan a new rollout, depending on what the platform serves now; raise Conflict if it is trying another release."""
    split = target.split()
    check_canary(store, split, release)
    kind: RolloutKind = "rollback" if rollback else "rollout"
    if split.stable in (None, release):
        kind = "first" if split.stable is None else "refresh"
    if kind != "refresh":
        target.check_room(release)
    if settings.mirror and kind == "rollout" and (why := target.cannot_copy()):
        raise ConfigError(f"rollout.mirror: {why}", hint="--set rollout.mirror=null")
    planned = ((0,) if settings.mirror else ()) + settings.steps
    steps = {"rollout": planned, "rollback": (100,)}.get(kind, ()) if split.room else ()
    if settings.ready_timeout_s == "auto":
        ready_s = SCHEDULED_S + target.serving_of(release).startup_timeout_s
        settings = settings.model_copy(update={"ready_timeout_s": float(ready_s)})
    now = datetime.now(UTC)
    return Journal(
        id=uuid.uuid4().hex[:12],
        kind=kind,
        release=release,
        stable=split.stable,
        before=releases.current_release(store),
        target=target.name,
        run=os.environ.get(RUN_VARIABLE),
        decision=releases.headline(store, release),
        settings=settings,
        steps=steps,
        acts=(Act(by=target.who(), what="began", at=now, reason=reason),),
        changes=target.changes(release) if kind == "refresh" else "",
        started_at=now,
        entered_at=now,
    )


def another_under_way(store: ModelStore, journal: Journal) -> Conflict:
    """Build the refusal to do what a rollout that is under way would disturb, or be disturbed by."""
    hint = f"let it end, or give it up: slipway rollout abort {store.model}"
    return Conflict(f"the rollout of {journal.release} is under way ({journal.state}, {journal.percent} %)", hint=hint)


def check_canary(store: ModelStore, split: Split, release: str) -> None:
    """Raise Conflict if the platform is trying another release than *release*."""
    if split.canary not in (None, release):
        hint = f"give it up: slipway rollout abort {store.model}"
        raise Conflict(f"{split.canary} is being tried on the platform, not {release}", hint=hint)


def check_point(until: str, settings: Rollout) -> None:
    """Raise UnknownName if *until* is not a point of a rollout with these settings."""
    check_known("step", until, [DEPLOY, *map(str, settings.steps), PROMOTE])


def reached(journal: Journal, until: str) -> bool:
    """Whether the rollout is past the point *until*: ``deploy``, a percentage, or ``promote``. A rollout that is being
    rolled back is past a point only once it has ended."""
    if journal.ended:
        return True
    if journal.state in ("deploying", "starting", "rolling back") or until == PROMOTE:
        return False
    if until == DEPLOY or journal.state == "promoting":
        return True
    return journal.steps[journal.step] > int(until)


def chosen(store: ModelStore) -> str:
    """Choose the release to roll out: the candidate or, without one, the release in production; raise NothingToServe
    without either."""
    journal = under_way(store)
    release = journal.release if journal else None
    if release is None and (last := read_journal(store)) and last.run and last.run == os.environ.get(RUN_VARIABLE):
        release = last.release  # this is a later step of the same run, after the rollout has ended
    release = release or releases.candidate(store) or releases.current_release(store)
    if not release:
        raise NothingToServe(f"no release of {store.model} is published", hint=f"first: slipway run {store.model}")
    return release
