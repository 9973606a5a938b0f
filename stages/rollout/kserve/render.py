"""Renders what a rollout applies, for a person to read beforehand: the objects of any mode, without a cluster."""

from __future__ import annotations

from typing import Final

from stages.rollout.kserve.autoscaling import scaled_object
from stages.rollout.kserve.detect import as_configured
from stages.rollout.kserve.knative import NEARLY_ALL, PERCENT
from stages.rollout.kserve.llm_objects import cache, changed, llm_deployment, llm_name, llm_service
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

    The gateway and the domain of the modes ``route`` and ``llm`` are KServe's defaults.

    Raises:
        ConfigError: an argument for vLLM can't be passed through KServe.
    """
    shares = {stable: 100 - percent, release: percent} if stable else {release: 100}
    if mode == "llm":
        return _llm_objects(endpoint, shares)
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


def _llm_objects(endpoint: KServeEndpoint, shares: dict[str, int]) -> list[Object]:
    """Args: shares: percent by release, the stable one's first."""
    installation, settings = as_configured("llm", endpoint.settings, {}), endpoint.settings
    hostname = installation.hostname(endpoint.name, endpoint.namespace)
    group, scheduler = settings.llm.cache_nodes, settings.llm.scheduler
    copies = [cache(endpoint, each, group) for each in shares] if group else []
    made = {each: llm_service(endpoint, each, installation.gateway, hostname, scheduler=scheduler) for each in shares}
    first = next(iter(shares))
    services = [changed(endpoint, made[each], share, promoted=each == first) for each, share in shares.items()]
    scaled = shares if settings.prometheus else ()
    scalers = [scaled_object(endpoint, each, llm_deployment(llm_name(endpoint, each))) for each in scaled]
    return [*copies, *services, disruption_budget(endpoint), *scalers]


def _route(endpoint: KServeEndpoint, shares: dict[str, int]) -> Object:
    """Args: shares: percent by Service, the stable release's first."""
    installation = as_configured("route", endpoint.settings, {})
    hostname = installation.hostname(endpoint.name, endpoint.namespace)
    weights = [(service, SERVICE_PORT, percent) for service, percent in shares.items()]
    return http_route(endpoint, installation.gateway, hostname, weights)
