"""Which pushes are forwarded, and how: those of allowed models, a limited number per hour, and each commit once, to the
EventSource of Argo Events, which asks for a Bearer token.

Secrets come from the environment or from files, never from a command line.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import httpx
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential

from pipeline.events.push import Push
from stages.parts.base.errors import ClusterRefused, ClusterUnavailable, ConfigError, SlipwayError
from stages.parts.base.files import write_text
from stages.parts.base.log import say

SHORTEST: Final = 16
"""Number of characters. A shorter secret can be guessed."""
HINT: Final = "set {0}_FILE to a file that holds the secret, or {0} to the secret itself"
REMEMBERED: Final = 10_000
"""Number of pushes. The oldest are forgotten first."""
HOUR_S: Final = 3600.0


class Forwarder:
    """Posts pushes to *url*. Failed requests are repeated; none starts later than *patience_s* after the first."""

    def __init__(self, url: str, token: str, patience_s: float) -> None:
        self.url, self.patience_s = url, patience_s
        headers = {"Authorization": f"Bearer {token}"}
        # No proxy and no .netrc from the environment: they would see the token, or replace it.
        self._client = httpx.AsyncClient(headers=headers, timeout=5.0, trust_env=False)

    async def send(self, push: Push) -> None:
        """Return once the push is in the event bus.

        Raises:
            ClusterUnavailable: there was no answer, or a temporary error, until the end.
            ClusterRefused: the EventSource does not accept the token or the address.
        """
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(ClusterUnavailable),
            stop=stop_after_delay(self.patience_s),
            wait=wait_exponential(0.1, max=2.0),
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                try:
                    answer = await self._client.post(self.url, json=push.document())
                except httpx.TransportError as error:
                    raise ClusterUnavailable(f"the EventSource does not answer: {type(error).__name__}") from error
                if answer.status_code == 429 or answer.status_code >= 500:
                    raise ClusterUnavailable(f"the EventSource answers {answer.status_code}")
        if not answer.is_success:
            raise ClusterRefused(f"the EventSource refuses events of this receiver ({answer.status_code})")

    async def close(self) -> None:
        await self._client.aclose()


def secret(variable: str) -> str:
    """Return a secret that must be set. Raises: ConfigError: it is not, or as ``optional_secret``."""
    if (value := optional_secret(variable)) is None:
        raise ConfigError(f"{variable} and {variable}_FILE are not set", hint=HINT.format(variable))
    return value


def optional_secret(variable: str) -> str | None:
    """Return the secret in *variable*, or in the file that *variable*``_FILE`` names, or None if neither is set. A line
    break at the end is left out. Raises: ConfigError: both are set, the file can't be read, or the secret is short or
    not all visible ASCII characters."""
    value, file, hint = os.environ.get(variable), os.environ.get(f"{variable}_FILE"), HINT.format(variable)
    if value and file:
        raise ConfigError(f"{variable} and {variable}_FILE are both set", hint=hint)
    if file:
        try:
            value = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the file of {variable}_FILE: {file}", hint=hint) from error
    elif not value:
        return None
    value = value.removesuffix("\n")
    if len(value) < SHORTEST or not all("!" <= character <= "~" for character in value):
        text = f"the secret of {variable} must be at least {SHORTEST} visible ASCII characters"
        raise ConfigError(text, hint="make one with: openssl rand -hex 32")
    return value


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
