"""A release whose GPUs are not free is refused before anything of it exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stages.parts.base.errors import NotEnoughGpus
from stages.parts.base.serving_settings import Serving
from stages.parts.records.rollout import read_journal
from stages.parts.releases.release import Split
from stages.rollout.kserve.settings import Scaling, Toleration
from tests.stages.rollout.kserve.on_kserve import OnKServe
from tests.stages.rollout.kserve.test_kserve_rollout import MODES
from tests.stages.rollout.stage import GOOD, NEXT

GPU = "nvidia.com/gpu"


def quota(kserve: OnKServe, hard: int, used: int, **spec: Any) -> None:
    said = {"hard": {f"requests.{GPU}": str(hard)}, "used": {f"requests.{GPU}": str(used)}}
    metadata = {"name": "team", "namespace": "default"}
    body = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": metadata, "spec": spec, "status": said}
    kserve.server.put(body)


def node(kserve: OnKServe, name: str, gpus: int, labels: dict[str, str], used: int = 0) -> None:
    status = {"allocatable": {GPU: str(gpus)}}
    metadata = {"name": name, "labels": labels}
    kserve.server.put({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status})
    if used:
        container = {"name": "x", "resources": {"requests": {GPU: str(used)}}}
        spec = {"nodeName": name, "containers": [container]}
        place = {"name": f"on-{name}", "namespace": "kserve"}
        kserve.server.put({"apiVersion": "v1", "kind": "Pod", "metadata": place, "spec": spec})


@pytest.mark.parametrize("mode", MODES)
def test_a_canary_beyond_the_quota_is_refused_before_any_pod_of_it_exists(
    serve: Callable[..., OnKServe], mode: str
) -> None:
    kserve = serve(**MODES[mode])
    kserve.serving = Serving(tensor_parallel_size=4)
    kserve.first()
    before = read_journal(kserve.store)
    kserve.make(NEXT)
    quota(kserve, 7, 4)
    with pytest.raises(NotEnoughGpus) as refused:
        kserve.roll(NEXT)
    assert str(refused.value) == (
        f"1 GPUs are missing to serve {NEXT} beside what is served: 1 replicas need 4 each, and the quota team leaves 3"
    )
    assert refused.value.exit_code == 34
    assert kserve.kserve.started == [GOOD]
    assert kserve.connect().split() == Split(GOOD)
    assert read_journal(kserve.store) == before
    quota(kserve, 8, 4)
    assert kserve.roll(NEXT).state == "promoted"


def test_what_can_be_seen_of_the_nodes_counts(standard: OnKServe) -> None:
    standard.serving = Serving(tensor_parallel_size=2)
    target = standard.connect(node_selector={"gpu": "h100"}, scaling=Scaling(minimum=3))
    node(standard, "one", 8, {"gpu": "h100"}, used=5)
    node(standard, "two", 1, {"gpu": "h100"})
    node(standard, "other", 8, {"gpu": "l4"})
    with pytest.raises(NotEnoughGpus, match=r"^4 GPUs are missing .* the 2 nodes that match have 3, 1 free$"):
        target.check_room(GOOD)
    standard.server.forbidden |= {("list", "nodes")}
    target.check_room(GOOD)
    standard.server.forbidden.clear()
    node(standard, "cloud", 0, {"karpenter.sh/nodepool": "default"})
    target.check_room(GOOD)  # more nodes come when pods wait


def test_quotas_of_some_pods_only_and_releases_without_gpus_are_not_checked(standard: OnKServe) -> None:
    quota(standard, 1, 1, scopes=["BestEffort"])
    standard.connect().check_room(GOOD)
    quota(standard, 1, 1)
    standard.connect(gpu=None).check_room(GOOD)
    with pytest.raises(NotEnoughGpus):
        standard.connect().check_room(GOOD)


def test_a_tainted_node_counts_only_if_its_taint_is_tolerated_and_what_runs_first_counts(standard: OnKServe) -> None:
    """As for the pods of a run: one definition says what nodes have free."""
    node(standard, "tainted", 8, {})
    tainted = standard.server.find("Node", "tainted")
    standard.server.put(tainted | {"spec": {"taints": [{"key": "team", "value": "a", "effect": "NoSchedule"}]}})
    with pytest.raises(NotEnoughGpus, match="the 0 nodes that match have none free"):
        standard.connect().check_room(GOOD)
    tolerated = standard.connect(tolerations=(Toleration(key="team"),))
    tolerated.check_room(GOOD)
    first = {"name": "first", "resources": {"requests": {GPU: "8"}}}
    spec = {"nodeName": "tainted", "initContainers": [first], "containers": [{"name": "then"}]}
    place = {"name": "loading", "namespace": "kserve"}
    standard.server.put({"apiVersion": "v1", "kind": "Pod", "metadata": place, "spec": spec})
    with pytest.raises(NotEnoughGpus, match="have none free"):
        tolerated.check_room(GOOD)
