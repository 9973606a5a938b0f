from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from pipeline.local.engine import render
from pipeline.local.workflow import parse
from pipeline.runs.expressions import holds
from pipeline.runs.expressions import parse as parse_condition
from pipeline.runs.graph import Graph
from pipeline.runs.state import Phase
from pipeline.settings.config import load
from pipeline.workflow.definition import workflow_template
from pipeline.workflow.parameters import arguments, resolve_key
from pipeline.workflow.stage_templates import RESULTS, RETRY_EXPRESSION
from scoring.profile import Profile
from stages.parts.base.errors import InvalidName
from stages.parts.base.optimize_settings import Optimize
from stages.parts.base.serving_settings import AskedServing
from stages.parts.base.workload import Workload


@pytest.fixture(scope="module")
def compiled():
    return on_this_machine()


def on_this_machine(*assignments):
    config = load(assignments=assignments)
    return workflow_template(config.model_copy(update={"platform": config.platform.on(cores=4, gpus=1)}))


def templates(compiled):
    return {each["name"]: each for each in compiled["spec"]["templates"]}


def tasks(compiled):
    return {each["name"]: each for each in templates(compiled)["pipeline"]["dag"]["tasks"]}


def test_the_tasks_depend_on_each_other_as_designed(compiled):
    depends = {name: task.get("depends", "") for name, task in tasks(compiled).items()}
    assert depends["resolve"] == ""
    assert depends["acquire"] == depends["check"] == "resolve"
    assert depends["optimize-fp16"] == "acquire"
    for variant in ("awq", "gptq", "int8"):
        assert depends[f"optimize-{variant}"] == "acquire && check"
    assert depends["select"] == "check && evaluate"
    assert depends["serve"] == "select"


def test_only_fp16_has_to_succeed(compiled):
    depends = tasks(compiled)["evaluate"]["depends"]
    assert depends.startswith("check && optimize-fp16 && (")
    assert "optimize-awq.Failed" in depends
    assert "optimize-gptq.Omitted" in depends


def test_a_variant_is_made_and_measured_as_check_says(compiled):
    assert "when" not in tasks(compiled)["optimize-fp16"]
    assert tasks(compiled)["optimize-int8"]["when"] == "{{tasks.check.outputs.parameters.int8}} == true"
    given = {each["name"]: each["value"] for each in tasks(compiled)["evaluate"]["arguments"]["parameters"]}
    assert given == {name: f"{{{{tasks.check.outputs.parameters.{name}}}}}" for name in ("variants", "serving")}
    check, evaluate = (templates(compiled)[name] for name in ("check", "evaluate"))
    assert check["container"]["image"] == evaluate["container"]["image"]


def test_one_template_fits_every_choice_of_variants_and_workload(compiled):
    others = [
        "optimize.variants=[fp16]",
        "optimize.variants=[fp16, int8]",
        "workload.budget_minutes=5",
        "workload.protocol=quick",
        "optimize.make_unservable=true",
    ]
    for assignment in others:
        other = on_this_machine(assignment)["spec"]
        assert other.pop("arguments") != compiled["spec"]["arguments"]
        assert other == {name: value for name, value in compiled["spec"].items() if name != "arguments"}


def test_evaluations_on_one_machine_wait_for_each_other(compiled):
    template = templates(compiled)["evaluate"]
    assert template["synchronization"]["mutexes"] == [{"name": "slipway-evaluation"}]
    assert template["container"]["resources"]["requests"]["cpu"] == "4"


def test_one_variants_failure_does_not_stop_its_siblings(compiled):
    assert templates(compiled)["pipeline"]["dag"]["failFast"] is False


def test_every_stage_has_a_limit_a_deadline_the_store_and_its_last_words(compiled):
    for name, template in templates(compiled).items():
        if "dag" in template:
            continue
        assert template["activeDeadlineSeconds"] > 0
        assert template["retryStrategy"]["limit"] == 3
        container = template["container"]
        others = {"optimize-rewrite": "optimize", "optimize-llm-compressor": "optimize", "candidates": "acquire"}
        program = others.get(name, name)
        assert container["command"] == ["python", "-m", f"stages.{program}"]
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert variables["SLIPWAY_STORE"] == mounts["store"]
        assert variables["SLIPWAY_OUTPUTS"] == mounts["outputs"]
        assert variables["SLIPWAY_RUN"] == "{{workflow.name}}"


@pytest.mark.parametrize(
    ("secret", "stages"),
    [
        ("HF_TOKEN", {"resolve", "acquire", "check", "candidates", "evaluate"}),
        ("SLIPWAY_API_KEY", {"serve", "ending"}),
        ("SLIPWAY_SIGNING_KEY", {"select"}),
        ("SLIPWAY_SIGNING_CERTIFICATE", {"select"}),
        ("MLFLOW_TRACKING_TOKEN", {"select", "serve", "ending"}),
    ],
)
def test_a_secret_is_a_reference_and_only_where_it_is_needed(compiled, secret, stages):
    with_secret = set()
    for name, template in templates(compiled).items():
        for variable in template.get("container", {}).get("env", []):
            if variable["name"] == secret:
                assert "value" not in variable
                assert variable["valueFrom"]["secretKeyRef"]["optional"] is True
                with_secret.add(name)
    assert with_secret == stages


def test_gpus_are_literal_numbers_as_the_crd_demands(compiled):
    for stage in ("optimize", "evaluate"):
        assert templates(compiled)[stage]["container"]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in templates(compiled)["select"]["container"]["resources"]["limits"]


def test_only_resolve_is_memoized_for_a_day(compiled):
    memoized = {name: each["memoize"] for name, each in templates(compiled).items() if "memoize" in each}
    assert set(memoized) == {"resolve-daily"}
    assert memoized["resolve-daily"]["maxAge"] == "24h"


def test_nothing_is_memoized_and_retried_for_argo_never_ends_such_a_run(compiled):
    assert not [name for name, each in templates(compiled).items() if "memoize" in each and "retryStrategy" in each]


def test_the_memoization_key_is_legal_for_argo_and_differs_by_what_it_stands_for():
    key = resolve_key("org/model_v1.0", "main")
    assert re.fullmatch(r"[a-zA-Z0-9][-a-zA-Z0-9]*", key)
    assert key == resolve_key("org/model_v1.0", "main")
    assert key != resolve_key("org/model_v1.0", "v2")
    assert key != resolve_key("org/model_v1.0", "main", refresh=True)
    assert resolve_key("./my-model", "main") != resolve_key("./my-model", "main")
    assert key != resolve_key("org/model_v1.0", "main", hub="http://mirror.example")


def test_the_submitters_hub_matters_on_this_machine_and_not_on_a_cluster(monkeypatch):
    keys = {}
    for hub in ("", "http://mirror.example"):
        monkeypatch.setenv("HF_ENDPOINT", hub)
        for platform in ("local", "kind"):
            given = arguments(load(chosen={"platform": platform}), "org/model", "main", serve=False)
            keys[platform, hub] = given["resolve-key"]
    assert keys["local", ""] != keys["local", "http://mirror.example"]
    assert keys["kind", ""] == keys["kind", "http://mirror.example"]


def test_the_local_engine_takes_the_compiled_manifest(compiled):
    workflow = parse(compiled)
    bound = workflow.bind(arguments(load(), "org/name", "main", serve=False))
    assert bound["serve"] == "false"
    assert bound["model-directory"] == "org--name"


def test_the_arguments_are_what_the_stages_parse():
    config = load(assignments=["optimize.group_size=32"])
    given = arguments(config, "org/name", "main", serve=True)
    assert Optimize.model_validate(json.loads(given["optimize"])) == config.optimize
    assert Workload.model_validate(json.loads(given["workload"])) == config.workload
    assert AskedServing.model_validate(json.loads(given["serving"])) == config.serving
    assert Profile.model_validate(json.loads(given["profile"])) == config.profile


@pytest.mark.parametrize("name", ["a/b/c", "org/../etc", "org/na me", "", "org/", "-x/--y", "a" * 97])
def test_an_invalid_model_name_is_refused(name):
    with pytest.raises(InvalidName):
        arguments(load(), name, "main", serve=False)


@pytest.mark.parametrize("platform", ["local", "kind", "eks", "gke", "aks", "onprem"])
def test_the_local_engine_knows_every_field_of_every_platforms_workflow(platform):
    workflow = parse(render(load(chosen={"platform": platform})))
    names = {name for name, _ in workflow.used()}
    assert names >= {"resolve.commit", "acquire", "optimize-fp16", "select", "serve", "onExit"}
    assert workflow.bind(arguments(load(), "org/name", "main", serve=True))["revision"] == "main"


def test_the_workflow_of_one_machine_has_no_field_of_a_cluster(compiled):
    spec = compiled["spec"]
    assert not {"securityContext", "serviceAccountName", "metrics", "ttlStrategy", "podGC"} & spec.keys()
    for template in templates(compiled).values():
        assert not {"nodeSelector", "tolerations", "metadata", "metrics", "securityContext"} & template.keys()
    variables = {each["name"] for each in templates(compiled)["evaluate"]["container"]["env"]}
    assert "HF_HOME" not in variables, "what was downloaded once is used again"


def test_the_winner_and_the_score_table_are_outputs_of_the_run(compiled):
    outputs = templates(compiled)["pipeline"]["outputs"]["parameters"]
    assert {each["name"]: each["valueFrom"]["parameter"] for each in outputs} == {
        name: f"{{{{tasks.select.outputs.parameters.{name}}}}}" for name in RESULTS
    }


def test_a_run_is_listed_under_its_model_with_where_its_report_is(compiled):
    said = compiled["spec"]["workflowMetadata"]["annotations"]
    assert said["workflows.argoproj.io/title"] == "{{workflow.parameters.model}}"
    assert "{{workflow.name}}/report.html" in said["workflows.argoproj.io/description"]


def test_metrics_of_one_name_have_labels_of_one_kind():
    compiled = render(load(chosen={"platform": "gke"}))
    labels: dict[str, Any] = {}
    for part in [compiled["spec"], *(each for each in templates(compiled).values() if "metrics" in each)]:
        for metric in part["metrics"]["prometheus"]:
            keys = [each["key"] for each in metric["labels"]]
            assert labels.setdefault(metric["name"], keys) == keys
            assert all(each["value"] for each in metric["labels"])
    assert labels["slipway_stage_duration_seconds"] == ["stage", "variant", "status"]
    assert labels["slipway_runs_total"] == ["status"]


def test_on_a_cluster_the_rollouts_steps_are_tasks_with_an_optional_approval():
    compiled = render(load(chosen={"platform": "gke"}, assignments=["rollout.steps=[5, 100]"]))
    chain = ["select", "deploy", "canary-5", "approve", "canary-100", "serve"]
    found = tasks(compiled)
    graph = Graph.of({name: task.get("depends", "") for name, task in found.items()})
    succeeded: dict[str, Phase] = dict.fromkeys(found, "Succeeded")
    for before, name in pairwise(chain):
        assert graph.may_run(name, succeeded)
        assert not graph.may_run(name, succeeded | {before: "Failed"})
        assert not graph.may_run(name, succeeded | {before: "Omitted"})
    assert graph.may_run("canary-100", succeeded | {"approve": "Skipped"})
    assert graph.may_run("serve", succeeded | {"canary-5": "Skipped", "approve": "Omitted", "canary-100": "Omitted"})
    assert found["canary-5"]["when"] == "{{tasks.deploy.outputs.parameters.compared}} == true"
    given = {
        name: {each["name"]: each["value"] for each in found[name].get("arguments", {}).get("parameters", [])}
        for name in chain
    }
    assert [given[name].get("step") for name in chain[1:]] == ["deploy", "5", None, "100", "promote"]
    assert [name for name in chain if given[name].get("approved") == "true"] == ["canary-100", "serve"]
    assert "suspend" in templates(compiled)["approve"]
    assert "{{workflow.parameters.approval}} == true" in found["approve"]["when"]
    assert arguments(load(assignments=["rollout.approval=true"]), "org/name", "main", serve=True)["approval"] == "true"


@pytest.mark.parametrize(
    ("code", "message", "again"),
    [
        ("137", "The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi. Container", True),
        ("-1", "The node had condition: [DiskPressure]. ", True),
        ("-1", "Pod was rejected: Node didn't have enough resource: cpu, requested: 1000, used: 1900", True),
        ("-1", "Pod was terminated in response to imminent node shutdown.", True),
        ("137", "OOMKilled (exit code 137)", False),
        ("137", "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi.", False),
        ("-1", "Pod was active on the node longer than the specified deadline", False),
    ],
)
def test_a_pod_that_the_kubelet_ends_for_its_nodes_sake_is_retried(code, message, again):
    failed = {"lastRetry.exitCode": code, "lastRetry.status": "Failed", "lastRetry.message": message}
    assert holds(parse_condition(RETRY_EXPRESSION, "expression"), failed.__getitem__) is again


def test_a_run_that_fails_leaves_no_canary_and_always_a_report(compiled):
    # Not a DAG: of a stopped run Argo begins no second task of one.
    last = templates(compiled)[compiled["spec"]["onExit"]]["container"]
    assert last["command"] == ["python", "-m", "stages.ending"]
    assert last["args"][last["args"].index("--status") + 1] == "{{workflow.status}}"


def test_withdrawing_has_as_much_time_as_rolling_out(compiled):
    found = templates(compiled)
    forward = found["rollout" if "rollout" in found else "serve"]
    assert found["ending"]["activeDeadlineSeconds"] == forward["activeDeadlineSeconds"]
