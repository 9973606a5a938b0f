"""What the local engine refuses, and how it says so: before anything runs, every mistake, each by its path."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hera.workflows import (
    Counter,
    Metrics,
    Parameter,
    Resources,
    Task,
    WorkflowTemplate,
    models,
)

from pipeline.local.manifest import CLUSTER_ONLY
from pipeline.local.workflow import parse
from stages.parts.base.errors import ConfigError, UnknownName, UnsupportedField
from tests.pipeline.local.local_bench import Bench, dag, retries

RETRY = {"limit": 1, "retryPolicy": "Always"}
MEMOIZE = {"key": "k", "cache": {"configMap": {"name": "x"}}}


def manifest(bench: Bench, code: str = "write('ran')") -> dict[str, Any]:
    with bench.workflow() as workflow:
        program = bench.program("optimize", code, outputs=["digest"])
        with dag(name="main"):
            Task(name="first", template=program)
            Task(name="second", template=program, depends="first")
    made: dict[str, Any] = workflow.to_dict()
    return made


def with_tasks(bench: Bench, *tasks: dict[str, Any], inputs: tuple[str, ...] = ()) -> dict[str, Any]:
    with bench.workflow() as workflow:
        bench.program("optimize", inputs=inputs, outputs=["digest"])
    made: dict[str, Any] = workflow.to_dict()
    made["spec"]["templates"].append({"name": "main", "dag": {"failFast": False, "tasks": list(tasks)}})
    return made


def test_every_unsupported_field_is_named_by_its_full_path_and_nothing_runs(bench: Bench) -> None:
    made = manifest(bench)
    spec = made["spec"]
    spec["templates"][0]["container"]["livenessProbe"] = {"exec": {"command": ["true"]}}
    spec["templates"][1]["dag"]["tasks"][1]["inline"] = {"container": {"command": ["true"]}}
    spec["podSpecPatch"] = "{}"
    spec["arguments"] = {"parameters": [{"name": "model", "valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}}]}
    with pytest.raises(UnsupportedField) as caught:
        bench.run(made)
    for path in (
        "spec.templates[optimize].container.livenessProbe: not supported here",
        "spec.templates[main].dag.tasks[second].inline: not supported here",
        "spec.podSpecPatch: not supported here",
        "spec.arguments.parameters[model].valueFrom: not supported here",
    ):
        assert path in str(caught.value)
    assert caught.value.exit_code == 50
    assert not (bench.store / "ran").exists()
    assert not bench.run_dir.exists()


def test_a_misspelled_field_gets_a_suggestion(bench: Bench) -> None:
    made = manifest(bench)
    made["spec"]["templates"][1]["dag"]["tasks"][1]["depend"] = "first"
    with pytest.raises(UnsupportedField, match="did you mean 'depends'"):
        parse(made)


@pytest.mark.parametrize("field", ["resource", "script", "http", "sidecars", "daemon", "timeout"])
def test_other_kinds_of_templates_are_refused_by_name(bench: Bench, field: str) -> None:
    made = manifest(bench)
    made["spec"]["templates"][0][field] = {}
    with pytest.raises(UnsupportedField, match=rf"spec\.templates\[optimize\]\.{field}: not supported"):
        parse(made)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("semaphores[0].database", [{"database": {"key": "gpus"}}]),
        ("semaphore", {"configMapKeyRef": {"name": "gpus", "key": "count"}}),
        ("mutex", {"name": "old"}),
    ],
)
def test_locks_in_databases_and_of_argo_3_are_refused(bench: Bench, field: str, value: Any) -> None:
    made = manifest(bench)
    made["spec"]["synchronization"] = {field.partition("[")[0]: value}
    with pytest.raises(UnsupportedField, match=rf"spec\.synchronization\.{re.escape(field)}: not supported"):
        parse(made)


def test_fields_that_only_a_cluster_needs_are_accepted(bench: Bench) -> None:
    with bench.workflow(
        service_account_name="slipway",
        pod_gc=models.PodGC(strategy="OnPodSuccess"),
        ttl_strategy=models.TTLStrategy(seconds_after_completion=60),
        security_context=models.PodSecurityContext(run_as_non_root=True),
        pod_metadata=models.Metadata(labels={"a": "b"}),
        workflow_metadata=models.WorkflowMetadata(labels={"a": "b"}),
        node_selector={"gpu": "yes"},
        priority=3,
        archive_logs=True,
        namespace="ml",
        labels={"a": "b"},
        annotations={"workflows.argoproj.io/title": "x"},
    ) as workflow:
        program = bench.program(
            "optimize",
            "write('ran')",
            image_pull_policy="Always",
            termination_message_policy="FallbackToLogsOnError",
            tolerations=[models.Toleration(key="nvidia.com/gpu", operator="Exists")],
            affinity=models.Affinity(),
            priority_class_name="low",
            metrics=Metrics(metrics=[Counter(name="runs", help="runs", value="1")]),
            labels={"stage": "optimize"},
        )
        with dag(name="main"):
            Task(name="only", template=program)
    made = workflow.to_dict()
    used = {field for field in made["spec"] if field in CLUSTER_ONLY["Spec"]}
    assert len(used) >= 8
    assert bench.run(made).phase == "Succeeded"
    assert (bench.store / "ran").exists()


REFUSED = [
    ("spec.parallelism", ["parallelism"], 2),
    ("spec.templates[main].parallelism", ["templates", 1, "parallelism"], 1),
    ("spec.templates[main].steps", ["templates", 1, "steps"], [[{"name": "a", "template": "optimize"}]]),
    ("spec.templates[main].dag.tasks[second].withParam", ["templates", 1, "dag", "tasks", 1, "withParam"], "[1]"),
    ("spec.templates[main].dag.tasks[second].withItems", ["templates", 1, "dag", "tasks", 1, "withItems"], [1]),
    (
        "spec.templates[main].dag.tasks[second].withSequence",
        ["templates", 1, "dag", "tasks", 1, "withSequence"],
        {"count": 2},
    ),
    (
        "spec.templates[main].dag.tasks[second].hooks",
        ["templates", 1, "dag", "tasks", 1, "hooks"],
        {"exit": {"template": "optimize"}},
    ),
    (
        "spec.templates[main].dag.tasks[second].continueOn",
        ["templates", 1, "dag", "tasks", 1, "continueOn"],
        {"failed": True},
    ),
    (
        "spec.templates[main].dag.tasks[second].dependencies",
        ["templates", 1, "dag", "tasks", 1, "dependencies"],
        ["first"],
    ),
    (
        "spec.templates[optimize].outputs.parameters[digest].valueFrom.expression",
        ["templates", 0, "outputs", "parameters", 0, "valueFrom"],
        {"expression": "'x'"},
    ),
    (
        "spec.templates[optimize].outputs.parameters[digest].valueFrom.supplied",
        ["templates", 0, "outputs", "parameters", 0, "valueFrom"],
        {"supplied": {}},
    ),
    (
        "spec.templates[optimize].outputs.parameters[digest].valueFrom.default",
        ["templates", 0, "outputs", "parameters", 0, "valueFrom"],
        {"path": "/outputs/x", "default": "1"},
    ),
    ("spec.templates[main].suspend.duration", ["templates", 1], {"name": "main", "suspend": {"duration": "10s"}}),
    (
        "spec.templates[optimize].retryStrategy.backoff.maxDuration",
        ["templates", 0, "retryStrategy"],
        {"limit": 1, "retryPolicy": "Always", "backoff": {"maxDuration": "1m"}},
    ),
]


@pytest.mark.parametrize(("field", "place", "value"), REFUSED, ids=[each[0] for each in REFUSED])
def test_parts_of_argo_that_our_workflows_do_not_use_are_refused_by_name(
    bench: Bench, field: str, place: list[str | int], value: Any
) -> None:
    made = manifest(bench)
    put(made, place, value)
    with pytest.raises(UnsupportedField, match=rf"{re.escape(field)}: not supported here"):
        bench.run(made)
    assert not bench.run_dir.exists()


def put(made: dict[str, Any], path: list[str | int], value: Any) -> None:
    place: Any = made["spec"]
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({"template": "missing"}, r"tasks\[a\]\.template: 'missing' is not a template"),
        ({"template": "main"}, r"spec\.templates\[main\]: it runs itself: main → main"),
        ({"depends": "b"}, "'a' depends on 'b', which is not a task"),
        ({"depends": "a"}, "in a circle: a → a"),
        ({"depends": "z.AnySucceeded"}, r"'z\.AnySucceeded': known results are Succeeded, .*, Omitted"),
        ({"depends": "z &&"}, "ends too early"),
        ({"when": "{{item}} == 1"}, r"tasks\[a\]\.when: {{item}} refers to nothing"),
        ({"when": "{{tasks.z.outputs.parameters.digest}} == x"}, r"tasks\[a\]\.when: {{tasks\.z\.outputs"),
        ({"when": "{{workflow.name}} ="}, r"tasks\[a\]\.when: when"),
        ({"when": "{{workflow.duration}} == 1"}, r"tasks\[a\]\.when: {{workflow\.duration}} refers to nothing"),
        ({"depends": "z", "when": "{{tasks.z.status}} == x"}, r"tasks\[a\]\.when: {{tasks\.z\.status}} refers"),
        (
            {
                "depends": "z",
                "arguments": {"parameters": [{"name": "in", "value": "{{tasks.z.outputs.parameters.no}}"}]},
            },
            r"{{tasks\.z\.outputs\.parameters\.no}} refers to nothing",
        ),
        ({"arguments": {"parameters": [{"name": "in", "value": "{{workflow.parameters.no}}"}]}}, "refers to nothing"),
        ({"arguments": {"parameters": [{"name": "in", "value": "{{=1+1}}"}]}}, r"expression template {{=1\+1}}"),
        ({"arguments": {"parameters": [{"name": "inn", "value": "1"}]}}, "has no input 'inn'"),
        ({}, "input 'in' of template 'optimize' needs a value"),
        ({"name": "onExit"}, "'onExit' is there twice"),
        ({"name": "z"}, "'z' is there twice"),
        ({"name": "a/b"}, r"tasks\[a/b\]\.name"),
    ],
)
def test_a_task_that_contradicts_itself_is_refused_before_anything_runs(
    bench: Bench, task: dict[str, Any], says: str
) -> None:
    value = {"parameters": [{"name": "in", "value": "x"}]}
    made = with_tasks(
        bench,
        {"name": "z", "template": "optimize", "arguments": value},
        {"name": "a", "template": "optimize", **task},
        inputs=("in",),
    )
    with pytest.raises((ConfigError, UnsupportedField), match=says):
        bench.run(made)
    assert not bench.run_dir.exists()


def test_a_circle_of_tasks_is_shown(bench: Bench) -> None:
    tasks = [{"name": name, "template": "optimize", "depends": on} for name, on in ("ab", "bc", "ca")]
    with pytest.raises(ConfigError, match=r"in a circle: [abc] → [abc] → [abc] → [abc]"):
        parse(with_tasks(bench, *tasks))


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["entrypoint"], "no", r"spec\.entrypoint: there is no template 'no'"),
        (["onExit"], "no", r"spec\.onExit: there is no template 'no'"),
        (["templates", 0, "container", "args"], ["{{inputs.parameters.no}}"], r"container: {{inputs\.parameters\.no}}"),
        (["templates", 0, "container", "args"], ["{{workflow.status}}"], r"container: {{workflow\.status}}"),
        (["templates", 0, "container", "command"], None, r"container\.command"),
        (
            ["templates", 0, "container", "resources"],
            {"requests": {"cpu": "two"}},
            "'two' is not a Kubernetes quantity",
        ),
        (["templates", 0, "container", "resources"], {"requests": {"x.io/fpga": "1"}}, "does not know"),
        (
            ["templates", 0, "container", "volumeMounts"],
            [{"name": "no", "mountPath": "/x"}],
            r"\[no\]: there is no such",
        ),
        (["templates", 0, "volumes"], [{"name": "v"}], "needs either emptyDir or persistentVolumeClaim"),
        (["templates", 0, "outputs", "parameters", 0, "valueFrom", "path"], "/tmp/x", "lies on no volume"),
        (["templates", 0, "retryStrategy"], {"retryPolicy": "Always"}, r"retryStrategy\.limit: Field required"),
        (["templates", 0, "retryStrategy"], {"limit": 1}, r"retryStrategy\.retryPolicy: Field required"),
        (["templates", 0, "retryStrategy"], {"limit": 1, "retryPolicy": "OnError"}, r"retryPolicy: Input"),
        (["templates", 0, "retryStrategy"], RETRY | {"expression": "retries == '1'"}, "'retries'; known: lastRetry"),
        (["templates", 0, "retryStrategy"], RETRY | {"expression": "lastRetry."}, "can't be read"),
        (["templates", 0, "retryStrategy"], RETRY | {"backoff": {"duration": "soon"}}, "not a duration"),
        (["templates", 0, "memoize"], {"key": "k", "cache": {"configMap": {"name": "../x"}}}, r"configMap\.name"),
        (["templates", 1, "memoize"], MEMOIZE, r"entrypoint: 'main' must be a dag template without inputs and memoize"),
        (["templates", 1, "retryStrategy"], RETRY, r"main\]\.retryStrategy: only on container templates"),
        (["templates", 1, "dag", "failFast"], True, r"dag\.failFast: Input should be False"),
        (["templates", 0, "suspend"], {}, r"needs exactly one of container, dag, suspend"),
        (
            ["templates", 1, "inputs"],
            {"parameters": [{"name": "x"}]},
            r"spec\.entrypoint: 'main' must be a dag template without inputs",
        ),
        (
            ["templates", 1, "outputs"],
            {"parameters": [{"name": "x", "valueFrom": {"path": "/x"}}]},
            r"outputs\.parameters\[x\]\.valueFrom\.path: not on a dag template",
        ),
        (
            ["templates", 1, "outputs"],
            {"parameters": [{"name": "x", "valueFrom": {"parameter": "{{tasks.no.outputs.parameters.x}}"}}]},
            r"valueFrom\.parameter: {{tasks\.no",
        ),
        (
            ["templates", 0, "outputs", "parameters", 0, "valueFrom"],
            {"path": "/mnt/store/x", "parameter": "{{inputs.parameters.x}}"},
            "exactly one of path and parameter",
        ),
        (["synchronization"], {"mutexes": [{"name": "{{workflow.parameters.no}}"}]}, r"spec\.synchronization: {{"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    bench: Bench, path: list[str | int], value: Any, says: str
) -> None:
    made = manifest(bench)
    put(made, path, value)
    with pytest.raises((ConfigError, UnsupportedField), match=says):
        bench.run(made)
    assert not bench.run_dir.exists()


def test_other_documents_are_refused(bench: Bench) -> None:
    made = manifest(bench) | {"kind": "CronWorkflow"}
    with pytest.raises(
        ConfigError, match=r"kind: Input should be 'WorkflowTemplate' or 'Workflow' \(got 'CronWorkflow'\)"
    ):
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
