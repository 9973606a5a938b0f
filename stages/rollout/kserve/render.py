"""Renders what a rollout applies, for a person to read beforehand: the objects of any mode, without a cluster."""

from __future__ import annotations

from typing import Final

from stages.rollout.kserve.autoscaling import scaled_object
from stages.rollout.kserve.detect import as_configured
from stages.rollout.kserve.knative import NEARLY_ALL, PERCENT
from stages.rollout.kserve.objects import (
    KServeEndpoint,
    Mode,
    Object,
    canary,
    disruption_budget,
    http_route,
    inference_service,
    predictor,
    predictor_name,
    replicas,
    route_service,
    with_replicas,
)

SERVICE_PORT: Final = 80


def objects(endpoint: KServeEndpoint, release: str, stable: str | None, mode: Mode, percent: int) -> list[Object]:
    """All objects while *release* has *percent* % of the traffic beside *stable*, or all of it if *stable* is None.

    The gateway and the domain of mode ``route`` are KServe's defaults.

    Raises:
        ConfigError: an argument for vLLM can't be passed through KServe.
    """
    shares = {stable: 100 - percent, release: percent} if stable else {release: 100}
    made = {each: predictor(endpoint, each, mode) for each in shares}
    names = {
        each: route_service(endpoint, each) if mode == "route" else f"{endpoint.name}-{predictor_name(each)}"
        for each in shares
    }
    if mode == "standard":
        canaries = [canary(made[release], percent)] if stable else []
        first = with_replicas(made[stable], replicas(made[release])) if stable else made[release]
        services = [inference_service(endpoint, first, mode, canaries=canaries)]
    elif mode == "knative":
        share = {PERCENT: min(percent, NEARLY_ALL)} if stable else {}
        services = [inference_service(endpoint, made[release] | share, mode)]
    else:
        services = [inference_service(endpoint, made[each], mode, name=names[each]) for each in shares]
        services.append(_route(endpoint, {f"{names[each]}-predictor": share for each, share in shares.items()}))
    scaled = shares if endpoint.settings.prometheus and mode != "knative" else ()
    scalers = [scaled_object(endpoint, each, f"{names[each]}-predictor") for each in scaled]
    return [*services, disruption_budget(endpoint), *scalers]


def _route(endpoint: KServeEndpoint, shares: dict[str, int]) -> Object:
    """Args: shares: percent by Service, the stable release's first."""
    installation = as_configured("route", endpoint.settings, {})
    hostname = installation.hostname(endpoint.name, endpoint.namespace)
    weights = [(service, SERVICE_PORT, percent) for service, percent in shares.items()]
    return http_route(endpoint, installation.gateway, hostname, weights)
