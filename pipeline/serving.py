"""How a platform serves: on this machine, or on KServe with the configuration's settings and the platform's nodes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pipeline.config import RunConfig
from stages.rollout.kserve.settings import VARIABLE, KServe, Toleration
from stages.rollout.targets import LOCAL, connect

if TYPE_CHECKING:
    from stages.rollout.target import Target
    from stages.settings import Serving
    from stages.store import ModelStore


def target_of(config: RunConfig, store: ModelStore, source: str, serving: Serving) -> Target:
    """Where the platform serves the releases of one model. *source* is the model as the user named it.

    Raises: as ``stages.rollout.targets.connect``.
    """
    if config.platform.serves_on != LOCAL:
        os.environ[VARIABLE] = kserve_settings(config).model_dump_json()
    return connect(config.platform.serves_on, store, source, serving)


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
        # vLLM's own image is for GPUs: without one, what measured serves too.
        "image": settings.image if on_gpu or settings.image != KServe().image else platform.image_of("evaluate"),
        "node_selector": {**(nodes.selector if on_gpu else {}), **settings.node_selector},
        "tolerations": (
            *(Toleration.model_validate(each.model_dump()) for each in nodes.tolerations if on_gpu),
            *settings.tolerations,
        ),
    }
    return settings.model_copy(update=changed)
