"""Detects which of the ways of splitting traffic a cluster's KServe supports, if any."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stages.parts.base.errors import AccessDenied, ConfigError, NotInstalled
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import CONFIG_MAPS, DEFINITIONS, DEPLOYMENTS, Kind, Object
from stages.parts.cluster.refusals import Absent
from stages.rollout.kserve.llm_objects import CACHES, LLM_SERVICES, POOLS
from stages.rollout.kserve.objects import (
    DEPLOYMENT_MODES,
    ISVC,
    LABEL_CHARACTERS,
    LEAST_CHARACTERS,
    LONGEST_PREDICTOR,
    Mode,
)
from stages.rollout.kserve.settings import KServe

NAMESPACE: Final = "kserve"
CONFIG: Final = "inferenceservice-config"
CONTROLLER: Final = "kserve-controller-manager"
CANARY_SINCE: Final = (0, 21)
"""The first version whose canaries work: 0.20 has ``spec.canary``, but neither routes by it nor waits for readiness."""
PRESET: Final = Kind("serving.kserve.io/v1alpha1", "LLMInferenceServiceConfig", "llminferenceserviceconfigs")
CRD: Final = "inferenceservices.serving.kserve.io"
SET_MODE: Final = "set kserve.mode to standard, knative or route"
LLM_CRD: Final = "llminferenceservices.serving.kserve.io"
LLM_CONTROLLER: Final = "llmisvc-controller-manager"
GROUPS_SINCE: Final = (0, 20)
"""The first version in which LLMInferenceServices share traffic by weights."""
INSTALL_LLM: Final = "install KServe's charts kserve-llmisvc-crd and kserve-llmisvc-resources, 0.20 or newer"
PRESETS: Final = ("config-llm-template", "config-llm-router-route")
SCHEDULER_PRESET: Final = "config-llm-scheduler"


@dataclass(frozen=True)
class Installation:
    """How a cluster's KServe is set up."""

    mode: Mode
    gateway: str
    """``namespace/name`` of the Gateway that KServe's routes are attached to."""
    domain: str
    domain_template: str

    def hostname(self, name: str, namespace: str) -> str:
        """The host name that KServe makes from its template."""
        values = {"Name": name, "Namespace": namespace, "IngressDomain": self.domain}
        return re.sub(r"{{\s*\.(\w+)\s*}}", lambda found: values.get(found[1], ""), self.domain_template)


def detect(cluster: Cluster, settings: KServe) -> Installation:
    """How traffic is split on *cluster*.

    Raises:
        NotInstalled: the cluster has no KServe, or lacks what the mode needs.
        ConfigError: the mode can't work there; the message says why and what to do.
    """
    cluster.kind(ISVC, "InferenceService")
    config = _config(cluster, settings)
    ingress, deploy = config.get("ingress", {}), config.get("deploy", {})
    mode = _mode(cluster, settings, str(deploy.get("defaultDeploymentMode", "")))
    if mode == "standard" and config:
        _check_gateway_api(ingress)
    if mode == "route":
        cluster.kind("gateway.networking.k8s.io/v1", "HTTPRoute")
    if mode == "knative":
        cluster.kind("serving.knative.dev/v1", "Revision")
    if mode == "llm":
        _check_llm(cluster, settings, config)
    found = as_configured(mode, settings, ingress)
    if mode == "standard":
        check_hostname(found, "m" * LEAST_CHARACTERS + f"-{LONGEST_PREDICTOR}-predictor", cluster.namespace)
    return found


def check_hostname(installation: Installation, deployment: str, namespace: str) -> None:
    """Raises: ConfigError: KServe can't make a host name of a release's Deployment."""
    hostname = installation.hostname(deployment, namespace)
    if max(map(len, hostname.split("."))) > LABEL_CHARACTERS:
        raise ConfigError(
            f"KServe would make the host name {hostname}, with more than {LABEL_CHARACTERS} characters in a row",
            hint="a namespace with a shorter name, or a domainTemplate with a dot before {{ .Namespace }}",
        )


def other_default(cluster: Cluster, settings: KServe, served: Mode) -> Mode | None:
    """The mode that a model would now get that is not served yet; None: *served*, or that is not known."""
    if settings.mode != "auto":
        return None
    with contextlib.suppress(ConfigError, NotInstalled):
        default = str(_config(cluster, settings).get("deploy", {}).get("defaultDeploymentMode", ""))
        mode = _mode(cluster, settings, default)
        return mode if mode != served else None
    return None


def as_configured(mode: Mode, settings: KServe, ingress: Mapping[str, Any]) -> Installation:
    """What ``ingress`` in KServe's own configuration says; where it says nothing, KServe's default."""
    gateway = settings.gateway or str(ingress.get("kserveIngressGateway", "kserve/kserve-ingress-gateway"))
    template = str(ingress.get("domainTemplate") or "{{ .Name }}-{{ .Namespace }}.{{ .IngressDomain }}")
    return Installation(mode, gateway, str(ingress.get("ingressDomain") or "example.com"), template)


def version(cluster: Cluster) -> tuple[int, int] | None:
    """The controller's version, from its image's tag or its label; None if neither shows it."""
    with contextlib.suppress(Absent, AccessDenied):
        return _version(cluster.get(DEPLOYMENTS, CONTROLLER, NAMESPACE))
    return None


def _version(controller: Object) -> tuple[int, int] | None:
    said = [manager["image"].partition("@")[0].rpartition(":")[2] for manager in _managers(controller)]
    said.append(controller["metadata"].get("labels", {}).get("app.kubernetes.io/version", ""))
    for text in said:
        if match := re.match(r"v?(\d+)\.(\d+)", text):
            return int(match[1]), int(match[2])
    return None


def _managers(controller: Object) -> list[Object]:
    containers = controller["spec"]["template"]["spec"]["containers"]
    return [container for container in containers if container["name"] == "manager"]


def _config(cluster: Cluster, settings: KServe) -> dict[str, Any]:
    """KServe's own configuration; empty if it can't be read and is not needed, because the mode was set."""
    try:
        data = cluster.get(CONFIG_MAPS, CONFIG, NAMESPACE).get("data", {})
        return {name: json.loads(data[name]) for name in ("deploy", "ingress", "localModel") if name in data}
    except (Absent, AccessDenied) as error:
        if settings.mode != "auto":
            return {}
        raise NotInstalled(
            f"KServe's configuration {NAMESPACE}/{CONFIG} can't be read: {error}", hint=SET_MODE
        ) from error
    except ValueError as error:
        raise ConfigError(f"KServe's configuration {NAMESPACE}/{CONFIG} is not JSON: {error}", hint=SET_MODE) from error


def _mode(cluster: Cluster, settings: KServe, default: str) -> Mode:
    if settings.mode in ("knative", "llm"):
        return settings.mode
    if settings.mode == "auto":
        if default not in DEPLOYMENT_MODES:
            raise ConfigError(f"KServe's default mode {default!r} is not supported", hint=SET_MODE)
        if DEPLOYMENT_MODES[default] == "knative":
            return "knative"
    if settings.mode == "route":
        return "route"
    found = version(cluster)
    if found is not None and found < CANARY_SINCE:
        if settings.mode == "standard":
            raise ConfigError(
                f"KServe {found[0]}.{found[1]} does not split traffic in Standard mode: 0.21 is the first that does",
                hint="upgrade KServe, or set kserve.mode to route",
            )
        return "route"
    if found is None and not _knows_canary(cluster):
        return "route"
    if found is None and settings.mode == "auto":
        raise ConfigError("KServe's version can't be read, and 0.20 ignores a canary's share", hint=SET_MODE)
    return "standard"


def _knows_canary(cluster: Cluster) -> bool:
    """Whether the resource has ``spec.canary``; True if the definition can't be read, since then the mode was set."""
    try:
        versions = cluster.get(DEFINITIONS, CRD)["spec"]["versions"]
    except (Absent, AccessDenied):
        return True
    schemas = [each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == "v1beta1"]
    return any("canary" in schema["properties"]["spec"]["properties"] for schema in schemas)


def _check_gateway_api(ingress: dict[str, Any]) -> None:
    """Without the Gateway API, KServe starts a canary's pods but sends them no requests."""
    if not ingress.get("enableGatewayApi", False):
        raise ConfigError(
            f"KServe is in Standard mode without the Gateway API (ingress.enableGatewayApi in {NAMESPACE}/{CONFIG} is "
            "false): a canary would get no traffic",
            hint="set it to true and restart KServe's controller, or set kserve.mode to route",
        )
    if ingress.get("disableIngressCreation", False):
        raise ConfigError(
            f"KServe creates no routes (ingress.disableIngressCreation in {NAMESPACE}/{CONFIG} is true): "
            "traffic can't be split",
            hint="set it to false and restart KServe's controller, or set kserve.mode to route",
        )


def _check_llm(cluster: Cluster, settings: KServe, config: Mapping[str, Any]) -> None:
    """Raises: NotInstalled, ConfigError: what mode ``llm`` lacks."""
    try:
        cluster.kind(LLM_SERVICES.api_version, LLM_SERVICES.name)
    except NotInstalled as error:
        raise NotInstalled(str(error), hint=INSTALL_LLM) from error
    cluster.kind("gateway.networking.k8s.io/v1", "HTTPRoute")
    if settings.llm.scheduler:
        cluster.kind(f"{POOLS}/v1", "InferencePool")
    if settings.llm.cache_nodes:
        cluster.kind(CACHES.api_version, CACHES.name)
        if config and not config.get("localModel", {}).get("enabled"):
            raise ConfigError(
                f"KServe keeps no models on nodes (localModel.enabled in {NAMESPACE}/{CONFIG} is not true)",
                hint="set it to true, or leave kserve.llm.cache_nodes empty",
            )
    if config.get("ingress", {}).get("enableLLMInferenceServiceTLS"):
        raise ConfigError(
            f"KServe expects TLS of LLMInferenceServices (ingress.enableLLMInferenceServiceTLS in "
            f"{NAMESPACE}/{CONFIG} is true): releases are served without",
            hint="set it to false, or set kserve.mode to another one",
        )
    try:
        controller = cluster.get(DEPLOYMENTS, LLM_CONTROLLER, NAMESPACE)
    except Absent as error:
        raise NotInstalled(f"no {LLM_CONTROLLER} in namespace {NAMESPACE}", hint=INSTALL_LLM) from error
    except AccessDenied:  # the rollout's first step will say what is wrong
        return
    found = _version(controller)
    if found is not None and found < GROUPS_SINCE:
        raise ConfigError(
            f"KServe {found[0]}.{found[1]} does not split traffic among LLMInferenceServices: 0.20 is the first to",
            hint=INSTALL_LLM,
        )
    _check_presets(cluster, settings, controller)


def _check_presets(cluster: Cluster, settings: KServe, controller: Object) -> None:
    """Raises: NotInstalled: KServe would make nothing of a LLMInferenceService."""
    said = [each for manager in _managers(controller) for each in manager.get("env", [])]
    prefix = next((each["value"] for each in said if each["name"] == "LLM_INFERENCE_SERVICE_CONFIG_PREFIX"), "kserve-")
    for name in (*PRESETS, *([SCHEDULER_PRESET] if settings.llm.scheduler else [])):
        try:
            cluster.get(PRESET, f"{prefix}{name}", NAMESPACE)
        except Absent as error:
            raise NotInstalled(
                f"no {PRESET.name} {prefix}{name} in namespace {NAMESPACE}",
                hint="install KServe's chart kserve-runtime-configs, or apply its config/llmisvcconfig",
            ) from error
        except AccessDenied:
            return
