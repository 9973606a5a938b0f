"""``rollout.json``: the state of a rollout. It is written at each transition, so that a rollout that was killed can
continue."""

from __future__ import annotations

import contextlib
import math
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, Unpack

from pydantic import ValidationError

from stages.parts.base.record import Record
from stages.parts.base.settings import Rollout
from stages.parts.base.store import ModelStore, write_json
from stages.parts.records.counters import Counters

JOURNAL: Final = "rollout.json"
REQUEST: Final = "rollout.request.json"
LOCK: Final = "rollout"
LOCAL: Final = "local"
"""The target that is this machine; see ``stages.rollout.targets``."""
KSERVE: Final = "kserve"
"""The target that is a cluster with KServe."""

RolloutState = Literal[
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
RolloutKind = Literal["rollout", "first", "refresh", "rollback"]
"""first: nothing is served yet. refresh: the release is the stable one already. rollback: to an earlier release."""
ENDED: Final[tuple[RolloutState, ...]] = ("promoted", "rolled back")


class Figures(Record):
    """What a release did within a window. None: there is nothing to compute it from."""

    requests: int
    """Requests with a first token: those whose latency is known."""
    answered: int
    failed: int
    refused: int = 0
    own: int = 0
    """How many of these requests were the rollout's own."""
    ttft_p95_ms: float | None
    tpot_p95_ms: float | None
    tokens_per_s_each: float | None
    """Output tokens per second of each request in flight."""


class CanaryCheck(Record):
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
    checks: tuple[CanaryCheck, ...]
    seconds: float
    at: datetime


class SyntheticRequests(Record):
    """The rollout's own requests to one release within a window."""

    sent: int = 0
    failed: int = 0

    def plus(self, more: SyntheticRequests) -> SyntheticRequests:
        return SyntheticRequests(sent=self.sent + more.sent, failed=self.failed + more.failed)


class Pace(Record):
    """Output tokens per second of each request in flight, look by look."""

    canary_from: Counters
    stable_from: Counters
    """Where the present look began."""
    canary: tuple[float, ...] = ()
    stable: tuple[float | None, ...] = ()
    """None, in records of older versions: no request ended during that look."""


class Window(Record):
    """The counters at the beginning of a step, from which its differences are taken."""

    canary: Counters
    stable: Counters | None
    pace: Pace | None = None
    to_canary: SyntheticRequests = SyntheticRequests()
    to_stable: SyntheticRequests = SyntheticRequests()


class Transition(Record):
    state: RolloutState
    percent: int
    at: datetime


class Act(Record):
    """What a person, or the account of a run, did to a rollout."""

    by: str
    """The OS user, or the user that the cluster knows."""
    what: Literal["began", "approved", "gave up"]
    at: datetime


class JournalChanges(TypedDict, total=False):
    """The fields of ``Journal`` that change while a rollout runs."""

    run: str | None
    kind: RolloutKind
    stable: str | None
    steps: tuple[int, ...]
    state: RolloutState
    step: int
    reason: str
    approved: bool
    hurried: bool
    baseline: Figures | None
    baseline_from: Counters | None
    window: Window | None
    instance: str
    restarts: int
    analyses: tuple[Analysis, ...]
    entered_at: datetime
    transitions: tuple[Transition, ...]
    acts: tuple[Act, ...]


class Journal(Record):
    id: str
    kind: RolloutKind
    release: str
    stable: str | None
    """What is served meanwhile, and stays if the canary is rolled back."""
    before: str | None
    """What was in production when the rollout began."""
    target: str
    run: str | None
    """The pipeline's run that began the rollout, or was the last to continue it."""
    decision: str = ""
    """The outcome by which the release was chosen (``Production.headline``); empty if it is not recorded."""
    settings: Rollout
    """The settings at its beginning: a later call does not change a plan under way."""
    steps: tuple[int, ...]
    """Percentages; empty where nothing is compared."""
    state: RolloutState = "deploying"
    step: int = 0
    reason: str = ""
    """Why the release is being, or was, promoted or rolled back."""
    approved: bool = False
    hurried: bool = False
    """A person asked not to wait for time to pass."""
    baseline: Figures | None = None
    """The stable release alone, while the canary started; what a canary with most of the traffic is compared with, too.
    """
    baseline_from: Counters | None = None
    window: Window | None = None
    instance: str = ""
    """``Counters.instance`` of the canary at the last look."""
    restarts: int = 0
    """Restarts of the canary's servers in the whole rollout."""
    analyses: tuple[Analysis, ...] = ()
    """The last analysis of each step."""
    started_at: datetime
    entered_at: datetime
    """When the present state (and step) began; while a person is waited for, when the present window began."""
    transitions: tuple[Transition, ...] = ()
    acts: tuple[Act, ...] = ()
    """Who began it, approved it or gave it up; the first is who began it."""
    changes: str = ""
    """Which settings it changes for the release that is served already; empty: none, or another release."""

    def changed(self, **changes: Unpack[JournalChanges]) -> Journal:
        return self.model_copy(update=dict(changes))

    @property
    def ready_timeout_s(self) -> float:
        """A number in the settings of every rollout that has begun."""
        asked = self.settings.ready_timeout_s
        return math.inf if asked == "auto" else asked

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


class OperatorRequest(Record):
    """``rollout.request.json``: what a person asks of the process that runs the rollout."""

    id: str
    """The rollout's id; the request is void for any other rollout."""
    action: Literal["promote", "abort"]
    reason: str
    by: str = ""
    """Empty: asked by an older version."""


def journal_path(store: ModelStore) -> Path:
    return store.path / JOURNAL


def read_journal(store: ModelStore) -> Journal | None:
    """The rollout under way, or the last one; None if there never was one.

    Raises:
        DamagedModel: the file is not a journal.
    """
    return Journal.read(journal_path(store))


def submit_request(store: ModelStore, request: OperatorRequest) -> None:
    write_json(store.path / REQUEST, request)


def pending_request(store: ModelStore, journal: Journal) -> OperatorRequest | None:
    """What was asked of this rollout and not yet done."""
    path = store.path / REQUEST
    with contextlib.suppress(FileNotFoundError, ValidationError):
        request = OperatorRequest.model_validate_json(path.read_bytes())
        return request if request.id == journal.id else None
    return None


def clear_request(store: ModelStore) -> None:
    (store.path / REQUEST).unlink(missing_ok=True)


def summary(journal: Journal) -> dict[str, Any]:
    """The journal for a program: without the raw counters."""
    return journal.model_dump(mode="json", exclude={"window", "baseline_from"})


def under_way(store: ModelStore) -> Journal | None:
    """The rollout that has not ended, whether or not a process runs it."""
    journal = read_journal(store)
    return journal if journal and not journal.ended else None
