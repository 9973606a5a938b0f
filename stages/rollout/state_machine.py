"""The rollout: a state machine. Its state is in the journal; what is in force is what the platform reports.

    deploying ─ starting ─┬─ shifting ─ observing ─┬─ promoting ─ promoted
                          └────── (a step each) ───┘
    when anything goes wrong: ─ rolling back ─ rolled back

The work of each state may be repeated, so that a rollout that was killed at any point continues from there when it is
started again. Before it rolls back, it asks the platform: a release that the platform has already made the stable one
is promoted, not withdrawn. The process that runs the rollout holds a lock, which ends with the process; other processes
send it requests in a file (see ``commands``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt

from stages.parts.base.errors import Conflict, NothingToServe, RolledBack, ServerFailed, TransientError
from stages.parts.base.files import exclusive, write_json
from stages.parts.base.log import say
from stages.parts.base.notify import notify
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.store import ModelStore
from stages.parts.records import rollout as records
from stages.parts.records.rollout import Act, Journal, Observed, RolloutKind, RolloutState, Transition
from stages.parts.releases import release as releases
from stages.rollout.analysis import check_quality
from stages.rollout.observation import Observer, StepLook, agreement, responds
from stages.rollout.resume import PROMOTE, begin, check_canary, reached, resume
from stages.rollout.target import Target

QUESTION_TRIES: Final = 3
"""A single failed request is not a failed release: the stable one has some, too."""
ALREADY_STABLE: Final = "the platform has already made it the stable release"
CHANGED: Final = "somebody else changed what is served"


def roll_out(
    store: ModelStore,
    target: Target,
    release: str,
    settings: Rollout,
    *,
    rollback: bool = False,
    until: str = PROMOTE,
    approved: bool = False,
) -> Journal:
    """Move traffic to *release*, up to the point *until*; a rollout of it that is under way is continued.

    Args:
        release: a directory's name under ``releases/``.
        rollback: the release was good before: it gets all traffic at once, as soon as it answers.
        until: ``deploy`` (it answers, without traffic), a step's percentage (that step was good), or ``promote``.
        approved: a person has already given the approval that ``settings.approval`` waits for. Without it, a rollout
            beyond that point waits here, and the canary is observed meanwhile.

    Returns:
        The journal, at *until* or ended.

    Raises:
        Busy: another process runs it.
        Conflict: another rollout is under way, or somebody else changed what is served.
        RolledBack: the release was withdrawn, and why; the stable release has all traffic.
        NothingToServe: there is no such release.
        NotEnoughGpus: the release does not fit beside what is served; nothing was changed.
        ServerFailed: the first release, or the stable one with new settings, can't be served.
        TransientError: the platform does not answer; the rollout stays where it was.
    """
    if release not in releases.numbered(store).values():  # this also excludes a path that leads elsewhere
        raise NothingToServe(f"{store.model} has no release {release}", hint=f"slipway releases {store.model}")
    with exclusive(store.lock(records.LOCK), f"the rollout of {store.model}", wait=False):
        former = resume(store, release, target.name)
        journal = former or begin(store, target, release, settings, rollback=rollback)
        write_json(records.journal_path(store), journal)
        machine = StateMachine(store, target, journal)
        if former is None:
            target.announce("Started", f"the {journal.kind} of {release} began, by {journal.acts[0].by}")
        if former and not former.ended:
            machine.reconcile()
        if approved:
            machine.approve(target.who())
        return machine.run(until)


class StateMachine:
    """Runs the rollout of one journal. The caller holds the lock."""

    def __init__(self, store: ModelStore, target: Target, journal: Journal) -> None:
        self.store, self.target, self.journal = store, target, journal
        self._clock = datetime.now(UTC), time.monotonic()

    def run(self, until: str = PROMOTE) -> Journal:
        """Work until the point *until*; raises as ``roll_out``."""
        while True:
            self._handle_request()
            if reached(self.journal, until):
                break
            self.work()
        if self.journal.state == "rolled back":
            raise self._failure()
        return self.journal

    def work(self) -> None:
        """Do the work of the present state once; it leads to another state, or is repeated."""
        work: dict[RolloutState, Callable[[], None]] = {
            "deploying": self._deploy,
            "starting": self._start,
            "shifting": self._shift,
            "observing": self._observe,
            "awaiting approval": self._observe,
            "promoting": self._promote,
            "rolling back": self._roll_back,
        }
        work[self.journal.state]()

    def give_up(self, reason: str, by: str) -> Journal:
        """Roll back now, whatever the state; a release that is already the platform's stable one is promoted."""
        self._note("gave up", by)
        if not self.journal.ended and not (self.journal.state == "promoting" and self._is_stable()):
            self._enter("rolling back", reason=reason)
        while not self.journal.ended:
            (self._promote if self.journal.state == "promoting" else self._roll_back)()
        return self.journal

    def reconcile(self) -> None:
        """Continue after a pause of any length: where the platform has changed meanwhile, go on from its present state;
        raise Conflict if another release is being tried now."""
        if self.journal.entered_at > self._now():  # the clock was set back meanwhile
            self._keep(entered_at=self._now(), window=None)
        journal = self.journal
        if journal.state == "rolling back" or journal.kind == "refresh":
            return
        split = self.target.split()
        if split.stable == journal.release:  # parts of the old stable one may still be there
            if journal.stable is not None:
                self._enter("promoting", reason=journal.reason or ALREADY_STABLE)
            return
        check_canary(self.store, split, journal.release)
        if split.stable is None and journal.stable is not None:
            self._say(f"{journal.stable} is no longer served: continuing as with a first release")
            kind: RolloutKind = "first" if journal.kind == "rollout" else journal.kind
            self._enter("deploying", kind=kind, stable=None, steps=(), step=0, window=None)
        elif split.stable != journal.stable:
            self._enter("rolling back", reason=f"somebody else promoted {split.stable} meanwhile")
        elif split.canary is None and journal.stable is not None:
            self._enter("deploying", step=0, window=None)
        elif journal.state in ("observing", "awaiting approval") and split.percent != journal.percent > 0:
            self._enter("shifting", step=self._present_step())

    def _deploy(self) -> None:
        release, stable = self.journal.release, self.journal.stable
        self._say(f"deploying {release}" + (f" beside {stable}" if stable not in (None, release) else ""))
        if self.journal.decision:
            self._say(f"chosen: {self.journal.decision}")
        try:
            self.target.deploy(release)
        except ServerFailed as error:
            return self._start_rollback(f"it does not start: {error}")
        return self._enter("starting", instance="")

    def _start(self) -> None:
        """Wait until it answers a completion, then ask it the questions that were recorded when it was measured."""
        journal = self.journal
        stable = journal.stable if journal.kind == "rollout" else None
        try:
            if self.target.ready(journal.release) and responds(self.store, self.target, journal.release, stable):
                if wrong := self._wrong_answers():
                    return self._start_rollback(wrong)
                return self._enter_step(0) if journal.steps else self._enter("promoting", reason="it answers")
            why = "it did not answer a completion"
        except ServerFailed as error:
            return self._start_rollback(f"it does not come up: {error}")
        except TransientError as error:
            why = f"the platform did not answer: {error}"
        if self._elapsed_s() > journal.ready_timeout_s:
            waits = self.target.waits_for(journal.release)
            return self._start_rollback(f"{why} within {journal.ready_timeout_s:g} s" + (f": {waits}" if waits else ""))
        return self._pause()

    def _wrong_answers(self) -> str:
        """Why its answers don't allow it any traffic; empty if they do."""
        journal = self.journal
        if journal.kind in ("refresh", "rollback") or not journal.settings.agreement:
            return ""
        tries, failed = stop_after_attempt(QUESTION_TRIES), retry_if_exception_type(ServerFailed)
        ask = Retrying(stop=tries, retry=failed, sleep=lambda _: self._pause(), reraise=True)
        agreed = ask(agreement, self.store, self.target, journal.release)
        if agreed is not None:
            check = check_quality(journal.settings, agreed)
            return "" if check.verdict == "pass" else check.text
        if journal.kind == "first":
            self._say("it carries no recorded answers: its answers were not compared")
            return ""
        return "it carries no recorded answers to compare with (run again, or set rollout.agreement to 0)"

    def _enter_step(self, step: int) -> None:
        journal = self.journal
        ended = journal.window.slices if journal.window else ()
        observed = (*journal.observed, *([Observed(percent=journal.percent, slices=ended)] if ended else []))
        waits = journal.settings.approval and journal.kind == "rollout" and not journal.approved
        state: RolloutState = "awaiting approval" if waits and journal.steps[step] == 100 else "shifting"
        self._enter(state, step=step, observed=observed, window=None)
        if state == "awaiting approval":
            in_argo = "in Argo's user interface, or with argo resume"
            way = in_argo if self.journal.in_workflow else f"slipway rollout promote {self.store.model}"
            self._say(f"to approve: {way}")
            notify(self.store.model, "awaiting approval", f"{journal.release} at {journal.share}; to approve: {way}")

    def _present_step(self) -> int:
        """Find the step whose share the canary has; while a person is waited for, ``step`` is already the next one."""
        return max(self.journal.step - (self.journal.state == "awaiting approval"), 0)

    def _shift(self) -> None:
        release, percent, copied = self.journal.release, self.journal.percent, self.journal.copied
        # On the way back nobody waits for replicas.
        lacks = self.target.prepare(release, percent or copied) if self.journal.kind == "rollout" else ""
        if lacks and self._elapsed_s() > self.journal.ready_timeout_s:
            share = self.journal.share
            return self._start_rollback(f"it did not get the replicas for {share} of the requests: {lacks}")
        if lacks:
            return self._pause()
        self._say(f"{self.journal.share} of requests to {release}")
        try:
            if copied:
                self.target.copy(release, copied)
            else:
                self.target.shift(release, percent)
        except Conflict as error:  # with a share of somebody else, nothing would be compared
            return self._start_rollback(f"{CHANGED}: {error}")
        if self.journal.kind == "rollback":
            return self._enter("promoting", reason="it was good before, and answers")
        return self._enter("observing", window=None, windows=0)

    def _observe(self) -> None:
        """Look once at a step, or at a canary that waits for a person."""
        journal, began = self.journal, self._now()
        try:
            split = self.target.split()
            if split.stable == journal.release:
                return self._enter("promoting", reason=ALREADY_STABLE)
            if split.canary != journal.release:
                return self._start_rollback("somebody else withdrew the canary")
            look = self._observer().look()
        except ServerFailed as error:
            return self._start_rollback(f"its server failed: {error}")
        except Conflict as error:
            return self._start_rollback(f"{CHANGED}: {error}")
        except TransientError as error:
            look = StepLook(f"the platform did not answer: {error}")
        self._keep(**look.changes)
        if look.verdict == "rollback":
            return self._start_rollback(f"at {journal.share}: {look.reason}")
        if journal.state != "awaiting approval":
            self._end_step(look)
        # A window of many good hours would hide that it has been bad for a minute.
        elif self._elapsed_s() >= (journal.step_s if look.verdict == "promote" else journal.step_timeout_s):
            self._keep(window=None, entered_at=self._now())
        return self._pause(began) if self.journal.state == journal.state else None

    def _end_step(self, look: StepLook) -> None:
        """Go to the next step, to the promotion or back, once the evidence is sufficient; else wait."""
        journal = self.journal
        if look.verdict == "promote" and (journal.hurried or self._elapsed_s() >= journal.step_s):
            self._say(f"{journal.share}: {look.reason}")
            if journal.step + 1 < len(journal.steps):
                return self._enter_step(journal.step + 1)
            return self._enter("promoting", reason=look.reason)
        if look.verdict == "inconclusive" and self._elapsed_s() > journal.step_timeout_s:
            return self._start_rollback(f"at {journal.share}, nothing showed that it is as good: {look.reason}")
        return None

    def _promote(self) -> None:
        if self.journal.kind != "refresh":
            self.target.promote(self.journal.release)
        if releases.current_release(self.store) != self.journal.release:
            releases.promote(self.store, self.journal.release)
        self._end("promoted")

    def _roll_back(self) -> None:
        journal = self.journal
        if journal.kind != "refresh":  # a refresh concerns the stable release itself, which stays in any case
            if journal.stable is not None and self._is_stable():
                return self._enter("promoting", reason=ALREADY_STABLE)
            self.target.withdraw(journal.release, first=journal.stable is None)
        if journal.before is not None and releases.candidate(self.store) == journal.release:
            releases.withdraw_candidate(self.store)
        return self._end("rolled back")

    def _is_stable(self) -> bool:
        """Whether the platform has promoted it: clients would then be left with nothing if it were withdrawn."""
        try:
            return self.target.split().stable == self.journal.release
        except TransientError:  # the split is not certain now; a stable release is never withdrawn in any case
            return False

    def _end(self, result: Literal["promoted", "rolled back"]) -> None:
        journal = self.journal
        same = journal.kind == "refresh" and journal.before == journal.release
        if not same or journal.changes:
            alike = ("id", "release", "before", "run", "decision", "acts", "started_at")
            move = releases.Move(
                **{name: getattr(journal, name) for name in alike},
                kind="settings" if same else "rollback" if journal.kind == "rollback" else "rollout",
                result=result,
                reason=f"{journal.reason}; changed: {journal.changes}" if journal.changes else journal.reason,
                ended_at=self._now(),
                analyses=tuple(analysis.model_dump(mode="json") for analysis in journal.analyses),
            )
            releases.remember(self.store, move)
            by = "".join(dict.fromkeys(f"; {act.what} by {act.by}" for act in journal.acts))
            self.target.announce(result.title().replace(" ", ""), f"{journal.release}: {move.reason}{by}")
            # A rollback on purpose ends as promoted: then the earlier release has the traffic.
            if result == "rolled back" or move.kind == "rollback":
                notify(self.store.model, "rolled back", f"{journal.release}: {move.reason}{by}")
        self._enter(result)
        records.clear_request(self.store)

    def _start_rollback(self, reason: str) -> None:
        self._enter("rolling back", reason=reason)

    def _enter(self, state: RolloutState, /, **changes: Any) -> None:
        now = self._now()
        moved = self.journal.changed(**changes).changed(state=state, entered_at=now)
        transition = Transition(state=state, percent=moved.percent, at=now)
        self._write(moved.changed(transitions=(*moved.transitions, transition)))
        self._say(f"{state}: {moved.reason}" if "reason" in changes else state)

    def _keep(self, **changes: Any) -> None:
        if changes:
            self._write(self.journal.changed(**changes))

    def _write(self, journal: Journal) -> None:
        self.journal = journal
        write_json(records.journal_path(self.store), journal)

    def _handle_request(self) -> None:
        """Do what a person asked by ``slipway rollout promote`` or ``abort``, from another process."""
        request = records.pending_request(self.store, self.journal)
        if request is None or self.journal.ended:
            return
        if request.action == "promote":
            self.approve(request.by, hurried=True)
        elif self.journal.state != "promoting":
            self._note("gave up", request.by)
            self._start_rollback(request.reason)
        records.clear_request(self.store)

    def _note(self, what: Literal["approved", "gave up"], by: str) -> None:
        """Keep who did it, once, and tell it."""
        if by and (by, what) not in [(act.by, act.what) for act in self.journal.acts]:
            self._keep(acts=(*self.journal.acts, Act(by=by, what=what, at=self._now())))
            self.target.announce(
                what.title().replace(" ", ""), f"the rollout of {self.journal.release}: {what} by {by}"
            )

    def approve(self, by: str, *, hurried: bool = False) -> None:
        """Continue without waiting for a person or, if *hurried*, for time to pass; the required evidence stays the
        same. A canary that has waited must show it once more, since the wait may have been long."""
        if self.journal.settings.approval or hurried:
            self._note("approved", by)
        self._keep(approved=True, hurried=hurried or self.journal.hurried)
        if self.journal.state == "awaiting approval":
            state: RolloutState = "observing" if self.journal.step else "shifting"
            self._enter(state, step=self._present_step(), window=None)

    def _observer(self) -> Observer:
        return Observer(self.store, self.target, self.journal, self._elapsed_s)

    def _now(self) -> datetime:
        """Tell the time by a clock that nobody sets: otherwise a step would end, or never end, when somebody does."""
        began, at_s = self._clock
        return began + timedelta(seconds=time.monotonic() - at_s)

    def _elapsed_s(self) -> float:
        return (self._now() - self.journal.entered_at).total_seconds()

    def _pause(self, since: datetime | None = None) -> None:
        """Wait until the next look is due, *poll_s* after the last one began."""
        past_s = (self._now() - since).total_seconds() if since else 0.0
        self._sleep(max(0.0, self.journal.settings.poll_s - past_s))

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _say(self, line: str) -> None:
        say(f"rollout: {line}")

    def _failure(self) -> RolledBack | ServerFailed:
        release, reason = self.journal.release, self.journal.reason
        hint = f"slipway rollout status {self.store.model}"
        if self.journal.in_workflow:
            hint = "what was observed is in the run's report, and on the volume in the model's rollouts.jsonl"
        if self.journal.kind in ("first", "refresh"):
            served = "is not served" if self.journal.kind == "first" else "is not served as asked"
            return ServerFailed(f"{release} {served}: {reason}", hint=hint)
        return RolledBack(f"{release} was rolled back: {reason}", hint=hint)
