"""``drills.json``: how a model's releases withstood drills, of each drill the last time."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from stages.parts.base.files import exclusive
from stages.parts.base.store import ModelStore, Record

FILE: Final = "drills.json"


class Answers(Record):
    """The outcome of a drill's requests."""

    requests: int
    failed: int
    errors: tuple[str, ...]
    """The first few."""
    refused: int = 0
    """Those that got 429 or 503; they count as failed, too."""
    releases: dict[str, int]
    """How many each release answered."""

    def failures(self) -> list[str]:
        return [f"{self.failed} of {self.requests} requests failed"] if self.failed else []


class Drill(Record):
    """How a release withstood a drill."""

    drill: str = ""
    release: str
    failures: tuple[str, ...]
    """Why it did not hold; empty if it did."""
    answers: Answers
    figures: dict[str, Any]
    """What was measured, by names with units (docs/drills.md)."""
    short: bool = False
    seconds: float = 0.0
    at: datetime | None = None

    @property
    def verdict(self) -> str:
        return "failed" if self.failures else "held"

    @property
    def text(self) -> str:
        """Say in a line why it failed, and what was measured."""
        counts = f"{self.answers.requests} requests, {self.answers.refused} refused, {self.answers.failed} failed"
        shown = [f"{name} {value:g}" for name, value in self.figures.items() if isinstance(value, int | float)]
        return "; ".join([*self.failures, ", ".join([counts, *shown])])


class Drills(Record):
    """``drills.json``."""

    drills: tuple[Drill, ...] = ()


def drilled(store: ModelStore, release: str) -> tuple[Drill, ...]:
    """List the last drills of a release; a damaged document counts as none."""
    document = Drills.read_if_intact(store.path / FILE, "it does not count") or Drills()
    return tuple(result for result in document.drills if result.release == release)


def keep(store: ModelStore, result: Drill) -> None:
    """Put a result in the place of the same drill's former one."""
    with exclusive(store.lock("drills"), f"the drills of {store.model}"):
        document = Drills.read_if_intact(store.path / FILE, "it does not count") or Drills()
        place = (result.drill, result.release)
        others = (other for other in document.drills if (other.drill, other.release) != place)
        Drills(drills=(*others, result)).write(store.path / FILE)
