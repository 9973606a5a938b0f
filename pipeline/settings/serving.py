"""How a platform serves: on this machine, or on KServe with the configuration's settings and the platform's nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, get_args

from pipeline.settings.config import RunConfig
from stages.parts.base.errors import ConfigError, UnknownName
from stages.parts.records.rollout import LOCAL
from stages.rollout.connect import connect
from stages.rollout.kserve.settings import KServe

if TYPE_CHECKING:
    from stages.parts.base.serving_settings import AskedServing
    from stages.parts.base.store import ModelStore
    from stages.rollout.kserve.move import Moved
    from stages.rollout.target import Target


def target_of(config: RunConfig, store: ModelStore, source: str, serving: AskedServing) -> Target:
    """Where the platform serves the releases of one model. *source* is the model as the user named it.

    Raises: as ``stages.rollout.connect.connect``.
    """
    return connect(config.platform.serves_on, store, source, serving, kserve_settings(config))


def moved(config: RunConfig, store: ModelStore, serving: AskedServing, mode: str) -> Moved:
    """Serve a model in another mode of KServe.

    Raises:
        ConfigError: the platform is not a cluster, or there is no such mode; else as ``stages.rollout.kserve.move``.
    """
    from stages.parts.cluster.api import connect as connect_cluster
    from stages.rollout.kserve.move import MOVABLE, move

    if config.platform.serves_on == LOCAL:
        raise ConfigError(f"the platform {config.platform.name} does not serve on KServe", hint="choose --platform")
    if mode not in MOVABLE:
        raise UnknownName("mode to move to", mode, MOVABLE)
    settings = kserve_settings(config)
    return move(connect_cluster(namespace=settings.namespace), store, serving, settings, mode)


def rendered(config: RunConfig, store: ModelStore, release: str, stable: str | None, mode: str) -> list[dict[str, Any]]:
    """The objects that the first step of a rollout of *release* beside *stable* applies to the platform's cluster.

    Raises:
        ConfigError: the platform is not a cluster, or the mode of its KServe is not known.
    """
    from stages.rollout.kserve.objects import KServeEndpoint, Mode
    from stages.rollout.kserve.render import objects

    if config.platform.serves_on == LOCAL:
        raise ConfigError(
            f"the platform {config.platform.name} serves on this machine: nothing is applied",
            hint="choose another with --platform",
        )
    if mode not in (modes := get_args(Mode)):
        raise UnknownName("mode (no cluster is asked for its own)", mode, modes)
    settings = kserve_settings(config)
    endpoint = KServeEndpoint(store, config.serving, settings, settings.namespace or "default")
    return objects(endpoint, release, stable, cast(Mode, mode), config.rollout.steps[0])


def kserve_settings(config: RunConfig) -> KServe:
    """``config.kserve`` with the platform's volume, namespace, nodes and, where it has no GPUs, image."""
    platform, settings = config.platform, config.kserve
    if platform.cluster is None:
        return settings
    nodes, on_gpu = platform.cluster.gpu, bool(platform.stages.evaluate.gpus)
    changed = {
        "claim": platform.claim,
        "namespace": settings.namespace or platform.namespace,
        "gpu": settings.gpu if on_gpu else None,
        # vLLM's own image is for GPUs: without one, the image that measured the release also serves it.
        "image": settings.image if on_gpu or settings.image != KServe().image else platform.image_of("evaluate"),
        "node_selector": {**(nodes.selector if on_gpu else {}), **settings.node_selector},
        "tolerations": (
            *(nodes.tolerations if on_gpu else ()),
            *settings.tolerations,
        ),
    }
    return settings.model_copy(update=changed)
