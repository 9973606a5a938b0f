"""Where releases are served and traffic is moved: what a rollout asks of one machine and of KServe alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from stages.parts.base.errors import Conflict, UnknownName
from stages.parts.records.rollout import KSERVE, LOCAL, Counters
from stages.parts.releases.release import Split
from stages.rollout.slices import CopiedRequest

if TYPE_CHECKING:
    from stages.parts.base.serving_settings import AskedServing, Serving
    from stages.parts.base.store import ModelStore
    from stages.rollout.kserve.settings import KServe

TARGETS: Final = (LOCAL, KSERVE)
"""The platforms that a release can be rolled out on. To add one: its name and a branch of ``connect``."""


@dataclass(frozen=True)
class Replicas:
    """The replicas of one release, and what its autoscaler was told."""

    running: int
    """How many the autoscaler has asked for, ready or not."""
    ready: int
    minimum: int
    maximum: int
    concurrency: int
    """The requests that one replica should have."""
    lacking: str = ""
    """Why the autoscaler can't do its work, as it says itself."""


class Target(Protocol):
    """A platform that serves the releases of one model. A release is named by its directory's name.

    Every call is idempotent and may be repeated after a crash.

    Raises (any of the methods):
        ServerFailed: a server does not come up or is gone.
        TransientError: the platform did not answer; ask again.
        Conflict: somebody else changed what is served meanwhile.
    """

    @property
    def name(self) -> str:
        """One of ``TARGETS``."""

    def split(self) -> Split:
        """Read what is in force, as the platform reports it, not as it was requested."""

    def who(self) -> str:
        """Name who acts now, as the platform knows the user."""

    def announce(self, reason: str, note: str) -> None:
        """Tell people who watch the platform what the rollout did, with one word as the *reason*, such as ``Promoted``.
        It never fails."""

    def changes(self, release: str) -> str:
        """Say what ``deploy`` would change for *release*, which is served already; empty if nothing."""

    def serving_of(self, release: str) -> Serving:
        """Return the settings with which its server is started."""

    def check_room(self, release: str) -> None:
        """Raise NotEnoughGpus if *release* does not fit beside what is served; nothing is started."""

    def deploy(self, release: str) -> None:
        """Start *release* beside the stable one, without traffic; do not wait until it is up.

        The first release (nothing is stable) may get all traffic once it is ready; ``promote`` makes it stable, too.
        If *release* is the stable one: make sure that it runs with the present settings.
        """

    def ready(self, release: str) -> bool:
        """Whether its servers report that they are ready. The rollout then asks for a completion itself."""

    def waits_for(self, release: str) -> str:
        """Say what *release* waits for that is not ready; empty if the platform does not say, or not now."""

    def servers(self, release: str) -> tuple[int, int]:
        """Count its servers, and those of them that are up."""

    def url(self, release: str) -> str:
        """Return the base URL (without ``/v1``) that reaches only this release: for the first completion, the probes
        and the rollout's own requests. The stable release is reached until the canary is promoted, also without
        traffic."""

    def prepare(self, release: str, percent: int) -> str:
        """Ask for as many servers of the canary as *percent* % of the requests need; do not wait for them. Returns what
        is lacking until they are up; empty if nothing is."""

    def shift(self, release: str, percent: int) -> None:
        """Give the canary *percent* % of new requests; return once that is in force. Requests in flight stay."""

    def cannot_copy(self) -> str:
        """Say why ``copy`` is not possible here; empty if it is."""

    def copy(self, release: str, percent: int) -> None:
        """Send the canary copies of *percent* % of the clients' new requests, and no client, until ``shift``. Its
        answers are dropped."""

    def copies(self, release: str) -> Sequence[CopiedRequest]:
        """List the requests of which *release* got copies, and that have ended at both releases since the last call;
        none where the platform does not report single requests."""

    def promote(self, release: str) -> None:
        """Make the canary the stable release. The old stable one stays as a warm standby, or is drained and removed."""

    def withdraw(self, release: str, *, first: bool = False) -> None:
        """Give the stable release all traffic, then drain and remove *release*, even if others changed it meanwhile.
        *first* says that nothing was served before *release*, and nothing shall be served after it. Otherwise, if it is
        the stable release, this raises Conflict and changes nothing: clients would be left with nothing."""

    def counters(self, release: str) -> Counters:
        """Read its counters now. Requests to ``url()`` are counted like those of clients."""

    def replicas(self, release: str) -> Replicas:
        """Count its replicas now, with the bounds in force; raise ConfigError or NotInstalled if nothing scales it."""

    def client_url(self) -> str:
        """Return the base URL (without ``/v1``) that clients use, whatever the split."""

    def kill(self, release: str) -> Callable[[], bool]:
        """End one of its servers at once, as a crash would; for drills. Returns a function that says whether another
        one is up in its place. Raises TransientError if no server is up, AccessDenied if the caller lacks the right."""

    def last_start(self, release: str) -> tuple[float | None, str]:
        """Tell when the process of its newest server began, by the clock (None if that is not known), and its log."""


def tried_already(release: str | None) -> Conflict:
    """Build the refusal to try another release while one is being tried."""
    return Conflict(f"{release} is being tried already", hint="end that rollout first")


def needed(store: ModelStore, release: str) -> Conflict:
    """Build the refusal to withdraw the stable release."""
    hint = f"slipway rollback {store.model}"
    return Conflict(f"{release} is the stable release of {store.model}: clients would be left with nothing", hint=hint)


def connect(name: str, store: ModelStore, source: str, serving: AskedServing, kserve: KServe) -> Target:
    """Connect to the platform called *name*, for the releases of the model that the user named *source*. The platform's
    module is imported only now.

    Raises:
        UnknownName: *name* is not in ``TARGETS``.
        ConfigError: no cluster is configured, or its KServe can't split traffic as it is set up.
        NotInstalled: the cluster has no KServe, or lacks the runtime in ``manifests/kserve``.
        Conflict: the model is served in another mode of KServe than is set, or in two.
    """
    if name == LOCAL:
        from stages.rollout.one_machine import OneMachine

        return OneMachine(store, source, serving)
    if name == KSERVE:
        from stages.parts.cluster import api
        from stages.rollout.kserve.detect import target_on

        return target_on(api.connect(namespace=kserve.namespace), store, serving, kserve)
    raise UnknownName("rollout target", name, TARGETS)
