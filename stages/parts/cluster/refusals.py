"""The errors of the Kubernetes API as our errors."""

from __future__ import annotations

import json
from typing import Final

from stages.parts.base.errors import AccessDenied, ClusterRefused, ClusterUnavailable, Conflict, SlipwayError
from stages.parts.cluster.kinds import Object

TRANSIENT: Final = frozenset({429, 500, 502, 503, 504})


class Absent(ClusterRefused):
    """404: there is no such object."""


class AlreadyExists(Conflict):
    """409: an object of this name exists."""


class Expired(ClusterRefused):
    """410: the server no longer has the changes since the requested version. List the objects again."""


class Unanswered(ClusterUnavailable):
    """No answer, or a temporary error. *wait_s* is the pause that the server asked for; 0 if it asked for none."""

    wait_s: float = 0.0


def parsed(content: bytes) -> Object:
    """Parse the body of a response; a body that is not a JSON object becomes its ``message``."""
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    return body if isinstance(body, dict) else {"message": content[:200].decode(errors="replace").strip()}


def refusal(status: int, content: Object, address: str, retry_after: str | None = None) -> SlipwayError:
    """Our error for a Kubernetes Status."""
    message = " ".join(str(content.get("message") or f"HTTP {status}").split())
    if status in TRANSIENT:
        busy = Unanswered(f"{address} is overloaded or has a problem: {message}", hint="try again later")
        pause = retry_after or content.get("details", {}).get("retryAfterSeconds") or 0
        busy.wait_s = float(pause) if str(pause).isdigit() else 0.0
        return busy
    if status == 401:
        return AccessDenied(f"{address} does not accept this login: {message}", hint="log in to the cluster again")
    if status == 403:
        return AccessDenied(message, hint="to see which rights are missing: slipway doctor --engine argo")
    if status == 404:
        return Absent(message)
    if status == 410:
        return Expired(message)
    if status == 409:
        return AlreadyExists(message) if content.get("reason") == "AlreadyExists" else Conflict(message)
    return ClusterRefused(message)


def lost(error: Exception, address: str) -> SlipwayError:
    """Our error for a request without a response."""
    import urllib3

    if isinstance(error, urllib3.exceptions.SSLError):
        return AccessDenied(
            f"the certificate of {address} is not trusted: {error}", hint="check the CA in the kubeconfig"
        )
    return Unanswered(
        f"{address} does not answer: {type(error).__name__}", hint="check the kubeconfig, the network and the VPN"
    )
