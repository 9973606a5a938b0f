"""What the local engine needs of a workflow, its arguments and the machine before it runs anything."""

from __future__ import annotations

from typing import Any

import pytest
from hera.workflows import Parameter, Resources, Task, WorkflowTemplate, models

from pipeline.local.workflow import parse
from stages.parts.base.errors import ConfigError, UnknownName
from tests.pipeline.local.local_bench import Bench, dag, retries


def manifest(bench: Bench, code: str = "write('ran')") -> dict[str, Any]:
    with bench.workflow() as workflow:
        program = bench.program("optimize", code, outputs=["digest"])
        with dag(name="main"):
            Task(name="first", template=program)
            Task(name="second", template=program, depends="first")
    made: dict[str, Any] = workflow.to_dict()
    return made


def test_fields_that_the_engine_does_not_run_are_all_named_and_nothing_runs(bench: Bench) -> None:
    made = manifest(bench)
    made["spec"]["parallelism"] = 1
    made["spec"]["templates"][0]["container"]["livenessProbe"] = {}
    with pytest.raises(ConfigError) as refused:
        bench.run(made)
    assert "spec.parallelism: unknown field" in str(refused.value)
    assert "spec.templates.0.container.livenessProbe: unknown field" in str(refused.value)
    assert not (bench.store / "ran").exists()


def test_how_large_a_pod_is_and_how_many_there_may_be_means_nothing_here(bench: Bench) -> None:
    made = manifest(bench, "output('digest', 1); write('ran')")
    made["spec"]["templates"][0]["podSpecPatch"] = '{"containers": [{"name": "main"}]}'
    semaphore = {"configMapKeyRef": {"name": "slipway-locks", "key": "gpu-pods"}}
    made["spec"]["templates"][0]["synchronization"] = {"semaphores": [semaphore]}
    assert bench.run(made).phase == "Succeeded"


def test_a_circle_of_tasks_is_shown(bench: Bench) -> None:
    made = manifest(bench)
    made["spec"]["templates"][1]["dag"]["tasks"][0]["depends"] = "second"
    with pytest.raises(ConfigError, match=r"first → second → first|second → first → second"):
        parse(made)


def test_a_submitted_workflow_runs_like_its_template(bench: Bench) -> None:
    made = manifest(bench, "output('digest', 1); write('ran')") | {"kind": "Workflow"}
    made["metadata"] = {"generateName": "bench-"}
    assert bench.run(made).phase == "Succeeded"


def arguments(bench: Bench) -> WorkflowTemplate:
    with bench.workflow(
        arguments=[
            Parameter(name="model"),
            Parameter(name="revision", value="main"),
            Parameter(name="method"),
        ]
    ) as workflow:
        program = bench.program(
            "say",
            "write('said', ' '.join(sys.argv[1:]))",
            arguments=[f"{{{{workflow.parameters.{name}}}}}" for name in ("model", "revision", "method")],
        )
        with dag(name="main"):
            Task(name="say", template=program)
    return workflow


def test_arguments_fill_the_workflows_parameters(bench: Bench) -> None:
    state = bench.run(arguments(bench), {"model": "org/it's {{workflow.name}}", "method": "gptq"})
    assert bench.lines("said") == ["org/it's {{workflow.name}} main gptq"]
    assert state.arguments == {"model": "org/it's {{workflow.name}}", "revision": "main", "method": "gptq"}


def test_missing_arguments_are_all_named(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r"model: needs a value\n.*method: needs a value"):
        bench.run(arguments(bench))


def test_an_argument_that_no_parameter_takes_is_named(bench: Bench) -> None:
    with pytest.raises(UnknownName, match="unknown workflow parameter 'modle'") as caught:
        bench.run(arguments(bench), {"modle": "x"})
    assert "did you mean 'model'" in caught.value.hint


def test_more_gpus_than_there_are_is_refused_before_anything_runs(bench: Bench) -> None:
    with bench.workflow() as workflow:
        first = bench.program("first", "write('ran')")
        second = bench.program("second", resources=Resources(gpus=1))
        with dag(name="main"):
            Task(name="resolve", template=first) >> Task(name="evaluate-awq", template=second)
    with pytest.raises(ConfigError, match="evaluate-awq asks for 1 GPU, this machine has 0"):
        bench.run(workflow)
    assert not (bench.store / "ran").exists()


def test_a_claim_without_a_local_folder_is_refused(bench: Bench) -> None:
    made = manifest(bench)
    for mount in made["spec"]["templates"][0]["container"]["volumeMounts"]:
        mount["mountPath"] = mount["mountPath"].replace("/mnt/store", "/mnt/other")
    with pytest.raises(ConfigError, match="first mounts volume 'store' at /mnt/other, and no local folder"):
        bench.run(made)


def test_a_retry_strategy_as_hera_writes_it_is_read(bench: Bench) -> None:
    with bench.workflow() as workflow:
        backoff = models.Backoff(duration="1m", factor="2")
        program = bench.program("work", retry_strategy=retries(limit="3", backoff=backoff))
        with dag(name="main"):
            Task(name="work", template=program)
    strategy = parse(workflow.to_dict()).templates["work"].retry_strategy
    assert strategy is not None
    assert (strategy.limit, strategy.backoff.duration, strategy.backoff.factor) == (3, 60, 2)
