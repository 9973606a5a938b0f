"""Whether the GPUs for a release are free, before any pod of it exists: a pod that waits for one would end the rollout
only when its time to start is over, and a quota shows its refusal nowhere near the pods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from stages.parts.base.errors import AccessDenied, NotEnoughGpus
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import NODES, PODS, QUOTAS, Object
from stages.rollout.kserve.objects import KServeEndpoint

POOLS: Final = (
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "karpenter.sh/nodepool",
    "kubernetes.azure.com/agentpool",
)
"""Labels of nodes that a cloud provider adds when pods wait for them."""
ENDED: Final = ("Succeeded", "Failed")


def check_room(cluster: Cluster, endpoint: KServeEndpoint, release: str, *, present: int = 0) -> None:
    """Whether ``scaling.minimum`` replicas of *release* get their GPUs, by the namespace's quotas and, where the caller
    may list nodes and pods, by the nodes that the selector matches. Nodes that a cloud may add are not counted on, nor
    held against it.

    Args:
        present: how many pods it has already.

    Raises:
        NotEnoughGpus: how many are missing, and where.
    """
    settings = endpoint.settings
    if settings.gpu is None:
        return
    each = endpoint.serving_of(release).tensor_parallel_size
    pods = settings.scaling.minimum - present
    if pods <= 0:
        return
    with contextlib.suppress(AccessDenied):
        for name, free in _quotas(cluster, settings.gpu):
            _check(release, pods * each - free, f"the quota {name} leaves {max(free, 0)}", pods, each)
    with contextlib.suppress(AccessDenied):
        nodes = cluster.list(NODES)[0]
        if nodes and not any(label in node["metadata"].get("labels", {}) for node in nodes for label in POOLS):
            free_on = _free(cluster, [node for node in nodes if _matches(node, settings.node_selector)], settings.gpu)
            room = sum(free // each for free in free_on)
            found = f"the {len(free_on)} nodes that match have {', '.join(map(str, free_on)) or 'none'} free"
            _check(release, (pods - room) * each, found, pods, each)


def _check(release: str, missing: int, found: str, pods: int, each: int) -> None:
    if missing > 0:
        raise NotEnoughGpus(
            f"{missing} GPUs are missing to serve {release} beside what is served: "
            f"{pods} replicas need {each} each, and {found}",
            hint="free some, raise the quota, or lower kserve.scaling.minimum; nothing was changed",
        )


def _quotas(cluster: Cluster, gpu: str) -> Iterator[tuple[str, int]]:
    """The name of each quota that limits GPUs of all pods, and what it leaves."""
    for each in cluster.list(QUOTAS)[0]:
        status, spec = each.get("status", {}), each.get("spec", {})
        hard = status.get("hard", spec.get("hard", {})).get(f"requests.{gpu}")
        if hard is not None and not spec.get("scopes") and not spec.get("scopeSelector"):
            yield each["metadata"]["name"], int(hard) - int(status.get("used", {}).get(f"requests.{gpu}", 0))


def _matches(node: Object, selector: dict[str, str]) -> bool:
    labels = node["metadata"].get("labels", {})
    return not node.get("spec", {}).get("unschedulable") and selector.items() <= labels.items()


def _free(cluster: Cluster, nodes: list[Object], gpu: str) -> list[int]:
    """The GPUs of each node that no pod has asked for."""
    free = {node["metadata"]["name"]: int(node["status"].get("allocatable", {}).get(gpu, 0)) for node in nodes}
    for pod in cluster.list(PODS, everywhere=True)[0]:
        name = pod["spec"].get("nodeName")
        if name in free and pod.get("status", {}).get("phase") not in ENDED:
            asked = (each.get("resources", {}).get("requests", {}) for each in pod["spec"]["containers"])
            free[name] -= sum(int(each.get(gpu, 0)) for each in asked)
    return [left for left in free.values() if left > 0]
