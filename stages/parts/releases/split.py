"""Which releases are served, and which share of the requests each one gets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """The releases that are served, and their shares of new requests."""

    stable: str | None
    """The release that clients get; None while nothing is served."""
    canary: str | None = None
    """The release that is being tried beside the stable one."""
    percent: int = 0
    """The canary's share of new requests, 0–100."""
    standby: str | None = None
    """An earlier stable release that is kept warm, so that a rollback to it takes seconds."""
    room: bool = True
    """Whether a canary fits beside the stable release. If not, nothing can be compared: ``deploy`` replaces the stable
    release, so that the canary gets all requests at once, and ``withdraw`` brings the stable release back."""
