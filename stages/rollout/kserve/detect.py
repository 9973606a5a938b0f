"""Detects how a cluster's KServe is set up, and which mode it serves in."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from stages.parts.base.errors import AccessDenied, ConfigError, NotInstalled
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import CONFIG_MAPS, DEPLOYMENTS, Kind, Object
from stages.parts.cluster.refusals import Absent
from stages.rollout.kserve.modes import AUTO, MODES, Mode, all_modes, mode_named
from stages.rollout.kserve.objects import ISVCS
from stages.rollout.kserve.settings import KServe

NAMESPACE: Final = "kserve"
CONFIG: Final = "inferenceservice-config"
CONTROLLER: Final = "kserve-controller-manager"
CRD: Final = f"{ISVCS.plural}.{ISVCS.group}"
SET_MODE: Final = f"set kserve.mode to one of {', '.join(MODES)}"
"""A hint."""


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
        try:
            data = self.cluster.get(CONFIG_MAPS, CONFIG, NAMESPACE).get("data", {})
            return {name: json.loads(data[name]) for name in ("deploy", "ingress", "localModel") if name in data}
        except (Absent, AccessDenied) as error:
            if self.settings.mode != AUTO:
                return {}
            raise NotInstalled(
                f"KServe's configuration {NAMESPACE}/{CONFIG} can't be read: {error}", hint=SET_MODE
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"KServe's configuration {NAMESPACE}/{CONFIG} is not JSON: {error}", hint=SET_MODE
            ) from error

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

    def require(self, kind: Kind) -> None:
        """Raise NotInstalled if the cluster does not have this kind of objects."""
        self.cluster.kind(kind.api_version, kind.name)

    def chosen(self) -> Mode:
        """Choose the mode that is set or, with ``auto``, the first that suits the cluster."""
        if self.settings.mode != AUTO:
            return mode_named(self.settings.mode)
        for mode in all_modes():
            if mode.suits(self):
                return mode
        raise ConfigError(f"KServe's default mode {self.default_mode!r} is not supported", hint=SET_MODE)


def detect(cluster: Cluster, settings: KServe) -> Installation:
    """How traffic is split on *cluster*.

    Raises:
        NotInstalled: the cluster has no KServe, or lacks what the mode needs.
        ConfigError: the mode can't work there; the message says why and what to do.
    """
    setup = Setup(cluster, settings)
    setup.require(ISVCS)
    mode = setup.chosen()
    mode.check(setup)
    return as_configured(mode.name, settings, setup.ingress)


def other_default(cluster: Cluster, settings: KServe, served: str) -> str | None:
    """Find the mode of models that are not served yet, if it is known and not *served*."""
    if settings.mode == AUTO:
        with contextlib.suppress(ConfigError, NotInstalled):
            mode = Setup(cluster, settings).chosen().name
            return mode if mode != served else None
    return None


def as_configured(mode: str, settings: KServe, ingress: Mapping[str, Any]) -> Installation:
    """Read ``ingress`` in KServe's own configuration; where it says nothing, KServe's default holds."""
    gateway = settings.gateway or str(ingress.get("kserveIngressGateway", "kserve/kserve-ingress-gateway"))
    template = str(ingress.get("domainTemplate") or "{{ .Name }}-{{ .Namespace }}.{{ .IngressDomain }}")
    return Installation(mode, gateway, str(ingress.get("ingressDomain") or "example.com"), template)


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
