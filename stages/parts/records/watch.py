"""``watch.json``: what ``slipway watch`` has seen of a model's releases in production, a week of looks at most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from scoring.watch import KEPT, Sample, Signal, Watch
from stages.parts.base.store import ModelStore, Record, exclusive

FILE: Final = "watch.json"
ALARM: Final = "alarm"
"""The output that says of a look whether there is an alarm: 1 or 0."""
SHOWN: Final = 5
"""The most alarms in a report."""


class Look(Record):
    """One look at a release in production."""

    release: str
    agreement: float | None
    """With the recorded answers, 0–1 (``scoring.probes``); None if there are none, or nobody answered."""
    requests: int
    failed: int
    """Of these, the look's own and the clients' since the look before."""
    ttft_ms: float | None
    tpot_ms: float | None
    """Medians of the look's own load; None if none of it was answered."""
    in_flight: float
    """Requests of clients."""
    context: int | None
    """Tokens of the longest request that the server takes."""
    promised: int | None
    """The same of the release; None if its settings leave it to the model."""
    counted: tuple[float, float]
    """What the server had counted by then: requests that were answered, and that failed."""
    instance: str
    """``Counters.instance``."""
    causes: tuple[str, ...] = ()
    """What was seen that may be why."""
    outside: bool = False
    """Whether one of these is not the release's: it would make another release slow too."""
    alarms: tuple[Signal, ...] = ()
    """The signals of which there is an alarm since this look, or was before."""
    learned: bool = False
    """Whether enough looks say what is usual."""
    seconds: float
    at: datetime

    @property
    def text(self) -> str:
        """Say in a line how it was."""
        answered = "no answers were recorded" if self.agreement is None else f"agreement {self.agreement:.4f}"
        times = [f"{name} {value:.1f} ms" for name, value in (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms)) if value]
        text = ", ".join([answered, f"{self.failed} of {self.requests} requests failed", *times])
        if self.context and self.promised and self.context < self.promised:
            text += f", it takes {self.context} tokens, not {self.promised}"
        return text + (f"; {'; '.join(self.causes)}" if self.causes else "")

    @property
    def verdict(self) -> str:
        if self.alarms:
            return f"alarm: {', '.join(self.alarms)}"
        return "sound" if self.learned else "sound, still learning what is usual"

    def sample(self) -> Sample:
        return Sample(
            divergence=None if self.agreement is None else -math.log(max(self.agreement, 1e-9)),
            requests=self.requests,
            failed=self.failed,
            ttft_s=self.ttft_ms and self.ttft_ms / 1000,
            tpot_s=self.tpot_ms and self.tpot_ms / 1000,
            load=self.in_flight,
            context=self.context,
            promised=self.promised,
        )


class Looks(Record):
    """``watch.json``."""

    looks: tuple[Look, ...] = ()

    def of(self, release: str, since: datetime | None = None) -> list[Look]:
        """List the looks at a release, from *since* on."""
        return [look for look in self.looks if look.release == release and (since is None or look.at >= since)]


class Watched(Record):
    """What was seen of a release so far, for its report."""

    count: int
    """Of looks."""
    first_at: datetime
    last: Look
    alarms: tuple[Look, ...]
    """The looks at which the last alarms began."""

    @property
    def text(self) -> str:
        return f"{self.count} looks since {self.first_at:%Y-%m-%d %H:%M}"


def watched(looks: Sequence[Look]) -> Watched | None:
    """Sum up the looks at one release; None without any."""
    if not looks:
        return None
    earlier = (None, *looks)
    pairs = zip(earlier, looks, strict=False)
    began = [look for before, look in pairs if look.alarms and not (before and before.alarms)]
    return Watched(count=len(looks), first_at=looks[0].at, last=looks[-1], alarms=tuple(began[-SHOWN:]))


def seen(store: ModelStore) -> Looks:
    """Read what was seen; a damaged document counts as none."""
    return Looks.read_if_intact(store.path / FILE, "it does not count") or Looks()


def judged(store: ModelStore, look: Look, since: datetime | None) -> Look:
    """Judge a look by those at the same release from *since* on, and keep it."""
    with exclusive(store.lock("watch"), f"what was seen of {store.model}"):
        former = seen(store)
        watch = Watch()
        for each in former.of(look.release, since):
            watch.see(each.sample())
        alarms = watch.see(look.sample())
        look = look.model_copy(update={"alarms": tuple(sorted(alarms)), "learned": watch.learned})
        Looks(looks=(*former.looks, look)[-KEPT:]).write(store.path / FILE)
    return look
