"""Observes a canary: reads both releases' counters, sends requests of the rollout's own where clients send too few, and
judges."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Literal

from stages.parts.base.errors import ServerFailed, TransientError
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.record import api_key
from stages.parts.engine.client import answer, answers_chat, has_chat_template
from stages.parts.engine.probes import check_probes
from stages.parts.records.counters import Counters
from stages.parts.records.rollout import Figures, Journal, JournalChanges, Window, pending_request
from stages.parts.releases import release as releases
from stages.rollout.analysis import Observation, analyse, check_own_requests, extend_pace, figures
from stages.rollout.synthetic_requests import send_alike
from stages.rollout.target import Target

BURST: Final = 16
"""The most requests of the rollout's own to each release between two looks."""
TOGETHER: Final = 4
"""How many of them each release gets at a time."""
OWN_AT_MOST: Final = 4
"""The most requests of the rollout's own within a step, in multiples of ``min_requests``."""


@dataclass(frozen=True)
class Look:
    """What one look at the canary showed."""

    reason: str
    verdict: Literal["promote", "rollback", "inconclusive"] = "inconclusive"
    changes: JournalChanges = field(default_factory=JournalChanges)
    """What the journal has to keep of it."""


def responds(store: ModelStore, target: Target, release: str, stable: str | None = None) -> bool:
    """Whether *release*, asked at its own URL, completes a prompt; and a chat, if its own tokenizer or that of the
    *stable* release has a chat template.

    Raises:
        ServerFailed: it refuses chats.
    """
    url = target.url(release)
    try:
        answer(url, store.model, api_key())
    except ServerFailed:
        return False
    chats = any(has_chat_template(store.releases / each) for each in (release, stable) if each)
    return not chats or answers_chat(url, store.model, api_key())


def agreement(store: ModelStore, target: Target, release: str) -> float | None:
    """How far its answers agree with the recorded ones that it carries, 0–1; None if it carries none.

    Raises:
        ServerFailed: it refuses, or its reply is not a valid answer.
        TransientError: it does not answer at the moment.
    """
    recorded = releases.probes(store, release)
    if not recorded:
        return None
    found = check_probes(target.url(release), store.model, api_key(), recorded).agreement
    return found if math.isfinite(found) else 0.0


class Observer:
    """Observes the present step of a rollout."""

    def __init__(self, store: ModelStore, target: Target, journal: Journal) -> None:
        self.store, self.target, self.journal = store, target, journal

    def look(self, elapsed_s: float) -> Look:
        """What the step has shown so far.

        Raises:
            ServerFailed: the canary's server is gone.
            TransientError: the platform does not answer.
        """
        journal, settings = self.journal, self.journal.settings
        canary, stable = self._counters()
        if stable is None and not self.alone:
            return Look("the counters of the stable release can't be read")
        window = journal.window
        begun: JournalChanges = {"window": Window(canary=canary, stable=stable), "instance": canary.instance}
        another = journal.instance not in ("", canary.instance)  # it may have restarted between two steps
        if another or (window and canary.restarted_since(window.canary)):
            if journal.restarts >= settings.restarts:
                return Look(f"its server was restarted {journal.restarts + 1} times", "rollback")
            begun["restarts"] = journal.restarts + 1
            return Look("a server of the canary was restarted", changes=begun)
        if window is None or (stable and (window.stable is None or stable.restarted_since(window.stable))):
            return Look("the step has just begun", changes=begun)
        if settings.synthetic:
            window = self._with_own_requests(window, canary, stable, elapsed_s)
            canary, now = self._counters()
            stable = now or stable
        if stable:
            window = window.model_copy(update={"pace": extend_pace(window, canary, stable)})
        return self._judge(window, canary, stable, elapsed_s)

    @property
    def alone(self) -> bool:
        """Whether the canary has all the traffic, so that nothing is there to compare it with."""
        return self.journal.percent == 100

    def _counters(self) -> tuple[Counters, Counters | None]:
        """The canary's, and those of the stable release while it serves."""
        return self.target.counters(self.journal.release), None if self.alone else self.counters_of_stable()

    def counters_of_stable(self) -> Counters | None:
        """None while the platform can't read them, which is not the canary's fault."""
        if self.journal.stable is None:
            return None
        try:
            return self.target.counters(self.journal.stable)
        except (ServerFailed, TransientError):
            return None

    def baseline(self) -> Figures | None:
        """What the stable release did alone while the canary started; None if it was restarted meanwhile."""
        then, now = self.journal.baseline_from, self.counters_of_stable()
        return figures(now.since(then)) if then and now and not now.restarted_since(then) else None

    def _judge(self, window: Window, canary: Counters, stable: Counters | None, elapsed_s: float) -> Look:
        """The recorded questions are asked only once everything else is good."""
        settings = self.journal.settings
        analysis = analyse(settings, self._observation(window, canary, stable, elapsed_s))
        complete = self.journal.hurried or elapsed_s >= settings.step_s
        if analysis.verdict == "promote" and complete and settings.agreement:
            try:
                agreed = agreement(self.store, self.target, self.journal.release)
            except ServerFailed as error:  # one refusal is an error like any other, and errors were counted above
                return Look(f"it did not answer the recorded questions: {error}", changes={"window": window})
            analysis = analyse(settings, self._observation(window, canary, stable, elapsed_s, agreed))
        kept = tuple(each for each in self.journal.analyses if each.percent != analysis.percent)
        return Look(analysis.reason, analysis.verdict, {"window": window, "analyses": (*kept, analysis)})

    def _observation(
        self, window: Window, canary: Counters, stable: Counters | None, elapsed_s: float, agreed: float | None = None
    ) -> Observation:
        return Observation(
            percent=self.journal.percent,
            window=window,
            canary=canary,
            stable=stable,
            earlier=self._earlier(),
            agreement=agreed,
            seconds=elapsed_s,
            at=datetime.now(UTC),
        )

    def _earlier(self) -> list[Figures]:
        """See ``Observation.earlier``."""
        percent = self.journal.percent
        rest = 100 - percent
        shares = [(each.percent, each.stable) for each in reversed(self.journal.analyses) if each.percent < percent]
        if self.alone:
            return [stable for _, stable in shares if stable]
        if percent <= rest:
            return []
        return [
            each for each in (*(stable for share, stable in shares if share <= rest), self.journal.baseline) if each
        ]

    def _with_own_requests(self, window: Window, canary: Counters, stable: Counters | None, elapsed_s: float) -> Window:
        """Send all that serve as many requests as the one with fewer still lacks at this point of the step."""
        journal, settings = self.journal, self.journal.settings
        count = self._lacking(window, canary, stable, elapsed_s)
        if count <= 0 or journal.stable is None:
            return window
        urls = [self.target.url(each) for each in (journal.release, journal.stable)[: 1 if self.alone else 2]]
        sent, last = window.to_canary.sent, window.to_canary.sent + count
        while sent < last:
            numbers = range(sent, min(last, sent + TOGETHER))
            replies = send_alike(urls, self.store.model, api_key(), numbers, settings.own_timeout_s)
            told = (each.plus(more) for each, more in zip((window.to_canary, window.to_stable), replies, strict=False))
            window = window.model_copy(update=dict(zip(("to_canary", "to_stable"), told, strict=False)))
            sent += len(numbers)
            failing = check_own_requests(settings, window.to_canary, window.to_stable).verdict == "fail"
            if failing or pending_request(self.store, journal):
                break  # a canary that hangs would take a timeout for each of the rest
        return window

    def _lacking(self, window: Window, canary: Counters, stable: Counters | None, elapsed_s: float) -> int:
        journal, settings = self.journal, self.journal.settings
        part = 1.0 if journal.hurried or not settings.step_s else min(1.0, elapsed_s / settings.step_s)
        had = [figures(canary.since(window.canary)).requests]
        if stable:
            had.append(figures(stable.since(window.stable or stable)).requests)
        lacking = math.ceil(settings.min_requests * part) - min(had)
        seen = next((each for each in journal.analyses if each.percent == journal.percent), None)
        if lacking <= 0 and part == 1.0 and seen and seen.verdict == "inconclusive":
            lacking = BURST  # there are enough of them, but they do not show a clear result
        # A request that fails has no first token and is not counted: without a limit they would be sent for ever.
        return min(BURST, lacking, OWN_AT_MOST * settings.min_requests - window.to_canary.sent)
