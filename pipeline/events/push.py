"""A push to a registry, in the same form whichever registry reports it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pipeline.workflow.parameters import resolve_key
from stages.parts.base.errors import EventRefused, InvalidName
from stages.parts.base.store import directory_name

COMMIT: Final = re.compile(r"[0-9a-f]{40}")
SHOWN: Final = 100
"""Characters of a refused value that a message shows."""


@dataclass(frozen=True)
class Push:
    """One commit of a model. Raises: EventRefused: it is not ``org/name`` and 40 hex digits, as on the Hub."""

    provider: str
    """A key of ``PROVIDERS``."""
    model: str
    commit: str

    def __post_init__(self) -> None:
        try:
            directory_name(self.model)
        except InvalidName as error:
            raise refused(f"{self.model[:SHOWN]!r} is not a model's name such as org/name") from error
        if "/" not in self.model:
            raise refused(f"{self.model!r} is a model's name without an owner")
        if not COMMIT.fullmatch(self.commit):
            raise refused(f"{self.commit[:SHOWN]!r} is not a commit of 40 hex digits")

    def __str__(self) -> str:
        return f"{self.model}@{self.commit}"

    @property
    def model_directory(self) -> str:
        """The model's directory in the store: ``org--name``."""
        return directory_name(self.model)

    @property
    def resolve_key(self) -> str:
        """The memoization key of resolve, for the Hub that the cluster's stages ask."""
        return resolve_key(self.model, self.commit)

    @property
    def name(self) -> str:
        """The Workflow's name. It follows from model and commit, so that a repeated push can't start a second run."""
        return f"slipway-push-{self.resolve_key[:16]}"

    def document(self) -> dict[str, str]:
        """Return what the receiver forwards, and the Sensor takes its parameters from."""
        return {
            "provider": self.provider,
            "name": self.name,
            "model": self.model,
            "revision": self.commit,
            "model_directory": self.model_directory,
            "resolve_key": self.resolve_key,
        }


def refused(reason: str) -> EventRefused:
    return EventRefused(reason, hint="this event starts no run")
