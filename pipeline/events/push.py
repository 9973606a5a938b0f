"""A push to a registry, in the same form whichever registry reports it, and the Workflow that it starts: the same as
manifests/events/sensor.yaml creates.

The registries that report pushes authenticate each in its own way, and their webhooks have bodies of their own:
https://huggingface.co/docs/hub/webhooks,
https://goharbor.io/docs/latest/working-with-projects/project-configuration/configure-webhooks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pipeline.argo.template import create_once, installed, of_template
from pipeline.workflow.parameters import NAME, resolve_key
from stages.parts.base.errors import EventRefused, InvalidName, check_known
from stages.parts.base.store import directory_name
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import Object
from stages.parts.model.hub import COMMIT

SHOWN: Final = 100
"""Characters of a refused value that a message shows."""
MAIN: Final = "refs/heads/main"
PROJECT: Final = "models"
"""The project in Harbor whose repositories are named like models: ``models/org/name``."""


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
        hint = f"slipway show {push.name}, or to run it again: slipway retry {push.name}"
        raise EventRefused(f"a run of {push.model} at {push.commit} was started before: {push.name}", hint=hint)
    return run


@dataclass(frozen=True)
class Provider:
    header: str
    """The request header that carries the secret."""
    prefix: str
    """What precedes the secret in that header."""
    variable: str
    """The environment variable that holds the secret."""
    push: Callable[[Any], Push]
    """Map a webhook's body to a push. Raises EventRefused for a body that starts no run."""


def huggingface(body: Any) -> Push:
    """Map a webhook of the Hub: new commits on main of a model."""
    _expect(body, "event.scope", "repo.content")
    _expect(body, "event.action", "update")
    _expect(body, "repo.type", "model")
    refs = _at(body, "updatedRefs")
    refs = [ref for ref in refs if _at(ref, "ref") == MAIN] if isinstance(refs, list) else []
    if not refs:
        raise refused(f"updatedRefs does not name {MAIN}")
    if _at(refs[0], "newSha") is None:
        raise refused(f"{MAIN} was deleted")
    return Push("huggingface", _text(body, "repo.name"), _text(refs[0], "newSha"))


def harbor(body: Any) -> Push:
    """Map a webhook of Harbor: an artifact that is named like a model and tagged with a commit."""
    _expect(body, "type", "PUSH_ARTIFACT")
    _expect(body, "event_data.repository.namespace", PROJECT)
    return Push("harbor", _text(body, "event_data.repository.name"), _text(body, "event_data.resources.0.tag"))


PROVIDERS: Final[dict[str, Provider]] = {
    "huggingface": Provider("X-Webhook-Secret", "", "SLIPWAY_WEBHOOK_SECRET", huggingface),
    "harbor": Provider("Authorization", "Bearer ", "SLIPWAY_HARBOR_TOKEN", harbor),
}


def push_of(provider: str, body: Any) -> Push:
    """Map the *body* that *provider* posted. Raises: EventRefused: it starts no run; UnknownName."""
    check_known("provider", provider, PROVIDERS)
    return PROVIDERS[provider].push(body)


def _expect(body: Any, path: str, expected: str) -> None:
    text = _text(body, path)
    if text != expected:
        raise refused(f"{path} is {text[:SHOWN]!r}, not {expected!r}")


def _text(body: Any, path: str) -> str:
    value = _at(body, path)
    if not isinstance(value, str):
        raise refused(f"{path} is {'missing' if value is None else 'not text'}")
    return value


def _at(body: Any, path: str) -> Any:
    """Return the value at *path* (keys and indices, separated by dots), or None."""
    for part in path.split("."):
        if isinstance(body, dict):
            body = body.get(part)
        elif isinstance(body, list) and part.isdigit():
            body = body[int(part)] if int(part) < len(body) else None
        else:
            return None
    return body
