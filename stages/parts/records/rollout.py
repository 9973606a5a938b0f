"""``rollout.json``: the state of a rollout, written at each transition, so that one that was killed can continue;
and a release's counters at one moment, as it stores them, and how far they rose between two moments."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ConfigDict

from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.store import ModelStore, Record

JOURNAL: Final = "rollout.json"
REQUEST: Final = "rollout.request.json"
LOCK: Final = "rollout"
LOCAL: Final = "local"
"""The target that is this machine; see ``stages.rollout.target``."""
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


class Counters(Record):
    """Running totals of one release over all of its replicas, from vLLM's own metrics. All numbers are finite.

    The rollout's own requests are counted like those of clients.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    answered: float
    """Requests that were answered with 2xx."""
    failed: float
    """Requests that ended in 5xx. On one machine also those that never reached a living server; not on a cluster, where
    Kubernetes does not count what a gateway refuses itself, and each gateway counts it in its own way."""
    refused: float = 0.0
    """Requests that ended in 4xx: a mistake of the client, or of a release that refuses what another one accepts."""
    output_tokens: float
    """Tokens of requests that have ended (``vllm:request_generation_tokens_sum``)."""
    ttft_bounds: tuple[float, ...]
    """Finite upper bounds in s of ``vllm:time_to_first_token_seconds``, ascending; JSON can't hold the infinite one."""
    ttft: tuple[float, ...]
    """Cumulative counts, one more than the bounds: the last one is the number of all observations. Empty while the
    server has reported no histogram."""
    tpot_bounds: tuple[float, ...]
    """The same for ``vllm:request_time_per_output_token_seconds``."""
    tpot: tuple[float, ...]
    ttft_s: float = 0.0
    """The sum of what ``ttft`` counts, in seconds; 0 in records of older versions."""
    tpot_s: float = 0.0
    prompt_tokens: float = 0.0
    """Tokens of the prompts of requests that have ended."""
    prompts: float = 0.0
    """How many requests these were."""
    running: float = 0.0
    """Requests that are being computed now."""
    waiting: float = 0.0
    """Requests in the queue now."""
    preempted: float = 0.0
    """How often a request was put back because the KV cache was full."""
    cache_used: float = 0.0
    """The part of the KV cache that is in use now, 0–1, of the server with the fullest."""
    instance: str
    """Changes when a server was restarted and its counters began again at zero."""

    def restarted_since(self, earlier: Counters) -> bool:
        """Return whether the counters began again at zero after *earlier*: a difference would be meaningless."""
        fell = any(getattr(self, name) < getattr(earlier, name) for name in ("answered", "failed", "output_tokens"))
        return self.instance != earlier.instance or fell

    def since(self, earlier: Counters, late_s: float = math.inf) -> Side:
        """Return what was counted after *earlier*; after a restart, what was counted since the restart. A request whose
        first token certainly came later than after *late_s* was delayed."""
        base = ZERO if self.restarted_since(earlier) else earlier
        ttft, tpot = _difference(self.ttft, base.ttft), _difference(self.tpot, base.tpot)
        sums = ("answered", "failed", "refused", "ttft_s", "tpot_s")
        rose: dict[str, Any] = {name: getattr(self, name) - getattr(base, name) for name in sums}
        return Side(
            ttft_count=ttft[-1] if ttft else 0.0,
            tpot_count=tpot[-1] if tpot else 0.0,
            delayed=ttft[-1] - ttft[bisect_left(self.ttft_bounds, late_s)] if ttft else 0.0,
            **rose,
        )


ZERO: Final = Counters(
    answered=0.0, failed=0.0, output_tokens=0.0, ttft_bounds=(), ttft=(), tpot_bounds=(), tpot=(), instance=""
)
"""A server that has counted nothing yet."""


def together(servers: Sequence[Counters]) -> Counters:
    """Sum over servers, of which at least one has reported; one that was restarted makes it another instance."""
    names = ("answered", "failed", "refused", "output_tokens", "ttft_s", "tpot_s", "prompt_tokens", "prompts")
    now = ("running", "waiting", "preempted")
    sums: dict[str, Any] = {name: sum(getattr(server, name) for server in servers) for name in (*names, *now)}
    sums["cache_used"] = max(server.cache_used for server in servers)
    for name in ("ttft", "tpot"):
        # A server without an observation has reported no histogram yet.
        counts = [getattr(server, name) for server in servers if getattr(server, name)]
        sums[name] = tuple(map(sum, zip(*counts, strict=True)))
        sums[f"{name}_bounds"] = next(filter(None, (getattr(server, f"{name}_bounds") for server in servers)), ())
    return Counters(instance=", ".join(server.instance for server in servers), **sums)


def _difference(counts: tuple[float, ...], base: tuple[float, ...]) -> tuple[float, ...]:
    """Subtract bucket by bucket; a server that had reported no histogram before has no buckets in *base*."""
    return tuple(a - b for a, b in zip(counts, base, strict=True)) if base else counts


class CanaryCheck(Record):
    """One comparison of the canary with the stable release."""

    name: str
    verdict: Literal["pass", "fail", "unclear"]
    canary: float | None
    stable: float | None
    limit: float | None
    """What the canary's figure must not exceed (errors, latencies) or fall below (requests, agreement)."""
    unit: str
    text: str


class Analysis(Record):
    """The last look at a step."""

    model_config = ConfigDict(extra="ignore")  # those of earlier versions say more

    percent: int
    verdict: Literal["promote", "rollback", "inconclusive"]
    reason: str
    checks: tuple[CanaryCheck, ...]
    seconds: float
    at: datetime


class Side(Record):
    """What one release did within a slice."""

    answered: float = 0.0
    failed: float = 0.0
    refused: float = 0.0
    """Counted by the server itself: requests of clients and of the rollout."""
    ttft_s: float = 0.0
    ttft_count: float = 0.0
    tpot_s: float = 0.0
    tpot_count: float = 0.0
    """Sums of the latencies that it counted, and how many."""
    delayed: float = 0.0
    """Requests that waited for their first token for longer than is typical of whole answers, by far."""
    sent: int = 0
    """The rollout's own requests, and of these: """
    lost: int = 0
    """that failed or came too late, as the rollout saw it;"""
    late: int = 0
    """that were answered, and far later than is typical."""
    copies: int = 0
    """Clients' requests of which the canary got copies, that ended at both releases, and of these: """
    lost_copies: int = 0
    """that failed at this release, or were not answered by the canary though the stable release did."""
    log_ttft: float = 0.0
    log_tpot: float = 0.0
    """Sums of the logarithms of seconds over the pairs that both releases answered, as the rollout measured them, or
    Envoy did of copies."""


class Slice(Record):
    """Several seconds of a step."""

    seconds: float
    pairs: int = 0
    """Requests that were sent to both releases at the same moment, and that both answered; of copies, those that both
    streamed after as much of the prompt."""
    canary: Side = Side()
    stable: Side = Side()


class Observed(Record):
    """The slices of a step that has ended."""

    percent: int
    slices: tuple[Slice, ...]


class Window(Record):
    """The counters at the beginning of a step, from which its differences are taken, and the slices since."""

    model_config = ConfigDict(extra="ignore")  # journals of earlier versions say more

    canary: Counters
    stable: Counters | None
    slices: tuple[Slice, ...] = ()
    """Those that have ended."""
    open: Slice | None = None
    """The pairs of the slice that has not ended. Its ``seconds`` are those of the step at its beginning."""
    canary_from: Counters | None = None
    stable_from: Counters | None = None
    """The counters at the beginning of the open slice."""

    @property
    def sent(self) -> int:
        """Count the rollout's own requests to the canary."""
        return sum(part.canary.sent for part in (*self.slices, self.open) if part)


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
    reason: str = ""
    """Why, if the person gave a reason."""


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
    """Percentages; empty where nothing is compared. 0: the canary gets copies."""
    state: RolloutState = "deploying"
    step: int = 0
    reason: str = ""
    """Why the release is being, or was, promoted or rolled back."""
    approved: bool = False
    hurried: bool = False
    """A person asked not to wait for time to pass."""
    window: Window | None = None
    windows: int = 0
    """How often a window began with the present share."""
    observed: tuple[Observed, ...] = ()
    """The steps that have ended."""
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
    """Which settings it changes for the release that is served already, if it is that release and any."""

    def changed(self, **changes: Any) -> Journal:
        """Change some fields; their names and values are checked."""
        return self.model_validate(vars(self) | changes)

    @property
    def ready_timeout_s(self) -> float:
        """A number in the settings of every rollout that has begun."""
        timeout_s = self.settings.ready_timeout_s
        return math.inf if timeout_s == "auto" else timeout_s

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def in_workflow(self) -> bool:
        """Whether a cluster's workflow runs it: its readers have no store, which the rollout's commands need."""
        return bool(self.run) and self.target != LOCAL

    @property
    def copied(self) -> int:
        """The share of the clients' requests of which the canary gets copies, or is about to."""
        copying = self.steps[:1] == (0,) and self.percent == 0
        states = ("shifting", "observing", "awaiting approval")
        return self.settings.mirror.percent if self.settings.mirror and copying and self.state in states else 0

    @property
    def share(self) -> str:
        """What the canary gets, in words."""
        return f"copies of {self.copied} %" if self.copied else f"{self.percent} %"

    @property
    def step_s(self) -> float:
        """The shortest time of the present step."""
        return self.settings.mirror.duration_s if self.settings.mirror and self.copied else self.settings.step_s

    @property
    def step_timeout_s(self) -> float:
        """When the present step goes back without evidence."""
        return max(self.settings.step_timeout_s, 2 * self.step_s if self.copied else 0.0)

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


def journal_path(store: ModelStore) -> Path:
    return store.path / JOURNAL


def read_journal(store: ModelStore) -> Journal | None:
    """Read the rollout under way, or the last one; None if there never was one."""
    return Journal.read(journal_path(store))


def pending_request(store: ModelStore, journal: Journal) -> OperatorRequest | None:
    """Read what was asked of this rollout and not yet done."""
    request = OperatorRequest.read_if_intact(store.path / REQUEST)
    return request if request and request.id == journal.id else None


def clear_request(store: ModelStore) -> None:
    (store.path / REQUEST).unlink(missing_ok=True)


def summary(journal: Journal) -> dict[str, Any]:
    """Return the journal for a program: without the raw counters."""
    return journal.model_dump(mode="json", exclude={"window", "observed"})


def under_way(store: ModelStore) -> Journal | None:
    """Read the rollout that has not ended, whether or not a process runs it."""
    journal = read_journal(store)
    return journal if journal and not journal.ended else None
