"""Observes a canary: reads both releases' counters, sends the same requests to both, and judges."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from stages.parts.base.errors import ServerFailed, TransientError
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Slo
from stages.parts.endpoint.endpoint import api_key
from stages.parts.model.adapter import adapters_in
from stages.parts.model.description import chat_template
from stages.parts.records.rollout import Counters, Journal, Slice, Window
from stages.parts.releases import release as releases
from stages.parts.releases.pinned import MeasuredWith
from stages.parts.vllm.arguments import takes_pictures
from stages.parts.vllm.client import Access, answer, answers_chat
from stages.parts.vllm.parsers import parses_calls
from stages.parts.vllm.probes import check_probes
from stages.rollout.analysis import FAILURES, Observation, analyse
from stages.rollout.slices import (
    LONGEST_S,
    SLICES,
    Timing,
    add_copies,
    add_pairs,
    begin_slice,
    end_slice,
    late_s,
    send_pairs,
    slices_of,
)
from stages.rollout.target import Target

BURST: Final = 16
"""The most pairs between two looks."""
TRICKLE: Final = 3
"""The fewest pairs between two looks."""
SUSPECTED: Final = 12
"""The same while requests of the canary fail, or are late, more often than chance explains well."""
SENT_BY: Final = 0.9
"""The part of a step's shortest time by which enough pairs have been sent."""
SENT_WITHIN: Final = 0.5
"""The part of the time between two looks in which the pairs are sent, so that most are answered by its end."""
FEWEST_PROMPT_TOKENS: Final = 16
MOST_PROMPT_TOKENS: Final = 1024


@dataclass(frozen=True)
class StepLook:
    """What one look at the canary showed."""

    reason: str
    verdict: Literal["promote", "rollback", "inconclusive"] = "inconclusive"
    changes: Mapping[str, Any] = field(default_factory=dict)
    """The fields that the journal has to keep of it."""


def responds(store: ModelStore, target: Target, release: str, stable: str | None = None) -> bool:
    """Tell whether *release* and each of its adapters, asked at its own URL, complete a prompt; and it a chat, if its
    own tokenizer or that of the *stable* release has a chat template, with a tool to call if its server parses that,
    and a picture if it takes one.
    Raises ServerFailed if it refuses chats."""
    url = target.url(release)
    try:
        for name in (store.model, *adapters_in(store.releases / release)):
            answer(url, name, api_key())
    except ServerFailed:
        return False
    chats = any(chat_template(store.releases / name) for name in (release, stable) if name)
    serving, directory = target.serving_of(release), store.releases / release
    tools, picture = parses_calls(serving, directory), takes_pictures(serving, directory)
    return not chats or answers_chat(url, store.model, api_key(), tools=tools, picture=picture)


def agreement(store: ModelStore, target: Target, release: str) -> float | None:
    """Compare its answers with the recorded ones that it carries: 0–1, or None if it carries none. Raises ServerFailed
    if its reply is not a valid answer."""
    if not (recorded := releases.probes(store, release)):
        return None
    agreed = check_probes(Access(target.url(release), store.model, api_key()), recorded)
    return agreed if math.isfinite(agreed) else 0.0


@dataclass
class Observer:
    """Observes the present step of a rollout."""

    store: ModelStore
    target: Target
    journal: Journal
    elapsed_s: Callable[[], float]
    """Tells for how long the step has been observed."""

    def look(self) -> StepLook:
        """Judge what the step has shown so far. The pairs of a look are sent evenly over a part of the time until the
        next one. Raises as the target does."""
        journal, settings, elapsed_s = self.journal, self.journal.settings, self.elapsed_s()
        canary, stable = self.target.counters(journal.release), self._counters_of_stable()
        alone = journal.percent == 100  # with all the clients' requests
        # Read now, those of the time in which it could not be observed are left out where the observation begins anew.
        copied = self.target.copies(journal.release) if journal.copied else ()
        if stable is None and not alone:
            return StepLook("the counters of the stable release can't be read")
        window, begun = journal.window, begin_slice(Window(canary=canary, stable=stable), canary, stable, elapsed_s)
        changes = {"window": begun, "windows": journal.windows + 1, "instance": canary.instance}
        between_steps = journal.instance not in ("", canary.instance)
        if between_steps or (window and canary.restarted_since(window.canary)):
            if journal.restarts >= settings.restarts:
                return StepLook(f"its server was restarted {journal.restarts + 1} times", "rollback")
            changes |= {"restarts": journal.restarts + 1}
            return StepLook("a server of the canary was restarted", changes=changes)
        # Once the canary is alone, nothing of the stable release is compared with what it counted before.
        compared = stable if stable and not alone else None
        if window is None or (compared and (window.stable is None or compared.restarted_since(window.stable))):
            return StepLook("the step has just begun", changes=changes)
        if settings.synthetic:
            window = self._with_pairs(window, prompt_tokens(canary, stable), elapsed_s)
            elapsed_s = self.elapsed_s()
            canary, stable = self.target.counters(journal.release), self._counters_of_stable() or stable
        if copied:
            window = window.model_copy(update={"open": add_copies(window.open or Slice(seconds=elapsed_s), copied)})
        slice_s = 0.0 if journal.hurried else min(LONGEST_S, settings.step_s / SLICES)
        if window.open and elapsed_s - window.open.seconds >= slice_s:
            window = end_slice(window, canary, stable, elapsed_s, late_s(slices_of(self.journal, window)))
        return self._judge(window, canary, stable, elapsed_s)

    def _counters_of_stable(self) -> Counters | None:
        """Read them, if the platform can now: that it can't is not the canary's fault."""
        with contextlib.suppress(ServerFailed, TransientError):
            return self.target.counters(self.journal.stable) if self.journal.stable else None
        return None

    def _judge(self, window: Window, canary: Counters, stable: Counters | None, elapsed_s: float) -> StepLook:
        """Judge the step. The recorded questions are asked only once everything else is good."""
        journal, settings = self.journal, self.journal.settings
        observation = Observation(journal, window, canary, stable, elapsed_s, self.slo())
        analysis = analyse(observation)
        complete = journal.hurried or elapsed_s >= journal.step_s
        if analysis.verdict == "promote" and complete and settings.agreement:
            try:
                agreed = agreement(self.store, self.target, journal.release)
            except ServerFailed as error:  # one refusal is an error like any other, and errors were counted above
                return StepLook(f"it did not answer the recorded questions: {error}", changes={"window": window})
            analysis = analyse(replace(observation, agreement=agreed))
        former = tuple(earlier for earlier in journal.analyses if earlier.percent != analysis.percent)
        return StepLook(analysis.reason, analysis.verdict, {"window": window, "analyses": (*former, analysis)})

    def slo(self) -> Slo | None:
        """Read the targets of the workload that the canary was measured with, if it has any that are known."""
        # A file that can't be read is no reason to stop in the middle.
        measured = MeasuredWith.read_if_intact(self.store.releases / self.journal.release / releases.METRICS)
        return measured.slo if measured else None

    def _with_pairs(self, window: Window, tokens: int, elapsed_s: float) -> Window:
        """Send the pairs that are due. While the stable release can't be reached, the canary is asked alone."""
        urls = [self.target.url(self.journal.release)]
        if self.journal.stable:
            with contextlib.suppress(ServerFailed, TransientError):
                urls.append(self.target.url(self.journal.stable))
        sent = window.sent
        step = f"{self.journal.id} {self.journal.percent} {self.journal.windows}"
        names = [f"{step} {number}" for number in range(sent, sent + self._due(window, elapsed_s))]
        pairs = self.send(urls, names, tokens)
        late = late_s(slices_of(self.journal, window), pairs)
        return window.model_copy(update={"open": add_pairs(window.open or Slice(seconds=elapsed_s), pairs, late)})

    def send(self, urls: Sequence[str], names: Sequence[str], tokens: int) -> list[tuple[Timing, ...]]:
        settings = self.journal.settings
        accesses = [Access(url, self.store.model, api_key()) for url in urls]
        return send_pairs(accesses, names, tokens, SENT_WITHIN * settings.poll_s, settings.own_timeout_s)

    def _due(self, window: Window, elapsed_s: float) -> int:
        """Count the pairs until the next look: enough by the end of the step, and then a trickle."""
        journal, settings = self.journal, self.journal.settings
        last = next((analysis for analysis in journal.analyses if analysis.percent == journal.percent), None)
        if last and any(check.name in FAILURES and check.verdict == "unclear" for check in last.checks):
            return SUSPECTED
        by_s = SENT_BY * journal.step_s
        part = 1.0 if journal.hurried or not by_s else min(1.0, (elapsed_s + settings.poll_s) / by_s)
        missing = math.ceil(settings.min_requests * part) - window.sent
        return min(BURST, max(missing, TRICKLE))


def prompt_tokens(*counters: Counters | None) -> int:
    """Choose the length of the prompts to send: as long as those of all requests so far are on average."""
    read = [counts for counts in counters if counts]
    tokens, prompts = sum(counts.prompt_tokens for counts in read), sum(counts.prompts for counts in read)
    return min(MOST_PROMPT_TOKENS, max(FEWEST_PROMPT_TOKENS, round(tokens / prompts if prompts else 0)))
