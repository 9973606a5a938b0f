"""Detects whether a cluster's KServe splits traffic in mode ``standard``."""

from __future__ import annotations

from typing import Final

from stages.parts.base.errors import AccessDenied, ConfigError
from stages.parts.cluster.kinds import DEFINITIONS
from stages.parts.cluster.refusals import Absent
from stages.rollout.kserve.detect import CONFIG, CRD, NAMESPACE, Installation, Setup, as_configured, set_mode
from stages.rollout.kserve.objects import LABEL_CHARACTERS, LEAST_CHARACTERS, LONGEST_PREDICTOR
from stages.rollout.kserve.standard.objects import NAMES

CANARY_SINCE: Final = (0, 21)
"""The first version whose canaries work: 0.20 has ``spec.canary``, but neither routes by it nor waits for readiness."""


def suits(setup: Setup) -> bool:
    """Whether KServe is in this mode and splits traffic in it.

    Raises:
        ConfigError: its version can't be read, and may be 0.20.
    """
    if setup.default_mode not in NAMES or not _has_canaries(setup):
        return False
    if setup.version is None:
        raise ConfigError("KServe's version can't be read, and 0.20 ignores a canary's share", hint=set_mode())
    return True


def check(setup: Setup) -> None:
    """See ``Mode.check``."""
    if not _has_canaries(setup):
        version = "{}.{}".format(*setup.version) if setup.version else "without spec.canary"
        raise ConfigError(
            f"KServe {version} does not split traffic in Standard mode: 0.21 is the first that does",
            hint="upgrade KServe, or set kserve.mode to route",
        )
    if setup.config and not setup.ingress.get("enableGatewayApi", False):
        raise ConfigError(
            f"KServe is in Standard mode without the Gateway API (ingress.enableGatewayApi in {NAMESPACE}/{CONFIG} is "
            "false): a canary would get no traffic",  # KServe starts its pods all the same
            hint="set it to true and restart KServe's controller, or set kserve.mode to route",
        )
    if setup.ingress.get("disableIngressCreation", False):
        raise ConfigError(
            f"KServe creates no routes (ingress.disableIngressCreation in {NAMESPACE}/{CONFIG} is true): "
            "traffic can't be split",
            hint="set it to false and restart KServe's controller, or set kserve.mode to route",
        )
    shortest = "m" * LEAST_CHARACTERS + f"-{LONGEST_PREDICTOR}-predictor"
    check_hostname(as_configured("standard", setup.settings, setup.ingress), shortest, setup.cluster.namespace)


def check_hostname(installation: Installation, deployment: str, namespace: str) -> None:
    """Raise ConfigError if KServe can't make a host name of a release's Deployment."""
    hostname = installation.hostname(deployment, namespace)
    if max(map(len, hostname.split("."))) > LABEL_CHARACTERS:
        raise ConfigError(
            f"KServe would make the host name {hostname}, with more than {LABEL_CHARACTERS} characters in a row",
            hint="a namespace with a shorter name, or a domainTemplate with a dot before {{ .Namespace }}",
        )


def _has_canaries(setup: Setup) -> bool:
    """Whether canaries work, by KServe's version or, if that is not known, by its definition. True if neither can be
    read: then the mode was set."""
    if setup.version is not None:
        return setup.version >= CANARY_SINCE
    try:
        versions = setup.cluster.get(DEFINITIONS, CRD)["spec"]["versions"]
    except (Absent, AccessDenied):
        return True
    schemas = [version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1beta1"]
    return any("canary" in schema["properties"]["spec"]["properties"] for schema in schemas)
