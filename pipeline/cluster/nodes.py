"""Whether the cluster's nodes are large enough for what stages and endpoints ask for, whatever else runs there now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pipeline.argo.pending import UNITS, Amounts, shown, takes
from pipeline.runs.checks import CheckResult
from pipeline.settings.quantity import quantity
from pipeline.settings.serving import kserve_settings
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import NODES, Object
from stages.parts.records.rollout import KSERVE

if TYPE_CHECKING:
    from pipeline.settings.config import RunConfig
    from pipeline.settings.platform import Nodes

WHAT: Final = "nodes"
ENDPOINT: Final = "an endpoint"


def check(cluster: Cluster, config: RunConfig) -> CheckResult:
    nodes, _ = cluster.list(NODES)
    wrong: dict[str, list[str]] = {}
    for name, asks, where in _asked(config):
        if said := _lacking(nodes, asks, where):
            wrong.setdefault(said, []).append(name)
    if wrong:
        found = "; ".join(f"{', '.join(names)}: {said}" for said, names in wrong.items())
        hint = "fine if an autoscaler adds such nodes; else add some, or ask for less in the platform's file"
        return CheckResult(what=WHAT, state="warning", found=found, hint=hint)
    return CheckResult(what=WHAT, state="ok", found=f"{len(nodes)}, with room for each stage on one of them")


def _asked(config: RunConfig) -> Iterator[tuple[str, Amounts, Object]]:
    """Each stage's name, what its pod asks for as far as that is known before a model is, and where it may run."""
    platform = config.platform
    for name, stage in platform.stages:
        if stage:
            yield name, _amounts(stage.cpu, stage.memory, stage.gpus), _where(platform.nodes_of(stage))
    if platform.serves_on == KSERVE:
        serving = kserve_settings(config)
        parallel = config.serving.tensor_parallel_size
        gpus = (parallel if isinstance(parallel, int) else 1) if serving.gpu else 0
        where = {
            "nodeSelector": serving.node_selector,
            "tolerations": [toleration.model_dump() for toleration in serving.tolerations],
        }
        yield ENDPOINT, _amounts(serving.cpu, serving.memory, gpus), where


def _amounts(cpu: str, memory: str, gpus: int | str) -> Amounts:
    asked = {"cpu": cpu, "memory": memory, "nvidia.com/gpu": str(gpus)}
    return {name: quantity(text) for name, text in asked.items() if text not in ("auto", "0")}


def _where(nodes: Nodes) -> Object:
    return {
        "nodeSelector": nodes.selector,
        "tolerations": [toleration.model_dump() for toleration in nodes.tolerations],
    }


def _lacking(nodes: list[Object], asks: Amounts, where: Object) -> str:
    """Why no node has room for *asks*, however empty it is; empty if one has."""
    fitting = [_whole(each) for each in nodes if takes(each, where)]
    if any(all(node[name] >= amount for name, amount in asks.items()) for node in fitting):
        return ""
    if not fitting:
        selector = ", ".join(f"{key}={value}" for key, value in where["nodeSelector"].items()) or "its tolerations"
        return f"asks for {shown(asks)}; none of {len(nodes)} nodes matches {selector}"
    best = max(fitting, key=lambda node: min(node[name] / asks[name] for name in asks))
    return f"asks for {shown(asks)}; the largest node that matches has {shown({name: best[name] for name in asks})}"


def _whole(node: Object) -> Amounts:
    allocatable = node.get("status", {}).get("allocatable", {})
    return {name: quantity(str(allocatable.get(name, "0"))) for name in UNITS}
