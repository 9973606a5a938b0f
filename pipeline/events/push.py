"""A push to a registry, in the same form whichever registry reports it, and the Workflow that it starts: the same as
manifests/events/sensor.yaml creates."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pipeline.argo.submission import create_once, of_template
from pipeline.argo.template import installed
from pipeline.workflow.parameters import NAME, resolve_key
from stages.parts.base.errors import EventRefused, InvalidName
from stages.parts.base.store import directory_name
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import Object

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
    def arguments(self) -> dict[str, str]:
        """The workflow's parameters that depend on the push. All others keep the defaults of the installed template."""
        return {
            "model": self.model,
            "revision": self.commit,
            "model-directory": directory_name(self.model),
            "resolve-key": resolve_key(self.model, self.commit),
        }

    @property
    def name(self) -> str:
        """The Workflow's name. It follows from model and commit, so that a repeated push can't start a second run."""
        return f"slipway-push-{self.arguments['resolve-key'][:16]}"

    def document(self) -> dict[str, str]:
        """Return what the receiver forwards, and the Sensor takes its parameters from."""
        arguments = {name.replace("-", "_"): value for name, value in self.arguments.items()}
        return {"provider": self.provider, "name": self.name} | arguments


def refused(reason: str) -> EventRefused:
    return EventRefused(reason, hint="this event starts no run")


def workflow(push: Push) -> Object:
    """Return the Workflow that runs what was pushed."""
    body = of_template(NAME, push.name, push.arguments | {"serve": "true"})
    body["metadata"]["labels"]["slipway/trigger"] = push.provider
    return body


def start(cluster: Cluster, push: Push) -> Object:
    """Create the push's Workflow and return it.

    Raises:
        EventRefused: a run of this commit was started before.
        NotInstalled: the template is missing, or is another version's.
    """
    installed(cluster, push.arguments)
    run, is_ours = create_once(cluster, workflow(push))
    if not is_ours:
        raise EventRefused(
            f"a run of {push.model} at {push.commit} was started before: {push.name}",
            hint=f"slipway show {push.name}, or to run it again: slipway retry {push.name}",
        )
    return run
