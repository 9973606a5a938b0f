"""Detects what a cluster lacks for mode ``llm``."""

from __future__ import annotations

from typing import Final

from stages.parts.base.errors import AccessDenied, ConfigError, NotInstalled
from stages.parts.cluster.kinds import DEPLOYMENTS, Kind, Object
from stages.parts.cluster.refusals import Absent
from stages.rollout.kserve.detect import CONFIG, NAMESPACE, Setup, managers, version_of
from stages.rollout.kserve.http_route import HTTP_ROUTES
from stages.rollout.kserve.llm.objects import CACHES, LLM_SERVICES, POOLS

CONTROLLER: Final = "llmisvc-controller-manager"
GROUPS_SINCE: Final = (0, 20)
"""The first version in which LLMInferenceServices share traffic by weights."""
INSTALL: Final = "install KServe's charts kserve-llmisvc-crd and kserve-llmisvc-resources, 0.20 or newer"
PRESET: Final = Kind("serving.kserve.io/v1alpha1", "LLMInferenceServiceConfig", "llminferenceserviceconfigs")
PRESETS: Final = ("config-llm-template", "config-llm-router-route")
SCHEDULER_PRESET: Final = "config-llm-scheduler"


def check(setup: Setup) -> None:
    settings = setup.settings.llm
    try:
        setup.require(LLM_SERVICES)
    except NotInstalled as error:
        raise NotInstalled(str(error), hint=INSTALL) from error
    setup.require(HTTP_ROUTES)
    if settings.scheduler:
        setup.cluster.kind(f"{POOLS}/v1", "InferencePool")
    if settings.cache_nodes:
        setup.require(CACHES)
        if setup.config and not setup.config.get("localModel", {}).get("enabled"):
            raise ConfigError(
                f"KServe keeps no models on nodes (localModel.enabled in {NAMESPACE}/{CONFIG} is not true)",
                hint="set it to true, or leave kserve.llm.cache_nodes empty",
            )
    if setup.ingress.get("enableLLMInferenceServiceTLS"):
        raise ConfigError(
            f"KServe expects TLS of LLMInferenceServices (ingress.enableLLMInferenceServiceTLS in "
            f"{NAMESPACE}/{CONFIG} is true): releases are served without",
            hint="set it to false, or set kserve.mode to another one",
        )
    try:
        controller = setup.cluster.get(DEPLOYMENTS, CONTROLLER, NAMESPACE)
    except Absent as error:
        raise NotInstalled(f"no {CONTROLLER} in namespace {NAMESPACE}", hint=INSTALL) from error
    except AccessDenied:  # the rollout's first step will say what is wrong
        return
    version = version_of(controller)
    if version is not None and version < GROUPS_SINCE:
        raise ConfigError(
            f"KServe {version[0]}.{version[1]} does not split traffic among LLMInferenceServices: 0.20 is the first to",
            hint=INSTALL,
        )
    _check_presets(setup, controller)


def _check_presets(setup: Setup, controller: Object) -> None:
    """Raise NotInstalled if KServe would make nothing of a LLMInferenceService."""
    variables = {
        variable["name"]: variable.get("value", "")
        for manager in managers(controller)
        for variable in manager.get("env", [])
    }
    prefix = variables.get("LLM_INFERENCE_SERVICE_CONFIG_PREFIX", "kserve-")
    for name in (*PRESETS, *([SCHEDULER_PRESET] if setup.settings.llm.scheduler else [])):
        try:
            setup.cluster.get(PRESET, f"{prefix}{name}", NAMESPACE)
        except Absent as error:
            raise NotInstalled(
                f"no {PRESET.name} {prefix}{name} in namespace {NAMESPACE}",
                hint="install KServe's chart kserve-runtime-configs, or apply its config/llmisvcconfig",
            ) from error
        except AccessDenied:
            return
