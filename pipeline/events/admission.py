"""Which pushes are forwarded: those of allowed models, a limited number per hour, and each commit once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from pipeline.events.push import Push
from stages.parts.base.errors import ConfigError, SlipwayError
from stages.parts.base.log import say
from stages.parts.base.store import write_text

REMEMBERED: Final = 10_000
"""Number of pushes. The oldest are forgotten first."""
HOUR_S: Final = 3600.0


class ForwardedPushes:
    """The pushes that were forwarded, one ``org/name@commit`` a line, in a file if *path* is given."""

    def __init__(self, path: Path | None) -> None:
        """Read the file. Raises: ConfigError: it can't be read or written."""
        self.path = path
        try:
            lines = path.read_text(encoding="utf-8").split() if path and path.exists() else []
            self._pushes = deque(lines, maxlen=REMEMBERED)
            self._write()
        except (OSError, SlipwayError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot use {path} as memory: {error}", hint="choose another --memory") from error

    def __contains__(self, push: Push) -> bool:
        return str(push) in self._pushes

    def add(self, push: Push) -> None:
        self._pushes.append(str(push))
        try:
            self._write()
        except (OSError, SlipwayError) as error:  # the push is forwarded already, and remembered until a restart
            say(f"cannot write {self.path}: {error}")

    def _write(self) -> None:
        if self.path:
            write_text(self.path, "".join(f"{push}\n" for push in self._pushes))


@dataclass
class PushAdmission:
    allowed: Sequence[str]
    """Patterns of model names, such as ``org/*``."""
    per_hour: int
    """Pushes of one model that are forwarded within an hour."""
    forwarded: ForwardedPushes
    clock: Callable[[], float] = time.monotonic
    _recent: dict[str, list[float]] = field(default_factory=dict)

    def allows(self, model: str) -> bool:
        return any(fnmatchcase(model, pattern) for pattern in self.allowed)

    def wait_s(self, model: str) -> float:
        """Return how long another push of *model* has to wait; 0 if it may be forwarded now."""
        now = self.clock()
        within = {name: [at for at in times if now - at < HOUR_S] for name, times in self._recent.items()}
        self._recent = {name: times for name, times in within.items() if times}
        recent = self._recent.get(model, [])
        return 0.0 if len(recent) < self.per_hour else HOUR_S - (now - recent[0])

    def record(self, push: Push) -> None:
        self._recent.setdefault(push.model, []).append(self.clock())
        self.forwarded.add(push)
