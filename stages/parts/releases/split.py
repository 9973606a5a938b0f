"""Which releases are served, and who gets which share of the requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """What is served, and who gets which share of new requests."""

    stable: str | None
    """The release that clients get; None while nothing is served."""
    canary: str | None = None
    """The release that is being tried beside it."""
    percent: int = 0
    """Of new requests, to the canary: 0–100."""
    standby: str | None = None
    """An earlier stable one that is kept warm, so that going back to it takes seconds."""
    room: bool = True
    """Whether a canary finds room beside the stable release. Where it does not, ``deploy`` puts it in its place and
    gives it all requests at once, and ``withdraw`` brings the stable one back: nothing can be compared."""
