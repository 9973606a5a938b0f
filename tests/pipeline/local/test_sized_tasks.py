"""A task whose resources are an earlier task's outputs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hera.workflows import Task

from pipeline.local.resources import MachineResources
from stages.parts.base.errors import ConfigError
from tests.pipeline.local.local_bench import Bench, dag

GPU = "nvidia.com/gpu"


def patch(amount: str, **changes: Any) -> str:
    resources = {"requests": {GPU: amount}, "limits": {GPU: amount}}
    return json.dumps({"containers": [{"name": "main", "resources": resources}], **changes})


def sized(bench: Bench, gpus: str, pod_spec_patch: str = patch("{{inputs.parameters.gpus}}")) -> Any:
    """``plan`` says how many GPUs ``work`` gets; ``work`` writes down which ones it has."""
    bench.capacity = MachineResources(cores=4, memory_bytes=8 << 30, gpus=("0", "1", "2"))
    with bench.workflow() as workflow:
        plan = bench.program("plan", f"output('gpus', {gpus!r})", outputs=["gpus"])
        work = bench.program(
            "work", "write('had', os.environ['CUDA_VISIBLE_DEVICES'])", inputs=["gpus"], pod_spec_patch=pod_spec_patch
        )
        with dag(name="main"):
            given = {"gpus": "{{tasks.plan.outputs.parameters.gpus}}"}
            Task(name="plan", template=plan) >> Task(name="work", template=work, arguments=given)
    return workflow


def test_a_task_gets_as_many_gpus_as_an_earlier_one_says(bench: Bench) -> None:
    assert bench.run(sized(bench, "2")).phase == "Succeeded"
    assert (bench.store / "had").read_text() == "0,1"


@pytest.mark.parametrize(
    ("gpus", "said"),
    [("4", "the task asks for 4 GPUs, this machine has 3"), ("many", "'many' is not a Kubernetes quantity")],
)
def test_a_task_that_asks_for_what_is_not_there_ends_as_error(bench: Bench, gpus: str, said: str) -> None:
    state = bench.run(sized(bench, gpus))
    assert (state.phase, state.node("work").phase) == ("Error", "Error")
    assert said in state.node("work").message


@pytest.mark.parametrize(
    ("pod_spec_patch", "said"),
    [
        (patch("4"), "asks for 4 GPUs, this machine has 3"),
        ("containers: []", "not JSON"),
        (patch("1", nodeName="n"), "podSpecPatch.nodeName: unknown field"),
        (
            json.dumps({"containers": [{"name": "main", "image": "x"}]}),
            "podSpecPatch.containers.0.image: unknown field",
        ),
        (json.dumps({"containers": [{"name": "wait"}]}), "Input should be 'main'"),
    ],
)
def test_a_patch_that_cannot_be_applied_is_refused_before_anything_runs(
    bench: Bench, pod_spec_patch: str, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        bench.run(sized(bench, "1", pod_spec_patch))
    assert said in str(refused.value)
    assert not bench.run_dir.exists()
