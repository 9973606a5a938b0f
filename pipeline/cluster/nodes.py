"""Whether the cluster's nodes are large enough for what stages and endpoints ask for, whatever else runs there now."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.argo.pending import UNITS, shown
from pipeline.runs.checks import Finding, ok, warning
from pipeline.settings.config import RunConfig
from pipeline.settings.platform import Nodes
from pipeline.settings.serving import kserve_settings
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import NODES, Object
from stages.parts.cluster.nodes import Amounts, admits, allocatable, quantity
from stages.parts.records.rollout import KSERVE
from stages.rollout.kserve.settings import KServe


def check(cluster: Cluster, config: RunConfig) -> Finding:
    """Check that each stage and an endpoint would fit on a node that is empty."""
    nodes, _ = cluster.list(NODES)
    names: dict[str, list[str]] = {}
    for name, requests, place in _pods(config):
        if why := _lacking(nodes, requests, place):
            names.setdefault(why, []).append(name)
    if names:
        text = "; ".join(f"{', '.join(pods)}: {why}" for why, pods in names.items())
        hint = "fine if an autoscaler adds such nodes; else add some, or ask for less in the platform's file"
        return warning(text, hint)
    return ok(f"{len(nodes)}, with room for each stage on one of them")


def _pods(config: RunConfig) -> Iterator[tuple[str, Amounts, Object]]:
    """Yield each stage's name, what its pod requests as far as that is known without a model, and where it may run."""
    platform = config.platform
    for name, stage in platform.stages:
        if stage:
            nodes = platform.nodes_of(stage)
            yield name, _amounts(stage.cpu, stage.memory, stage.gpus), _place(nodes.selector, nodes)
    if platform.serves_on == KSERVE:
        serving, parallel = kserve_settings(config), config.serving.tensor_parallel_size
        gpus = (parallel if isinstance(parallel, int) else 1) if serving.gpu else 0
        yield "an endpoint", _amounts(serving.cpu, serving.memory, gpus), _place(serving.node_selector, serving)


def _amounts(cpu: str, memory: str, gpus: int | str) -> Amounts:
    amounts = {"cpu": cpu, "memory": memory, "nvidia.com/gpu": str(gpus)}
    return {name: quantity(text) for name, text in amounts.items() if text not in ("auto", "0")}


def _place(selector: dict[str, str], tolerating: Nodes | KServe) -> Object:
    tolerations = [toleration.model_dump() for toleration in tolerating.tolerations]
    return {"nodeSelector": selector, "tolerations": tolerations}


def _lacking(nodes: list[Object], requests: Amounts, place: Object) -> str:
    """Say why no node has room for *requests*, however empty it is; return an empty text if one has."""
    sizes = [allocatable(node, UNITS) for node in nodes if admits(node, place)]
    if not sizes:
        selector = ", ".join(f"{key}={value}" for key, value in place["nodeSelector"].items()) or "its tolerations"
        return f"asks for {shown(requests)}; none of {len(nodes)} nodes matches {selector}"
    best = max(sizes, key=lambda size: min((size[name] / requests[name] for name in requests), default=1))
    if all(best[name] >= amount for name, amount in requests.items()):
        return ""
    largest = shown({name: best[name] for name in requests})
    return f"asks for {shown(requests)}; the largest node that matches has {largest}"
