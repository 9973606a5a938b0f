"""Which of KServe's modes a cluster uses, and the target in that mode."""

from __future__ import annotations

from typing import Final

from stages.parts.base.errors import NotInstalled
from stages.parts.base.settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.cluster import api
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import Kind
from stages.parts.cluster.refusals import Absent
from stages.rollout.kserve.detect import detect
from stages.rollout.kserve.knative import KnativeTarget
from stages.rollout.kserve.objects import RUNTIME, KServeEndpoint
from stages.rollout.kserve.route import RouteTarget
from stages.rollout.kserve.settings import KServe
from stages.rollout.kserve.standard import StandardTarget
from stages.rollout.kserve.target import KServeTarget

MODES: Final[dict[str, type[KServeTarget]]] = {
    "standard": StandardTarget,
    "knative": KnativeTarget,
    "route": RouteTarget,
}
RUNTIMES: Final = Kind("serving.kserve.io/v1alpha1", "ServingRuntime", "servingruntimes")
POLL_S: Final = 0.5


def connect(store: ModelStore, serving: Serving, settings: KServe) -> KServeTarget:
    """The cluster of the kubeconfig or of this pod, for the releases of one model.

    Raises:
        ConfigError: no cluster is configured, or its KServe can't split traffic as it is set up.
        NotInstalled: it has no KServe, or lacks the runtime in ``manifests/kserve``.
    """
    return on(api.connect(namespace=settings.namespace), store, serving, settings)


def on(
    cluster: Cluster, store: ModelStore, serving: Serving, settings: KServe, *, poll_s: float = POLL_S
) -> KServeTarget:
    """The target on *cluster*, in the mode of its KServe.

    Raises:
        NotInstalled: it has no KServe, or lacks the runtime in ``manifests/kserve``.
        ConfigError: its KServe can't split traffic as it is set up.
    """
    installation = detect(cluster, settings)
    endpoint = KServeEndpoint(store, serving, settings, cluster.namespace)
    try:
        cluster.get(RUNTIMES, RUNTIME)
    except Absent as error:
        raise NotInstalled(
            f"the namespace {cluster.namespace} has no ServingRuntime {RUNTIME}",
            hint=f"kubectl -n {cluster.namespace} apply -k manifests/kserve",
        ) from error
    return MODES[installation.mode](cluster, endpoint, installation, poll_s)
