"""``watch.json``: what ``slipway watch`` has seen of a model's releases in production, a week of looks at most."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from scoring.watch import KEPT, LEARNED, Sample, Signal, Watch
from stages.parts.base.files import exclusive
from stages.parts.base.store import ModelStore, Record

FILE: Final = "watch.json"


class Look(Sample, Record):
    """One look at a release in production."""

    release: str
    at: datetime
    counted: tuple[float, float]
    """What the server had counted at its end: requests that were answered, and that failed."""
    instance: str
    """``Counters.instance``."""
    causes: tuple[str, ...] = ()
    """What was seen that may be why."""
    outside: bool = False
    """Whether one of these is not the release's: it would make another release slow too."""
    alarms: tuple[Signal, ...] = ()
    """The signals of which there is an alarm since this look, or was before."""
    changed: bool = False
    """Whether an alarm began or ended with this look."""
    learned: bool = False
    """Whether enough looks say what is usual."""

    @property
    def text(self) -> str:
        """Say in a line how it was."""
        answered = "no answers were recorded" if self.agreement is None else f"agreement {self.agreement:.4f}"
        times = [f"{name} {value:.1f} ms" for name, value in (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms)) if value]
        parts = [answered, f"{self.failed} of {self.requests} requests failed", *times]
        if self.context and self.promised and self.context < self.promised:
            parts.append(f"it takes {self.context} tokens, not {self.promised}")
        return "; ".join([", ".join(parts), *self.causes])

    @property
    def verdict(self) -> str:
        if self.alarms:
            return f"alarm: {', '.join(self.alarms)}"
        return "no alarm" if self.learned else "no alarm, still learning what is usual"


class Looks(Record):
    """``watch.json``."""

    looks: tuple[Look, ...] = ()

    def of(self, release: str, since: datetime | None = None) -> list[Look]:
        """List the looks at a release, from *since* on."""
        return [look for look in self.looks if look.release == release and (since is None or look.at >= since)]


def seen(store: ModelStore) -> Looks:
    """Read what was seen; a damaged document counts as none."""
    return Looks.read_if_intact(store.path / FILE, "it does not count") or Looks()


def judged(store: ModelStore, look: Look, since: datetime | None) -> Look:
    """Judge a look by those at the same release from *since* on, and keep it."""
    with exclusive(store.lock("watch"), f"what was seen of {store.model}"):
        watch, looks = Watch(), seen(store)
        former = looks.of(look.release, since)
        alarms = [watch.see(each) for each in (*former, look)][-1]
        changed = bool(alarms) != bool(former and former[-1].alarms)
        changes = {"alarms": tuple(sorted(alarms)), "changed": changed, "learned": len(former) >= LEARNED}
        look = look.model_copy(update=changes)
        Looks(looks=(*looks.looks, look)[-KEPT:]).write(store.path / FILE)
    return look


def history(looks: Sequence[Look]) -> tuple[str, ...]:
    """Say when the last five alarms began, and how the last look was, in a line each."""
    began = [look for look in looks[:-1] if look.changed and look.alarms]
    return tuple(f"{look.at:%Y-%m-%d %H:%M} {look.verdict}. {look.text}" for look in (*began[-5:], *looks[-1:]))
