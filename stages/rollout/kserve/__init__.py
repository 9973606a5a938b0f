"""Releases on a cluster: KServe's InferenceServices, in whichever of its modes the cluster runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stages.parts.base.settings import Serving
    from stages.parts.base.store import ModelStore
    from stages.rollout.target import Target


def connect(store: ModelStore, source: str, serving: Serving) -> Target:  # noqa: ARG001
    """The cluster of the kubeconfig or of this pod, for the releases of one model. See ``stages.rollout.targets``.

    Raises:
        ConfigError: there is no way to a cluster, or its KServe can't split traffic as it is set up.
        NotInstalled: it has no KServe.
    """
    from stages.parts.cluster.api import connect as cluster
    from stages.rollout.kserve.settings import given
    from stages.rollout.kserve.target import on

    settings = given()
    return on(cluster(namespace=settings.namespace), store, serving, settings)
