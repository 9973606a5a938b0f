"""Envoy's configuration, rendered from the YAML templates in ``templates/``, which say what they mean.

Envoy reads the start configuration once. Routes and clusters have files of their own, which it watches.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from stages.parts.endpoint import access_log
from stages.parts.endpoint.door import CLIENT_HEADER, PRIORITY_HEADER
from stages.parts.endpoint.offered import HEALTH, OFFERED
from stages.parts.endpoint.routing import Routing, names_of
from stages.parts.endpoint.tls import SECRET_FILE
from stages.parts.vllm.streaming import RELEASE_HEADER

if TYPE_CHECKING:
    import jinja2

TEMPLATES: Final = Path(__file__).with_name("templates")
SESSION_HEADER: Final = "x-session-id"
ROUTER: Final = "endpoint"
ROUTES: Final = "routes"
CLUSTERS_FILE: Final = "clusters.json"
ROUTES_FILE: Final = "routes.json"
ADMIN_SOCKET: Final = "admin.sock"
DOOR_SOCKET: Final = "door.sock"
EJECTED_AFTER: Final = 5
"""Errors in a row after which a replica gets no requests for some time."""
SHARED: Final = {
    "admin_socket": ADMIN_SOCKET,
    "access_log": access_log.NAME,
    "body_bytes": 64 << 20,  # the longest prompt, and the longest answer that is not streamed, with all around them
    "client_header": CLIENT_HEADER,
    "clusters_file": CLUSTERS_FILE,
    "door_socket": DOOR_SOCKET,
    "ejected_after": EJECTED_AFTER,
    "health": HEALTH,
    "names_of": names_of,
    "offered": OFFERED,
    "priority_header": PRIORITY_HEADER,
    "release_header": RELEASE_HEADER,
    "retry_after_s": 2,
    "router": ROUTER,
    "routes": ROUTES,
    "routes_file": ROUTES_FILE,
    "secret_file": SECRET_FILE,
    "session_header": SESSION_HEADER,
}
"""What all templates may name."""


def bootstrap(address: tuple[str, int], folder: str, model: str, *, tls: bool) -> Any:
    """Render the start configuration of an Envoy at *address*, with its files in *folder*."""
    return _rendered("envoy", address=address[0], port=address[1], folder=folder, model=model, tls=tls)


def routes_document(routing: Routing, version: str) -> Any:
    return _rendered("routes", version=version, weights=routing.weights, balance=routing.balance)


def clusters_document(routing: Routing, version: str) -> Any:
    return _rendered("clusters", version=version, clusters=list(routing.clusters()))


def _rendered(template: str, **values: Any) -> Any:
    return yaml.safe_load(_environment().get_template(f"{template}.yaml.jinja").render(values))


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=False,  # noqa: S701
        # Every value is written as JSON, which is YAML.
        finalize=lambda value: json.dumps(value, ensure_ascii=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= SHARED
    return environment
