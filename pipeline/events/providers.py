"""The registries that report pushes: how each authenticates, and what its webhook's body means.

Sources: https://huggingface.co/docs/hub/webhooks,
https://goharbor.io/docs/latest/working-with-projects/project-configuration/configure-webhooks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pipeline.events.push import SHOWN, Push, refused
from stages.parts.base.errors import UnknownName

MAIN: Final = "refs/heads/main"
PROJECT: Final = "models"
"""The project in Harbor whose repositories are named like models: ``models/org/name``."""


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
    if provider not in PROVIDERS:
        raise UnknownName("provider", provider, list(PROVIDERS))
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
