"""Renders what a rollout applies, for a person to read beforehand, without a cluster."""

from __future__ import annotations

from stages.parts.cluster.kinds import Object
from stages.rollout.kserve.modes import mode_named
from stages.rollout.kserve.objects import KServeEndpoint


def objects(endpoint: KServeEndpoint, release: str, stable: str | None, mode: str, percent: int) -> list[Object]:
    """All objects while *release* has *percent* % of the traffic beside *stable*, or all of it if *stable* is None.

    Gateway and domain, where a mode names them, are KServe's defaults.

    Raises:
        ConfigError: an argument for vLLM can't be passed through KServe.
    """
    return mode_named(mode).render(endpoint, {stable: 100 - percent, release: percent} if stable else {release: 100})
