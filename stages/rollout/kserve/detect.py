"""Detects how a cluster's KServe is set up and which mode it serves in, and makes the rollout's target there.

The mode that serves a model now is kept, whatever KServe would choose today: otherwise an upgrade of KServe would make
a second set of objects beside those that serve. What serves shows its mode itself, see ``Mode.owns``.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from stages.parts.base.errors import AccessDenied, ConfigError, Conflict, NotInstalled
from stages.parts.base.log import say
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.store import ModelStore
from stages.parts.cluster.api import Absent, Cluster
from stages.parts.cluster.kinds import CONFIG_MAPS, DEPLOYMENTS, Kind, Object
from stages.rollout.kserve.modes import AUTO, MODES, Mode, all_modes, mode_named
from stages.rollout.kserve.objects import ISVCS, MODEL, SELECTOR, KServeEndpoint
from stages.rollout.kserve.scaler import RUNTIME, RUNTIMES, find_scaler
from stages.rollout.kserve.settings import KServe

if TYPE_CHECKING:
    from stages.rollout.kserve.target import KServeTarget

NAMESPACE: Final = "kserve"
CONFIG: Final = "inferenceservice-config"
CONTROLLER: Final = "kserve-controller-manager"
CRD: Final = f"{ISVCS.plural}.{ISVCS.group}"
SET_MODE: Final = f"set kserve.mode to one of {', '.join(MODES)}"
"""A hint."""
MOVE: Final = "to move it: slipway rollout move, see docs/rollout.md"


@dataclass(frozen=True)
class Installation:
    """How a cluster's KServe serves."""

    mode: str
    gateway: str
    """``namespace/name`` of the Gateway that KServe's routes are attached to."""
    domain: str
    domain_template: str

    def hostname(self, name: str, namespace: str) -> str:
        """Make the host name as KServe does from its template."""
        values = {"Name": name, "Namespace": namespace, "IngressDomain": self.domain}
        return re.sub(r"{{\s*\.(\w+)\s*}}", lambda field: values.get(field[1], ""), self.domain_template)


class Setup:
    """What modes ask about a cluster's KServe; each fact is read when it is first asked for."""

    def __init__(self, cluster: Cluster, settings: KServe) -> None:
        self.cluster, self.settings = cluster, settings

    @cached_property
    def config(self) -> dict[str, Any]:
        """KServe's own configuration; empty if it can't be read and is not needed, because the mode was set."""
        title = f"KServe's configuration {NAMESPACE}/{CONFIG}"
        try:
            data = self.cluster.get(CONFIG_MAPS, CONFIG, NAMESPACE).get("data", {})
            return {name: json.loads(data[name]) for name in ("deploy", "ingress", "localModel") if name in data}
        except (Absent, AccessDenied) as error:
            if self.settings.mode != AUTO:
                return {}
            raise NotInstalled(f"{title} can't be read: {error}", hint=SET_MODE) from error
        except ValueError as error:
            raise ConfigError(f"{title} is not JSON: {error}", hint=SET_MODE) from error

    @property
    def ingress(self) -> dict[str, Any]:
        return dict(self.config.get("ingress", {}))

    @property
    def default_mode(self) -> str:
        """KServe's name of the mode in which it serves what asks for none."""
        return str(self.config.get("deploy", {}).get("defaultDeploymentMode", ""))

    @cached_property
    def version(self) -> tuple[int, int] | None:
        """The controller's version; None if nothing shows it."""
        with contextlib.suppress(Absent, AccessDenied):
            return version_of(self.cluster.get(DEPLOYMENTS, CONTROLLER, NAMESPACE))
        return None

    def chosen(self) -> Mode:
        """Choose the mode that is set or, with ``auto``, the first that suits the cluster."""
        if self.settings.mode != AUTO:
            return mode_named(self.settings.mode)
        for mode in all_modes():
            if mode.suits(self):
                return mode
        raise ConfigError(f"KServe's default mode {self.default_mode!r} is not supported", hint=SET_MODE)


def detect(cluster: Cluster, settings: KServe) -> Installation:
    """Find out how traffic is split on *cluster*. Raises NotInstalled if it has no KServe, or lacks what the mode
    needs; ConfigError if the mode can't work there: why, and what to do."""
    setup = Setup(cluster, settings)
    cluster.require(ISVCS)
    mode = setup.chosen()
    mode.check(setup)
    return as_configured(mode.name, settings, setup.ingress)


def as_configured(mode: str, settings: KServe, ingress: Mapping[str, Any]) -> Installation:
    """Read ``ingress`` in KServe's own configuration; where it says nothing, KServe's default holds."""
    gateway = settings.gateway or str(ingress.get("kserveIngressGateway", "kserve/kserve-ingress-gateway"))
    template = str(ingress.get("domainTemplate") or "{{ .Name }}-{{ .Namespace }}.{{ .IngressDomain }}")
    return Installation(mode, gateway, str(ingress.get("ingressDomain") or "example.com"), template)


def serving_kinds() -> list[Kind]:
    """List the kinds of objects that serve in any mode."""
    return list(dict.fromkeys(mode.services for mode in all_modes()))


def served_modes(cluster: Cluster, namespace: str | None = None) -> dict[str, dict[str, list[str]]]:
    """List the names of the objects that serve, by model and by mode; none without KServe."""
    names: dict[str, dict[str, list[str]]] = {}
    for mode, service in _services(cluster, namespace):
        if model := service["metadata"].get("annotations", {}).get(MODEL):
            names.setdefault(model, {}).setdefault(mode.name, []).append(service["metadata"]["name"])
    return names


def kept_mode(cluster: Cluster, model: str, mode_set: str, namespace: str | None = None) -> str | None:
    """Find the mode in which *model* is served, if it is; raise Conflict if it is served in two modes at once, or in
    another one than *mode_set*, which is ``KServe.mode``."""
    modes = served_modes(cluster, namespace).get(model, {})
    if len(modes) > 1:
        listed = " and ".join(f"{mode} ({', '.join(names)})" for mode, names in modes.items())
        raise Conflict(
            f"{model} is served in two modes at once: {listed}",
            hint="slipway rollout move completes a move; or keep one: "
            f"kubectl -n {namespace or cluster.namespace} delete isvc,llmisvc, with the others' names",
        )
    mode = next(iter(modes), None)
    if mode and mode_set not in (AUTO, mode):
        hint = f"set kserve.mode to auto or {mode}; {MOVE}"
        raise Conflict(f"{model} is served in mode {mode}, and kserve.mode says {mode_set}", hint=hint)
    return mode


def in_mode(settings: KServe, mode: str | None) -> KServe:
    return settings.model_copy(update={"mode": mode}) if mode else settings


def _services(cluster: Cluster, namespace: str | None) -> Iterator[tuple[Mode, Object]]:
    """Yield our objects that serve, each with its mode."""
    for kind in serving_kinds():
        # Most clusters have InferenceServices alone, and whoever may not see other kinds makes none.
        with contextlib.suppress(Absent, *(() if kind == ISVCS else (AccessDenied,))):
            for service in cluster.list(kind, namespace, labels=SELECTOR)[0]:
                owners = (mode for mode in all_modes() if mode.services == kind and mode.owns(service))
                if mode := next(owners, None):
                    yield mode, service


def managers(controller: Object) -> list[Object]:
    """Find the containers of a controller's Deployment that are the controller itself."""
    containers = controller["spec"]["template"]["spec"]["containers"]
    return [container for container in containers if container["name"] == "manager"]


def version_of(controller: Object) -> tuple[int, int] | None:
    """Read a controller's version from its image's tag or its label, if either shows it."""
    texts = [manager["image"].partition("@")[0].rpartition(":")[2] for manager in managers(controller)]
    texts.append(controller["metadata"].get("labels", {}).get("app.kubernetes.io/version", ""))
    numbers = (re.match(r"v?(\d+)\.(\d+)", text) for text in texts)
    return next(((int(match[1]), int(match[2])) for match in numbers if match), None)


def target_on(cluster: Cluster, store: ModelStore, serving: AskedServing, settings: KServe) -> KServeTarget:
    """Make the target on *cluster*: in the mode that serves the model already, otherwise in that of its KServe. Raises
    as ``stages.rollout.target.connect``."""
    cluster.require(ISVCS)
    served = kept_mode(cluster, store.model, settings.mode)
    if served and settings.mode == AUTO:
        with contextlib.suppress(ConfigError, NotInstalled):  # what KServe would choose today need not work
            if (default := Setup(cluster, settings).chosen().name) != served:
                say(f"rollout: {store.model} stays in mode {served}; KServe's is now {default}: {MOVE}")
    return target_in(cluster, store, serving, in_mode(settings, served))


def target_in(cluster: Cluster, store: ModelStore, serving: AskedServing, settings: KServe) -> KServeTarget:
    """Make the target in the mode of *settings*, whatever serves the model now; raises as ``target_on``."""
    installation = detect(cluster, settings)
    mode = mode_named(installation.mode)
    if mode.needs_runtime:
        try:
            cluster.get(RUNTIMES, RUNTIME)
        except Absent as error:
            text = f"the namespace {cluster.namespace} has no ServingRuntime {RUNTIME}"
            raise NotInstalled(text, hint="slipway install, or kubectl apply -k manifests/kserve") from error
    endpoint = KServeEndpoint(store, serving, settings, cluster.namespace, find_scaler(cluster, settings))
    return mode.target(cluster, endpoint, installation)
