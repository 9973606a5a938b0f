"""``rollout.json``: where a rollout stands. Written at each transition, so that one that was killed goes on there."""

from __future__ import annotations

import contextlib
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from stages.parts.base.record import Record
from stages.parts.base.settings import Rollout
from stages.parts.base.store import ModelStore, write_json

JOURNAL: Final = "rollout.json"
REQUEST: Final = "rollout.request.json"
LOCK: Final = "rollout"
LOCAL: Final = "local"
"""The target that is this machine; see ``stages.rollout.targets``."""
KSERVE: Final = "kserve"
"""The target that is a cluster with KServe."""

State = Literal[
    "deploying",
    "starting",
    "shifting",
    "observing",
    "awaiting approval",
    "promoting",
    "rolling back",
    "promoted",
    "rolled back",
]
Kind = Literal["rollout", "first", "refresh", "rollback"]
"""first: nothing is served yet. refresh: the release is the stable one already. rollback: to an earlier release."""
ENDED: Final[tuple[State, ...]] = ("promoted", "rolled back")


class Totals(Record):
    """A release's counters at one moment, as in ``target.Counters``; bounds without the infinite one, which JSON
    can't hold."""

    answered: float
    failed: float
    refused: float = 0.0
    output_tokens: float
    in_flight_s: float
    ttft_bounds: tuple[float, ...]
    ttft: tuple[float, ...]
    tpot_bounds: tuple[float, ...]
    tpot: tuple[float, ...]
    instance: str


class Figures(Record):
    """What a release did within a window. None: nothing to compute it from."""

    requests: int
    """With a first token: those whose latency is known."""
    answered: int
    failed: int
    refused: int = 0
    own: int = 0
    """Requests of the rollout's own among these three."""
    ttft_p95_ms: float | None
    tpot_p95_ms: float | None
    tokens_per_s_each: float | None
    """Output tokens per second that each request in flight got."""


class Check(Record):
    """One comparison of the canary with the stable release."""

    name: str
    verdict: Literal["pass", "fail", "unclear"]
    canary: float | None
    stable: float | None
    limit: float | None
    """What the canary's figure must not exceed (errors, latencies) or fall below (speed, agreement)."""
    unit: str
    text: str


class Analysis(Record):
    """The last look at a step."""

    percent: int
    verdict: Literal["promote", "rollback", "inconclusive"]
    reason: str
    canary: Figures
    stable: Figures | None
    checks: tuple[Check, ...]
    seconds: float
    at: datetime


class Synthetic(Record):
    """Requests of the rollout's own within a window, to one release."""

    sent: int = 0
    failed: int = 0


class Pace(Record):
    """Output tokens per second that each request in flight got, look by look."""

    canary_from: Totals
    stable_from: Totals
    """Where the present look began."""
    canary: tuple[float, ...] = ()
    stable: tuple[float | None, ...] = ()
    """None: no request ended there."""


class Window(Record):
    """From where a step's differences are taken."""

    canary: Totals
    stable: Totals | None
    pace: Pace | None = None
    to_canary: Synthetic = Synthetic()
    to_stable: Synthetic = Synthetic()


class Transition(Record):
    state: State
    percent: int
    at: datetime


class Journal(Record):
    id: str
    kind: Kind
    release: str
    stable: str | None
    """What is served meanwhile, and stays if the canary is rolled back."""
    before: str | None
    """What was in production when it began."""
    target: str
    run: str | None
    """The pipeline's run that began it, or went on with it last."""
    settings: Rollout
    """As it began: what a later call says does not change a plan under way."""
    steps: tuple[int, ...]
    """Percents; empty where nothing is compared."""
    state: State = "deploying"
    step: int = 0
    reason: str = ""
    """Why it is being, or was, promoted or rolled back."""
    approved: bool = False
    hurried: bool = False
    """A person asked not to wait for more evidence."""
    baseline: Figures | None = None
    """The stable release alone, while the canary started: what the canary is compared with at 100 %."""
    baseline_from: Totals | None = None
    window: Window | None = None
    instance: str = ""
    """Of the canary's servers, at the last look at their totals."""
    restarts: int = 0
    """Of the canary's servers, in the whole rollout."""
    analyses: tuple[Analysis, ...] = ()
    """The last of each step."""
    started_at: datetime
    entered_at: datetime
    """When it came into its state (its step); while a person is waited for, when the present window began."""
    transitions: tuple[Transition, ...] = ()

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def percent(self) -> int:
        """The canary's share that is in force, or about to be."""
        if self.state in ("promoting", "promoted"):
            return 100
        if self.state in ("shifting", "observing"):
            return self.steps[self.step]
        return self.steps[self.step - 1] if self.state == "awaiting approval" and self.step else 0


class Request(Record):
    """``rollout.request.json``: what a person asks of the process that runs the rollout."""

    id: str
    """Of the rollout; for another one it says nothing."""
    action: Literal["promote", "abort"]
    reason: str


def journal_path(store: ModelStore) -> Path:
    return store.path / JOURNAL


def read_journal(store: ModelStore) -> Journal | None:
    """The rollout under way, or the last one; None if there never was one.

    Raises:
        DamagedModel: the file is none of ours.
    """
    return Journal.read(journal_path(store))


def ask(store: ModelStore, request: Request) -> None:
    write_json(store.path / REQUEST, request)


def asked(store: ModelStore, journal: Journal) -> Request | None:
    """What was asked of this rollout and not yet answered."""
    path = store.path / REQUEST
    with contextlib.suppress(FileNotFoundError, ValidationError):
        request = Request.model_validate_json(path.read_bytes())
        return request if request.id == journal.id else None
    return None


def answered(store: ModelStore) -> None:
    (store.path / REQUEST).unlink(missing_ok=True)


def summary(journal: Journal) -> dict[str, Any]:
    """The journal for a program: without the raw totals."""
    return journal.model_dump(mode="json", exclude={"window", "baseline_from"})


def under_way(store: ModelStore) -> Journal | None:
    """The rollout that has not ended, whether or not a process runs it."""
    journal = read_journal(store)
    return journal if journal and not journal.ended else None
