"""One look at a canary: ask the platform, add requests of our own where clients send too few, and judge."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

from stages.parts.base.errors import ServerFailed, TransientError
from stages.parts.base.settings import Rollout
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.record import api_key
from stages.parts.engine.client import answer, answers_chat, has_chat_template
from stages.parts.engine.probes import check_probes
from stages.parts.records.rollout import Analysis, Figures, Journal, Totals, Window, asked
from stages.parts.releases import release as releases
from stages.rollout import traffic
from stages.rollout.analysis import analyse, figures, own_requests, paced, quality, restarted, totals
from stages.rollout.target import Target

BURST: Final = 16
"""Own requests to each release between two looks."""
TOGETHER: Final = 4
"""Of them, at each release at a time."""
OWN_AT_MOST: Final = 4
"""Times ``min_requests``, within a step."""


@dataclass(frozen=True)
class Look:
    reason: str
    verdict: Literal["promote", "rollback", "inconclusive"] = "inconclusive"
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the journal."""


@dataclass(frozen=True)
class Agreement:
    """With the recorded answers; 0–1."""

    value: float

    def passed(self, settings: Rollout) -> bool:
        return quality(settings, self.value).verdict == "pass"

    def text(self, settings: Rollout) -> str:
        return quality(settings, self.value).text


def answers(store: ModelStore, target: Target, release: str, stable: str | None = None) -> bool:
    """Whether *release*, asked by its own URL, completes a prompt; and a chat, where its own tokenizer or the *stable*
    release's has a template for one.

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


def agreement(store: ModelStore, target: Target, release: str) -> Agreement | None:
    """How alike its answers are to those that it carries; None if it carries none.

    Raises:
        ServerFailed: it refuses, or answers with something that is no answer.
        TransientError: it does not answer at the moment.
    """
    recorded = releases.probes(store, release)
    if not recorded:
        return None
    found = check_probes(target.url(release), store.model, api_key(), recorded).agreement
    return Agreement(found if math.isfinite(found) else 0.0)


class Observer:
    """Of one step."""

    def __init__(self, store: ModelStore, target: Target, journal: Journal) -> None:
        self.store, self.target, self.journal = store, target, journal

    def look(self, elapsed_s: float) -> Look:
        """What this step has shown so far.

        Raises:
            ServerFailed: the canary's server is gone.
            TransientError: the platform does not answer.
        """
        journal, settings = self.journal, self.journal.settings
        canary, stable = totals(self.target.counters(journal.release)), self.totals_of_stable()
        if stable is None:
            return Look("the stable release tells nothing of itself")
        window = journal.window
        begun = {"window": Window(canary=canary, stable=stable), "instance": canary.instance}
        another = journal.instance not in ("", canary.instance)  # since an earlier step, too
        if another or (window and restarted(canary, window.canary)):
            if journal.restarts >= settings.restarts:
                return Look(f"its server was started anew {journal.restarts + 1} times", "rollback")
            begun["restarts"] = journal.restarts + 1
            return Look("a server of the canary was started anew", changes=begun)
        if window is None or window.stable is None or restarted(stable, window.stable):
            return Look("the step has just begun", changes=begun)
        if settings.synthetic:
            window = self._supplied(window, canary, stable, elapsed_s)
            canary, stable = totals(self.target.counters(journal.release)), self.totals_of_stable() or stable
        pace = paced(window, canary, stable, alone=journal.percent == 100)
        window = window.model_copy(update={"pace": pace})
        analysis = self._analysis(window, canary, stable, elapsed_s)
        complete = journal.hurried or elapsed_s >= settings.step_s
        if analysis.verdict == "promote" and complete and settings.agreement:
            try:
                agreed = agreement(self.store, self.target, journal.release)
            except ServerFailed as error:  # one refusal is an error as others are, and those were counted above
                return Look(f"it did not answer the recorded questions: {error}", changes={"window": window})
            analysis = self._analysis(window, canary, stable, elapsed_s, agreed.value if agreed else None)
        kept = tuple(each for each in journal.analyses if each.percent != analysis.percent)
        return Look(analysis.reason, analysis.verdict, {"window": window, "analyses": (*kept, analysis)})

    def totals_of_stable(self) -> Totals | None:
        """None while the platform can't tell: that is no fault of the canary's."""
        if self.journal.stable is None:
            return None
        try:
            return totals(self.target.counters(self.journal.stable))
        except (ServerFailed, TransientError):
            return None

    def baseline(self) -> Figures | None:
        """What the stable release did by itself while the canary started; None if it was started anew meanwhile."""
        then, now = self.journal.baseline_from, self.totals_of_stable()
        return figures(now, then) if then and now and not restarted(now, then) else None

    def _analysis(
        self, window: Window, canary: Totals, stable: Totals, elapsed_s: float, agreed: float | None = None
    ) -> Analysis:
        journal = self.journal
        last = next((each for each in reversed(journal.analyses) if each.percent < journal.percent), None)
        return analyse(
            journal.settings,
            journal.percent,
            window,
            canary,
            stable,
            earlier=[each for each in (journal.baseline, last and last.stable) if each],
            agreement=agreed,
            seconds=elapsed_s,
            at=datetime.now(UTC),
        )

    def _supplied(self, window: Window, canary: Totals, stable: Totals, elapsed_s: float) -> Window:
        """As many own requests as the slower half of the traffic lacks by now, the same number to both."""
        journal, settings = self.journal, self.journal.settings
        part = 1.0 if journal.hurried or not settings.step_s else min(1.0, elapsed_s / settings.step_s)
        had = min(figures(canary, window.canary).requests, figures(stable, window.stable or stable).requests)
        lacking = math.ceil(settings.min_requests * part) - had
        seen = next((each for each in journal.analyses if each.percent == journal.percent), None)
        if lacking <= 0 and part == 1.0 and seen and seen.verdict == "inconclusive":
            lacking = BURST  # enough by number, but not to tell
        # One that fails has no first tokens: it would be asked for ever.
        count = min(BURST, lacking, OWN_AT_MOST * settings.min_requests - window.to_canary.sent)
        if count <= 0 or journal.stable is None:
            return window
        urls = (self.target.url(journal.release), self.target.url(journal.stable))
        sent, last = window.to_canary.sent, window.to_canary.sent + count
        while sent < last:
            some = range(sent, min(last, sent + TOGETHER))
            replies = traffic.send(urls, self.store.model, api_key(), some, settings.own_timeout_s)
            to_canary, to_stable = map(traffic.more, (window.to_canary, window.to_stable), replies)
            window = window.model_copy(update={"to_canary": to_canary, "to_stable": to_stable})
            sent += len(some)
            if own_requests(settings, to_canary, to_stable).verdict == "fail" or asked(self.store, journal):
                break  # a canary that hangs would take a timeout for each of the rest
        return window
