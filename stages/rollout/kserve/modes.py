"""The modes of KServe: the ways in which it serves a model and splits its traffic.

To add one: a module beside ``standard`` whose ``MODE`` describes it, and its line in ``MODES``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from stages.parts.base.errors import ConfigError

if TYPE_CHECKING:
    from stages.parts.cluster.kinds import Kind, Object
    from stages.rollout.kserve.detect import Setup
    from stages.rollout.kserve.objects import KServeEndpoint
    from stages.rollout.kserve.target import KServeTarget

AUTO: Final = "auto"
"""The mode that serves the model already, otherwise the first in ``MODES`` that suits the cluster."""
MODES: Final[dict[str, str]] = {
    "standard": "stages.rollout.kserve.standard",
    "knative": "stages.rollout.kserve.knative",
    "route": "stages.rollout.kserve.route",
    "llm": "stages.rollout.kserve.llm",
}
"""The module of each mode, imported only when the mode is used."""


@dataclass(frozen=True)
class Mode:
    """One way of serving a model on KServe."""

    name: str
    target: type[KServeTarget]
    services: Kind
    """The kind of the objects that serve."""
    owns: Callable[[Object], bool]
    """Whether such an object of ours serves in this mode."""
    suits: Callable[[Setup], bool]
    """Whether ``auto`` may choose the mode on a cluster."""
    check: Callable[[Setup], None]
    """Raises NotInstalled or ConfigError if the mode can't work on a cluster: what is missing, and what to do."""
    render: Callable[[KServeEndpoint, Mapping[str, int]], list[Object]]
    """The objects that a rollout applies at these percentages by release, the stable release's first."""
    copies: bool = False
    """Whether a canary can get copies of requests: the route is the rollout's own."""
    movable: bool = False
    """Whether a model can be moved from and to this mode: its routes belong to a gateway that others share."""
    needs_runtime: bool = True
    """Whether pods are made by the ServingRuntime in ``manifests/kserve``."""
    autoscaler: str = ""
    """What scales releases in this mode by itself; empty if KEDA has to."""


def mode_named(name: str) -> Mode:
    return cast(Mode, importlib.import_module(MODES[name]).MODE)


def all_modes() -> list[Mode]:
    return [mode_named(name) for name in MODES]


def render(
    endpoint: KServeEndpoint, release: str, stable: str | None, mode: str, percent: int, copied: int = 0
) -> list[Object]:
    """Render, without a cluster, all objects while *release* has *percent* % of the traffic beside *stable*, or copies
    of *copied* % of it, or all of it if *stable* is None. Gateway and domain, where a mode names them, are KServe's
    defaults. Raises ConfigError if an argument for vLLM can't be passed through KServe, or the mode can't copy."""
    if copied and not mode_named(mode).copies:
        raise ConfigError(f"rollout.mirror: mode {mode} can't copy requests", hint="--mode route can")
    objects = mode_named(mode).render(endpoint, {stable: 100 - percent, release: percent} if stable else {release: 100})
    from stages.rollout.kserve.detect import as_configured
    from stages.rollout.kserve.shared_address import shared_objects

    found = as_configured(mode, endpoint.settings, {})
    hostname = found.hostname(endpoint.name, endpoint.namespace)
    objects += shared_objects(endpoint, stable or release, found.gateway, hostname)
    for route in (body for body in objects if copied and stable and body["kind"] == "HTTPRoute"):
        add_copies(route, copied)
    return objects


def add_copies(route: Object, percent: int) -> None:
    """Let the last backend of a route's rule get copies of *percent* % of its requests (Gateway API 1.3 or newer)."""
    (rule,) = route["spec"]["rules"]
    backend = {key: value for key, value in rule["backendRefs"][-1].items() if key != "weight"}
    mirror: dict[str, Any] = {"backendRef": backend} | ({"percent": percent} if percent < 100 else {})
    rule["filters"] = [{"type": "RequestMirror", "requestMirror": mirror}]
