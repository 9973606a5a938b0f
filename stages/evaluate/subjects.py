"""The variants that are measured together: what the others are compared with, and what some do side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from stages.evaluate.session import Session
from stages.evaluate.subject import Subject
from stages.parts.base.log import say
from stages.parts.samples.evidence import Measured, gates_of


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

    def refuse(self, subjects: Iterable[Subject]) -> None:
        """End those of the *subjects* that fail a gate, against what is known of the reference."""
        for subject in subjects:
            if subject is self.reference or not subject.going or self.lost:
                continue
            subject.refused = self.refusal(subject)
            if subject.refused:
                subject.stop()
                say(f"{subject.name} is not loaded: {subject.refused}")

    def refusal(self, subject: Subject) -> str:
        """Name the gates that *subject* fails before any load; empty if it fails none, or if more items may show that
        it passes. Until all items were asked, the quality recovery does not count."""
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
        if len(group) < 2:
            for subject in group:
                act(subject, 0)
            return
        with ThreadPoolExecutor(len(group)) as pool:
            self._wait(pool.submit(act, subject, number) for number, subject in enumerate(group))

    @contextlib.contextmanager
    def ahead(self, group: Sequence[Subject], act: Callable[[Subject, int], None]) -> Iterator[None]:
        """Call *act* with each of the group, one after another, during the block."""
        with ThreadPoolExecutor(1) as pool:
            running: list[Future[None]] = []
            try:
                running += [pool.submit(act, subject, 0) for subject in group]
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
