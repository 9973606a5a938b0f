"""How a platform serves: on this machine, or on KServe with the configuration's settings and the platform's nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.settings.config import RunConfig
from stages.parts.base.errors import ConfigError, UnknownName
from stages.parts.records.rollout import LOCAL
from stages.rollout.kserve.settings import KServe
from stages.rollout.target import connect

if TYPE_CHECKING:
    from stages.parts.base.serving_settings import AskedServing
    from stages.parts.base.store import ModelStore
    from stages.parts.cluster.kinds import Object
    from stages.rollout.kserve.move import Moved
    from stages.rollout.target import Target


def target_of(config: RunConfig, store: ModelStore, source: str, serving: AskedServing) -> Target:
    """Connect to where the platform serves the releases of one model. *source* is the model as the user named it."""
    return connect(config.platform.serves_on, store, source, serving, kserve_settings(config))


def moved(config: RunConfig, store: ModelStore, serving: AskedServing, mode: str) -> Moved:
    """Serve a model in another mode of KServe. Raises: as ``stages.rollout.kserve.move``; UnknownName, ConfigError."""
    from stages.parts.cluster.api import connect as connect_cluster
    from stages.rollout.kserve.move import movable_modes, move

    settings = _of_kserve(config)
    if mode not in (movable := movable_modes()):
        raise UnknownName("mode to move to", mode, movable)
    return move(connect_cluster(namespace=settings.namespace), store, serving, settings, mode)


def rendered(config: RunConfig, store: ModelStore, release: str, stable: str | None, mode: str) -> list[Object]:
    """Make the objects that the first step of a rollout of *release* beside *stable* applies to the platform's cluster.

    Raises: ConfigError: the platform is not a cluster, or the mode of its KServe is not known.
    """
    from stages.rollout.kserve.modes import MODES, render
    from stages.rollout.kserve.objects import KServeEndpoint

    settings = _of_kserve(config)
    if mode not in MODES:
        raise UnknownName("mode (no cluster is asked for its own)", mode, MODES)
    endpoint = KServeEndpoint(store, config.serving, settings, settings.namespace or "default")
    return render(endpoint, release, stable, mode, config.rollout.steps[0])


def _of_kserve(config: RunConfig) -> KServe:
    if config.platform.serves_on == LOCAL:
        raise ConfigError(
            f"the platform {config.platform.name} serves on this machine, not on KServe", hint="choose --platform"
        )
    return kserve_settings(config)


def kserve_settings(config: RunConfig) -> KServe:
    """Complete ``config.kserve`` with the platform's volume, namespace, nodes and, if it has no GPUs, image."""
    platform, settings = config.platform, config.kserve
    if platform.cluster is None:
        return settings
    changes: Object = {"claim": platform.claim, "namespace": settings.namespace or platform.namespace}
    if platform.stages.evaluate.gpus:
        nodes = platform.cluster.gpu
        changes["node_selector"] = nodes.selector | settings.node_selector
        changes["tolerations"] = (*nodes.tolerations, *settings.tolerations)
    else:
        changes["gpu"] = None
        if settings.image == KServe().image:  # it is for GPUs: the image that measured the release also serves it
            changes["image"] = platform.image_of("evaluate")
    return settings.model_copy(update=changes)
