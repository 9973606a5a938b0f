"""Releases: what was published, which release clients get, and how that changes.

    releases/<number>-<variant>-<digest12>/   immutable; variant.json, production_metrics.json and probes.json in it,
                                              adapters/<name>/ of each LoRA adapter that is served with it, and where
                                              it comes from: provenance.json, bom.cdx.json and, if signed, model.sig
    production -> releases/…                  what clients get, or would get; production_metrics.json says why
    candidate  -> releases/…                  what select chose last, until a rollout promotes it or rolls it back;
                                              candidate_metrics.json says why, also afterwards
    rollouts.jsonl                            all moves between releases, in order; lines are only appended
    move.json                                 a move that is made at once, until rollouts.jsonl has it

select makes a release and names it the candidate. If nothing is served and nothing is about to be, it becomes
production at once; otherwise a rollout promotes it, after it has been tried on clients' requests.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from scoring.names import PRODUCTION
from stages.parts.base.errors import DamagedModel, UnknownName
from stages.parts.base.files import (
    Placement,
    content_of,
    exclusive,
    from_json,
    fsync,
    place_tree,
    swap_link,
    write_json,
    write_text,
)
from stages.parts.base.notify import register
from stages.parts.base.program import RUN_VARIABLE
from stages.parts.base.store import ModelStore, Record
from stages.parts.model.adapter import FOLDER
from stages.parts.records.acquired import ACQUIRED, Acquired, read_intact
from stages.parts.records.evaluation import Evaluation, Probe
from stages.parts.records.production import Production
from stages.parts.records.rollout import Act
from stages.parts.records.variant import VARIANT, read_variant
from stages.parts.releases.provenance import write_origin
from stages.parts.releases.signing import sign_if_asked

RELEASE: Final = re.compile(r"^(\d{4,})-(.+)-([0-9a-f]{12})$")
CANDIDATE: Final = "candidate"
CANDIDATE_METRICS: Final = "candidate_metrics.json"
METRICS: Final = "production_metrics.json"
PROBES: Final = "probes.json"
HISTORY: Final = "rollouts.jsonl"
UNFINISHED: Final = "move.json"
MOVING: Final = "move"
"""The lock of moves without a rollout, which a publication and a rollback may make at once."""
Place = Literal["production", "candidate", "unpublished"]
"""What a new release becomes: what clients get, at once or once a rollout has tried it; or neither, because it is not
shown to be better than what is in production."""
MoveKind = Literal["publish", "rollout", "rollback", "settings"]
"""publish: select moved the link while nothing was served. settings: the same release, served with other settings."""


class OneMove(Record):
    """How traffic moved, or did not move, from one release to another."""

    kind: MoveKind
    release: str
    """The release that traffic moved to, or was to move to."""
    before: str | None
    """What was in production."""
    result: Literal["promoted", "rolled back"]
    reason: str
    run: str | None = None
    decision: str = ""
    """The outcome by which the release was chosen, as it was then (``Production.headline``)."""
    started_at: datetime
    acts: tuple[Act, ...] = ()
    """Who began it, approved it or gave it up."""


class Move(OneMove):
    """One line of ``rollouts.jsonl``."""

    id: str
    """The rollout's id; a move is never written twice."""
    ended_at: datetime
    analyses: tuple[dict[str, Any], ...] = ()
    """The last analysis of each step."""


@dataclass(frozen=True)
class Split:
    """The releases that are served, and their shares of new requests."""

    stable: str | None
    """The release that clients get; None while nothing is served."""
    canary: str | None = None
    """The release that is being tried beside the stable one."""
    percent: int = 0
    """The canary's share of new requests, 0–100."""
    standby: str | None = None
    """An earlier stable release that is kept warm, so that a rollback to it takes seconds."""
    room: bool = True
    """Whether a canary fits beside the stable release. If not, nothing can be compared: ``deploy`` replaces the stable
    release, so that the canary gets all requests at once, and ``withdraw`` brings the stable release back."""


def publish(store: ModelStore, decision: Production, place: Place) -> Placement:
    """Make the decision's release, and put it in its *place*. Each step is atomic: a crash leaves the old release in
    production. Raises DamagedModel if the winner's files are not what their manifest says."""
    placement = make(store, decision)
    sign_if_asked(store.releases / decision.release)
    at_once = current_release(store) == decision.release  # the same winner, with newer measurements
    decision.write(store.production_metrics if at_once else store.path / CANDIDATE_METRICS)
    settle(store, decision.release, place)
    return placement


def make(store: ModelStore, decision: Production) -> Placement:
    """Make the release's directory of hard links, complete or not at all. This costs O(number of files)."""
    variant_dir = store.optimized(decision.winner)
    variant = read_variant(variant_dir)
    release = store.releases / decision.release
    if release.exists():
        return "hardlink"
    evaluation = Evaluation.read(store.evaluation(decision.winner))
    adapters = {name: read_intact(store.adapter(name)) for name in decision.adapters}
    if changed := [name for name, record in adapters.items() if record.digest != decision.adapters[name]]:
        raise DamagedModel(f"the adapter {changed[0]} is not what was measured", hint="run again")
    with store.building(release) as work:
        placement = place_tree(variant_dir, work, [file.path for file in variant.files])
        for name, record in adapters.items():
            folder = work / FOLDER / name
            place_tree(store.adapter(name), folder, [file.path for file in record.files])
            record.write(folder / ACQUIRED)
        variant.write(work / VARIANT)
        decision.write(work / METRICS)
        write_json(work / PROBES, [probe.model_dump(mode="json") for probe in evaluation.probes] if evaluation else [])
        base = Acquired.read_if_intact(store.base / ACQUIRED)
        write_origin(work, base if base and base.digest == decision.base_digest else None, variant, adapters, decision)
    return placement


def settle(store: ModelStore, release: str, place: Place) -> None:
    """Put *release* in its place: it is a candidate if a release is being served, or will be next, because clients must
    not get another one without a rollout. If it is in production or unpublished, it stays so, and there is no candidate
    any more."""
    store.clear(store.releases / release)
    if place == "production":
        finish(store)
    if current_release(store) == release or place == "unpublished":
        withdraw_candidate(store)
        return
    swap_link(store.path / CANDIDATE, Path("releases") / release)
    if place != "candidate":
        promote_at_once(store, "publish", release, user(), "published while nothing was served")


def promote_at_once(store: ModelStore, kind: MoveKind, release: str, by: str, reason: str) -> None:
    """Make *release* production, without a rollout, while nothing is served. If this is interrupted, ``finish`` does
    the rest."""
    with exclusive(store.lock(MOVING), f"a move of {store.model}"):
        _finish(store)
        began = Act(by=by, what="began", at=datetime.now().astimezone(), reason=reason)
        move_at_once(store, kind, release, current_release(store), reason, began).write(store.path / UNFINISHED)
        _finish(store)


def finish(store: ModelStore) -> Move | None:
    """Finish a move without a rollout whose process was interrupted, and return it. It is forgotten if other moves were
    made since. The caller knows that nothing is served."""
    with exclusive(store.lock(MOVING), f"a move of {store.model}"):
        return _finish(store)


def _finish(store: ModelStore) -> Move | None:
    path = store.path / UNFINISHED
    if (move := Move.read_if_intact(path)) is None:
        return None
    is_last = all(other.id == move.id or other.started_at < move.started_at for other in history(store))
    if is_last and (store.releases / move.release).is_dir():
        promote(store, move.release)
        remember(store, move)
    path.unlink()
    fsync(store.path)
    return move if is_last else None


def move_at_once(store: ModelStore, kind: MoveKind, release: str, before: str | None, reason: str, began: Act) -> Move:
    """Describe a move that is made without a rollout."""
    return Move(
        id=uuid.uuid4().hex[:12],
        kind=kind,
        release=release,
        before=before,
        result="promoted",
        reason=reason,
        run=os.environ.get(RUN_VARIABLE),
        decision=headline(store, release),
        acts=(began,),
        started_at=began.at,
        ended_at=datetime.now().astimezone(),
    )


def promote(store: ModelStore, release: str) -> None:
    """Make *release* production: first its reasons, then the link. This may be repeated."""
    if (metrics := _reasons(store, release)) is None:
        store.production_metrics.unlink(missing_ok=True)  # the reasons of another release would be wrong
    else:
        write_text(store.production_metrics, metrics)
    swap_link(store.production, Path("releases") / release)
    if candidate(store) == release:
        withdraw_candidate(store)


def withdraw_candidate(store: ModelStore) -> None:
    """Leave no release waiting to be rolled out. The release and its reasons stay."""
    (store.path / CANDIDATE).unlink(missing_ok=True)
    fsync(store.path)


def current_release(store: ModelStore) -> str | None:
    """Name the release that ``production`` points to."""
    return store.production.readlink().name if store.production.is_symlink() else None


def candidate(store: ModelStore) -> str | None:
    """Name the release that waits to be rolled out."""
    link = store.path / CANDIDATE
    return link.readlink().name if link.is_symlink() else None


def decisions(store: ModelStore) -> list[Production]:
    """Read the valid decisions: the candidate's, then production's. A decision is invalid if its link points
    elsewhere."""
    places = [(store.path / CANDIDATE_METRICS, candidate(store)), (store.production_metrics, current_release(store))]
    read = [(Production.read(path), release) for path, release in places if release]
    return [decision for decision, release in read if decision and decision.release == release]


def headline(store: ModelStore, release: str) -> str:
    """Say by which outcome a release was chosen, in a few words; empty if its decision is missing or damaged."""
    with contextlib.suppress(ValidationError):
        return Production.model_validate_json(_reasons(store, release) or "").headline
    return ""


def release_name(store: ModelStore, variant: str, digest: str, alike: Callable[[str], bool] = lambda _: True) -> str:
    """Name the newest release if it already holds this variant (also after a crash while publishing), or the release in
    production if that does; otherwise a new number. Numbers only grow and are never reused, even after a rollback.
    *alike* tells whether a release of this variant is also served in the same way."""
    if variant == PRODUCTION:  # its weights, under another stack
        variant = RELEASE.sub(r"\2", current_release(store) or variant)
    suffix = f"{variant}-{digest[:12]}"
    names = numbered(store)
    newest = max(names, default=0)
    for name in (names.get(newest), current_release(store)):
        if name and name.partition("-")[2] == suffix and alike(name):
            return name
    return f"{newest + 1:04d}-{suffix}"


def numbered(store: ModelStore) -> dict[int, str]:
    """List the names of all releases by number."""
    return {int(match[1]): match[0] for path in store.releases.glob("*") if (match := RELEASE.match(path.name))}


def find(store: ModelStore, text: str) -> str:
    """Find a release by its number (``3``), the beginning of its name, or its name; raise UnknownName if there is no
    such release."""
    names = numbered(store)
    if text.isdigit() and int(text) in names:
        return names[int(text)]
    close = [name for name in names.values() if name == text or name.startswith(f"{text}-")]
    if len(close) != 1:
        raise UnknownName("release", text, names.values())
    return close[0]


def before(store: ModelStore, release: str) -> str | None:
    """Find what was in production before *release*, if it still exists. This follows the move forward to *release*, not
    a move back to it, so that two rollbacks in a row go back two releases."""
    others = {*numbered(store).values()} - {release}
    promoted = [move for move in history(store) if move.release == release and move.result == "promoted"]
    moves = [move for move in promoted if move.kind != "settings"]
    forward = [move for move in moves if move.kind != "rollback"] or moves
    for move in reversed(forward):
        if move.before in others:
            return move.before
    if moves:
        return None
    older = [name for number, name in numbered(store).items() if number < int(release.partition("-")[0])]
    return max(older, default=None)  # published by a version without a history


def probes(store: ModelStore, release: str) -> tuple[Probe, ...]:
    """Read the recorded answers that *release* carries, if any; raise DamagedModel if they are not valid."""
    path = store.releases / release / PROBES
    try:
        return tuple(Probe.model_validate(probe) for probe in from_json(path.read_text()))
    except FileNotFoundError:
        return ()
    except (ValueError, TypeError) as error:
        raise DamagedModel(f"{path} is damaged", hint="run again: another release is made") from error


def _reasons(store: ModelStore, release: str) -> str | None:
    """Read the text of the newest decision for *release*: a record of another version is passed on unchanged."""
    for path in (store.path / CANDIDATE_METRICS, store.releases / release / METRICS):
        with contextlib.suppress(FileNotFoundError, ValueError):
            text = content_of(path).decode()
            if from_json(text).get("release") == release:
                return text
    return None


def user() -> str:
    """Name the user of the operating system."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return f"uid {os.getuid()}"


def history(store: ModelStore) -> list[Move]:
    """Read all moves, the oldest first. A line that a crash truncated is left out."""
    moves = []
    with contextlib.suppress(FileNotFoundError):
        for line in (store.path / HISTORY).read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValidationError):
                moves.append(Move.model_validate_json(line))
    return moves


def remember(store: ModelStore, move: Move) -> None:
    """Append a move durably; a move that is already there is not written again."""
    if any(former.id == move.id for former in history(store)):
        return
    path = store.path / HISTORY
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
        torn = size > 0 and file.read(1) != b"\n"
        file.write((b"\n" if torn else b"") + move.model_dump_json().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    if not size:
        fsync(path.parent)
    if move.result == "promoted":
        register(store.releases / move.release, {"run": move.run or "", "decision": move.decision})
