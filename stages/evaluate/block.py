"""One block: a start of every server that is still of interest, each loaded with the same requests.

As many servers run side by side as there are lanes, or as fit in one, in which they then take turns. What a variant has
to pass is asked at its first start, before any load, and compared with the reference.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import psutil

from scoring.names import PRODUCTION, variant_of
from scoring.units import MIB
from stages.evaluate.drift import probe
from stages.evaluate.load import Pace, TargetsMissed, described
from stages.evaluate.subject import Lane, Session, Subject
from stages.parts.base.errors import TransientError
from stages.parts.base.log import say
from stages.parts.base.serving_settings import Serving
from stages.parts.machine.hardware import cpu_dtype, hardware, processor
from stages.parts.records.evaluation import Speed
from stages.parts.records.variant import Variant
from stages.parts.samples.capacity import mean_capacity_per_s
from stages.parts.samples.evidence import Measured, gates_of
from stages.parts.samples.lines import LoadSamples
from stages.parts.vllm.arguments import CPU_KV_CACHE_MIB
from stages.parts.vllm.sizing import SERVER_BYTES

SLOW: Final = 8
"""A variant that can serve less than this part of the load is not measured at it."""


class Subjects:
    """Those of a session, by name, the reference among them if there is one."""

    def __init__(self, session: Session, subjects: Sequence[Subject], asked: Measured | None = None) -> None:
        """Args: asked: the answers of a reference that is not among the subjects, because it does not fit."""
        self.session, self.by_name = session, {subject.name: subject for subject in subjects}
        self.asked = {session.profile.reference_variant: asked} if asked else {}
        self.reference = self.by_name.get(session.profile.reference_variant)

    def __iter__(self) -> Iterator[Subject]:
        return iter(self.by_name.values())

    @property
    def lost(self) -> bool:
        """Whether the reference could not be measured, so that nothing can be compared with it."""
        return self.reference is not None and self.reference.failure is not None

    @property
    def leading(self) -> Subject:
        """The variant whose capacity fixes the rate for all: the reference, or without one the first that is loaded."""
        if self.reference:
            return self.reference
        loaded = (subject for subject in self if subject.data.samples.rounds)
        return next(loaded, None) or next(subject for subject in self if subject.going)

    def twin(self, subject: Subject, items: Mapping[str, int] = MappingProxyType({})) -> Subject | None:
        """Find another candidate that gives the same answers and was asked already, so many *items* of each task."""
        for other in self:
            counts = {score.task: score.items for score in other.data.quality}
            enough = all(counts.get(task, 0) >= count or task in other.exhausted for task, count in items.items())
            if other is not subject and other.answers_as == subject.answers_as and other.asked and enough:
                return other
        return None

    def refuse(self, subjects: Iterable[Subject]) -> None:
        """End those of the *subjects* that fail a gate, against what is known of the reference."""
        for subject in subjects:
            if subject is self.reference or not subject.going or self.lost:
                continue
            subject.refuse(self.refusal(subject))

    def refuse_slow(self, subjects: Iterable[Subject], pace: Pace) -> None:
        """End those of the *subjects* that at their first start can serve only a small part of the *pace*, that of one
        GPU or machine, or nothing within the targets: the load would take as many times as long."""
        for subject in subjects:
            if variant_of(subject.name) == PRODUCTION or subject.data.samples.rounds:
                continue
            if isinstance(subject.failure, TargetsMissed):
                why, subject.failure = str(subject.failure), None
                subject.refuse(why, lasting=False)
            elif subject.going and (capacity := mean_capacity_per_s(subject.loading.found)):
                rate_per_s = pace.times(subject.session.gpu_share).rate_per_s or 0.0
                if capacity < rate_per_s / SLOW:
                    why = f"it serves only {capacity:.2g} of {rate_per_s:.3g} requests/s within the targets"
                    subject.refuse(why, lasting=False)

    def refusal(self, subject: Subject) -> str:
        """Name the gates that *subject* fails before any load; empty if it fails none, or if more items may show that
        it passes. Until all items were asked, the quality recovery does not count. What is in production is compared
        whatever it would fail."""
        if variant_of(subject.name) == PRODUCTION:
            return ""
        profile, variant = self.session.profile, subject.measured()
        limits = profile.constraints
        if not subject.asked:
            limits = limits.model_copy(update={"quality_recovery": None})
        measured = {"": replace(variant, load=None)}
        if reference := self.reference.measured() if self.reference else next(iter(self.asked.values()), None):
            places = {item.place for item in variant.samples.items}
            items = tuple(item for item in reference.samples.items if item.place in places)
            samples = replace(reference.samples, items=items)
            measured[profile.reference_variant] = replace(reference, samples=samples, load=None)
        gate = gates_of(measured, profile, limits)[""]
        return "; ".join(gate.reasons) if gate.verdict == "fail" else ""

    def together(self, group: Sequence[Subject], act: Callable[[Subject, int], None]) -> None:
        """Call *act* with each of the group and its number, in threads if there are several."""
        if len(group) == 1:
            act(group[0], 0)
            return
        with self.meanwhile(group, act):
            pass

    @contextlib.contextmanager
    def meanwhile(self, group: Sequence[Subject], act: Callable[[Subject, int], None]) -> Iterator[None]:
        """Call *act* with each of the group and its number in threads during the block."""
        with ThreadPoolExecutor(max(1, len(group))) as pool:
            running = [pool.submit(act, subject, number) for number, subject in enumerate(group)]
            try:
                yield
            except BaseException:
                self.session.cancelled.set()
                raise
            self._wait(running)

    def _wait(self, running: Iterable[Future[None]]) -> None:
        """Wait until all have ended. An interruption reaches only this thread, so it ends what the others wait for."""
        try:
            for future in list(running):
                future.result()
        except BaseException:
            self.session.cancelled.set()
            for subject in self:
                subject.stop()
            raise


class Block:
    """The block with this *number*, from 0. ``measure`` is called once. *further* says for some quality tasks how many
    items are asked in all by the end of the block."""

    def __init__(self, subjects: Subjects, lanes: Sequence[Lane], number: int, further: Mapping[str, int]) -> None:
        self._subjects, self._lanes, self._number, self._further = subjects, lanes, number, further
        self._session = subjects.session

    def measure(self, order: Sequence[Subject]) -> bool:
        """Measure the block, and return whether all servers stood at the same time. A variant whose server was lost for
        a reason that may pass is tried once more."""
        variants = [subject.conditions.variant for subject in order]
        # On a GPU no two fit at the same time: vLLM counts on the memory it finds free.
        at_once = 1 if order[0].conditions.hardware.gpus else fitting(variants, self._session.serving)
        groups = math.ceil(len(order) / max(at_once, len(self._lanes)))
        speeds: list[Speed] = []
        for group in _parts(order, math.ceil(len(order) / groups)):
            speeds += self._wave(group)
            if retried := [subject for subject in group if isinstance(subject.failure, TransientError)]:
                for subject in retried:
                    say(f"block {self._number + 1}: {subject.name} is tried once more: {subject.failure}")
                    subject.failure = None
                speeds += self._wave([subject for subject in group if subject.going and subject.blocks <= self._number])
            if self._subjects.lost:
                break
        if speeds:
            speed_after = probe()
            for subject in order:
                if subject.blocks > self._number:
                    subject.data.speeds.append((speeds[0], speed_after))
        return groups == 1

    def _wave(self, group: Sequence[Subject]) -> list[Speed]:
        """Start the servers, which stand side by side, ask what was not asked before, and load those that pass. Return
        the speed of the machine before the load, if there was any."""
        with contextlib.ExitStack() as standing:
            for subject in group:
                standing.callback(subject.stop)
            if all(subject.asked for subject in group):
                self._subjects.together(group, self._stand)
                if self._further:  # the last look wanted more items
                    for part in _parts(group, len(self._lanes)):
                        self._in_a_turn(part, self._ask_further)
                    self._subjects.refuse(group)
            else:
                self._stand_and_ask(group)
            if self._subjects.lost or not any(subject.going for subject in group):
                return []
            speed = probe()
            self._load([subject for subject in group if subject.going])
            return [speed]

    def _stand(self, subject: Subject, number: int) -> None:
        """Start the server of *subject*, if it does not stand, in the lane with this number, or in its share of the
        only lane."""
        if not subject.standing and subject.going:
            with subject.turn():
                subject.start(self._lanes[number % len(self._lanes)])
                say(f"serving {subject.name}: ready in {subject.ready_s[-1]:.0f} s")

    def _stand_and_ask(self, group: Sequence[Subject]) -> None:
        """Start as many servers at a time as there are lanes, or where they share one, cores: most of a start keeps one
        core busy. While they are asked, lane by lane, the next start."""
        width = len(self._lanes)
        parts = _parts(group, width if width > 1 else hardware().cores)
        for part, following in itertools.zip_longest(parts, parts[1:], fillvalue=()):
            self._subjects.together(part, self._stand)
            if self._subjects.lost:
                return
            new = [subject for subject in part if subject.going and not subject.asked]
            with self._subjects.meanwhile(following if new else (), self._stand):
                for few in _parts(new, width):
                    self._ask(few)

    def _ask(self, new: Sequence[Subject]) -> None:
        """Ask for the gates: what takes seconds and a slice of the quality items first, then the rest of the items."""

        def check(subject: Subject) -> None:
            twin = self._subjects.twin(subject)
            subject.check(twin)
            if twin:
                subject.adopt(twin)
            else:
                subject.ask()

        self._in_a_turn(new, check)
        self._subjects.refuse(new)
        self._in_a_turn([subject for subject in new if not subject.asked], Subject.ask)
        self._subjects.refuse(new)

    def _ask_further(self, subject: Subject) -> None:
        if twin := self._subjects.twin(subject, self._further):
            subject.adopt(twin)
        else:
            subject.ask_further(self._further)

    def _in_a_turn(self, group: Sequence[Subject], act: Callable[[Subject], None]) -> None:
        """Call *act* with those of the group that go on, together."""

        def turn(subject: Subject, _: int) -> None:
            with subject.turn():
                act(subject)

        self._subjects.together([subject for subject in group if subject.going], turn)

    def _load(self, group: Sequence[Subject]) -> None:
        """Find how much each can serve, which at first fixes the pace of all, and measure them at it."""
        leading = self._subjects.leading
        self._in_turns(group, lambda subject: subject.search(self._number, leading.data.samples))
        loaded = [subject for subject in group if subject.going]
        if self._subjects.lost or not loaded:
            return
        leading = self._subjects.leading
        leading = leading if leading in loaded else loaded[0]
        pace, share = leading.loading.pace, leading.session.gpu_share
        self._subjects.refuse_slow([subject for subject in group if subject is not leading], pace.times(1 / share))
        loaded = [subject for subject in loaded if subject.going]
        self._in_turns(loaded, lambda subject: subject.measure(pace.times(subject.session.gpu_share / share)))
        for subject in loaded:
            if subject.going:
                say(f"load of {subject.name}: block {self._number + 1}, {described(subject.loading.found)}")
        trace = self._session.trace
        if trace and len(trace.requests) < pace.requests:
            say(f"note: the trace's {len(trace.requests)} requests were repeated: prompts may be cached")

    def _in_turns(self, group: Sequence[Subject], phase: Callable[[Subject], Iterator[LoadSamples]]) -> None:
        """Run the phase of each, run by run in turns, so that what slows the machine for a while slows all of them; at
        the same time in lanes of their own."""
        if len(self._lanes) > 1:
            self._subjects.together(group, lambda subject, _: _take_turns([(subject, phase(subject))]))
        else:
            _take_turns([(subject, phase(subject)) for subject in group])


def _take_turns(phases: Sequence[tuple[Subject, Iterator[LoadSamples]]]) -> None:
    """Do one run of each at a time, in an order that is reversed each time, until all have ended."""
    while phases:
        going = []
        for subject, runs in phases:
            with subject.turn():
                if next(runs, None) is not None:
                    going.append((subject, runs))
        phases = going[::-1]


def _parts(group: Sequence[Subject], size: int) -> list[Sequence[Subject]]:
    return [group[start : start + size] for start in range(0, len(group), size)]


def fitting(variants: Sequence[Variant], serving: Serving) -> int:
    """Count how many servers of any of these variants fit on this machine at the same time, without GPUs: they take the
    files' bytes and the cache that is asked for. On a GPU each would take its whole share."""
    dtype = cpu_dtype(processor()) if serving.dtype == "auto" else serving.dtype
    besides_bytes = (serving.kv_cache_mib or CPU_KV_CACHE_MIB) * MIB + SERVER_BYTES
    # vLLM holds 16-bit weights in the served dtype.
    wide = {16: 2 if dtype == "float32" else 1}
    needed = sorted((each.weights_bytes * wide.get(each.bits, 1) + besides_bytes for each in variants), reverse=True)
    free_bytes = min(psutil.virtual_memory().available, hardware().memory_bytes)
    return sum(total <= free_bytes for total in itertools.accumulate(needed))
