"""Where releases are served and traffic is moved: what a rollout asks of one machine and of KServe alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from stages.parts.engine.metrics import Counters
from stages.parts.releases.split import Split


class Target(Protocol):
    """Every call may be made again after a crash: what is already so stays so. Releases go by their directory's name.

    Raises (any of them):
        ServerFailed: a server does not come up or is gone.
        TransientError: the platform did not answer; ask again.
        Conflict: somebody else changed what is served meanwhile.
    """

    def split(self) -> Split:
        """What is in force, as the platform tells it, not as it was asked."""
        ...

    def deploy(self, release: str) -> None:
        """Start *release* beside the stable one, without traffic, and do not wait until it is up.

        The first one (nothing is stable) may get all traffic once it is ready; ``promote`` makes it stable, here too.
        Of the stable one: make sure that it runs as it should, with the settings that are asked for now.
        """
        ...

    def ready(self, release: str) -> bool:
        """Whether its servers say that they are ready. The rollout itself then asks for a completion."""
        ...

    def url(self, release: str) -> str:
        """Base URL (without ``/v1``) that reaches this release alone, the stable one as the canary: for the first
        completion, for probes and for requests of the rollout's own."""
        ...

    def shift(self, release: str, percent: int) -> None:
        """Give the canary *percent* % of new requests; returns once that is in force. Those in flight stay."""
        ...

    def promote(self, release: str) -> None:
        """The canary becomes the stable one. The old stable stays as a warm standby or is drained and removed."""
        ...

    def withdraw(self, release: str, *, first: bool = False) -> None:
        """All traffic to the stable one, then drain and remove *release*; what others changed of it meanwhile is no
        obstacle.

        Args:
            first: nothing was served before *release*, and nothing shall be after it.

        Raises:
            Conflict: it is the stable one, and not *first*: clients would be left with nothing. Nothing was touched.
        """
        ...

    def counters(self, release: str) -> Counters:
        """Its totals now."""
        ...

    def endpoint(self) -> str:
        """Base URL (without ``/v1``) that clients use, whatever the split."""
        ...

    def kill(self, release: str) -> Callable[[], bool]:
        """End one of its servers at once, as a crash would: for drills.

        Returns:
            Whether another one is up in its place.

        Raises:
            TransientError: none is up.
            AccessDenied: whoever calls may not.
        """
        ...
