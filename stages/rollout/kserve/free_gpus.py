"""Whether the GPUs for a release are free, before any pod of it exists: a pod that waits for one would end the rollout
only when its time to start is over, and a quota shows its refusal nowhere near the pods.
"""

from __future__ import annotations

import contextlib
from typing import Final

from stages.parts.base.errors import AccessDenied, NotEnoughGpus
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import NODES, QUOTAS
from stages.parts.cluster.nodes import admits, free
from stages.rollout.kserve.objects import KServeEndpoint
from stages.rollout.kserve.settings import Toleration

POOLS: Final = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "karpenter.sh/nodepool",
    "kubernetes.azure.com/agentpool",
)
"""Labels of nodes that a cloud provider adds when pods wait for them."""


def check_room(cluster: Cluster, endpoint: KServeEndpoint, release: str, *, present: int = 0) -> None:
    """Raise NotEnoughGpus unless ``scaling.minimum`` replicas of *release* get their GPUs, by the namespace's quotas
    and, where the caller may list nodes and pods, by the nodes that match. Nodes that a cloud may add are not counted
    on, nor held against it. The release has *present* pods already."""
    settings = endpoint.settings
    gpu, pods = settings.gpu, settings.scaling.minimum - present
    if gpu is None or pods <= 0:
        return
    gpus = endpoint.serving_of(release).tensor_parallel_size

    def check(missing: int, room: str) -> None:
        if missing > 0:
            raise NotEnoughGpus(
                f"{missing} GPUs are missing to serve {release} beside what is served: "
                f"{pods} replicas need {gpus} each, and {room}",
                hint="free some, raise the quota, or lower kserve.scaling.minimum; nothing was changed",
            )

    with contextlib.suppress(AccessDenied):
        for quota in cluster.list(QUOTAS)[0]:
            status, spec = quota.get("status", {}), quota.get("spec", {})
            hard = status.get("hard", spec.get("hard", {})).get(f"requests.{gpu}")
            if hard is not None and not spec.get("scopes") and not spec.get("scopeSelector"):  # it limits all pods
                left = int(hard) - int(status.get("used", {}).get(f"requests.{gpu}", 0))
                check(pods * gpus - left, f"the quota {quota['metadata']['name']} leaves {max(left, 0)}")
    with contextlib.suppress(AccessDenied):
        nodes = cluster.list(NODES)[0]
        if nodes and not any(label in node["metadata"].get("labels", {}) for node in nodes for label in POOLS):
            # Clusters may add a toleration for the taint that is called like the resource.
            tolerations = [toleration.model_dump() for toleration in (Toleration(key=gpu), *settings.tolerations)]
            pod = {"nodeSelector": settings.node_selector, "tolerations": tolerations}
            matching = [node for node in nodes if admits(node, pod)]
            left_on = [left for amounts in free(cluster, matching, [gpu]) if (left := int(amounts[gpu])) > 0]
            listed = ", ".join(map(str, left_on)) or "none"
            missing = (pods - sum(left // gpus for left in left_on)) * gpus
            check(missing, f"the {len(left_on)} nodes that match have {listed} free")
