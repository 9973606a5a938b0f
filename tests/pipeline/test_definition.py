from __future__ import annotations

import json
import re

import pytest

from pipeline.config import load
from pipeline.definition import REQUIRED_VARIANT, arguments, resolve_key, workflow_template
from pipeline.local.workflow import parse
from pipeline.submit import render
from scoring.profile import Profile
from stages.errors import InvalidName
from stages.settings import Optimize, Serving, Workload


@pytest.fixture(scope="module")
def compiled():
    config = load()
    return workflow_template(config.model_copy(update={"platform": config.platform.on(cores=4, gpus=1)}))


def templates(compiled):
    return {each["name"]: each for each in compiled["spec"]["templates"]}


def tasks(compiled):
    return {each["name"]: each for each in templates(compiled)["pipeline"]["dag"]["tasks"]}


def test_the_dag_is_the_one_of_the_design(compiled):
    depends = {name: task.get("depends", "") for name, task in tasks(compiled).items()}
    assert depends["resolve"] == ""
    assert depends["acquire"] == "resolve"
    for variant in ("fp16", "awq", "gptq"):
        assert depends[f"optimize-{variant}"] == "acquire"
        assert depends[f"evaluate-{variant}"] == f"optimize-{variant}"
    assert depends["serve"] == "select"


def test_only_fp16_has_to_succeed(compiled):
    depends = tasks(compiled)["select"]["depends"]
    assert REQUIRED_VARIANT == "fp16"
    assert "evaluate-fp16.Succeeded &&" in depends
    assert "evaluate-fp16.Failed" not in depends
    assert "evaluate-awq.Failed" in depends
    assert "evaluate-gptq.Omitted" in depends


def test_one_variants_failure_does_not_stop_its_siblings(compiled):
    assert templates(compiled)["pipeline"]["dag"]["failFast"] is False


def test_every_stage_has_a_limit_a_deadline_the_store_and_its_last_words(compiled):
    for name, template in templates(compiled).items():
        if name == "pipeline":
            continue
        assert template["activeDeadlineSeconds"] > 0
        assert template["retryStrategy"]["limit"] == 3
        container = template["container"]
        assert container["command"] == ["python", "-m", f"stages.{name}"]
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert variables["SLIPWAY_STORE"] == mounts["store"]
        assert variables["SLIPWAY_OUTPUTS"] == mounts["outputs"]
        assert variables["SLIPWAY_RUN"] == "{{workflow.name}}"


@pytest.mark.parametrize(
    ("secret", "stages"), [("HF_TOKEN", {"resolve", "acquire", "evaluate"}), ("SLIPWAY_API_KEY", {"serve"})]
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


def test_resolve_is_remembered_for_a_day_and_nothing_else_is(compiled):
    memoized = {name: each["memoize"] for name, each in templates(compiled).items() if "memoize" in each}
    assert set(memoized) == {"resolve"}
    assert memoized["resolve"]["maxAge"] == "24h"


def test_the_memoization_key_is_legal_for_argo_and_differs_by_what_it_stands_for(monkeypatch):
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    key = resolve_key("org/model_v1.0", "main")
    assert re.fullmatch(r"[a-zA-Z0-9][-a-zA-Z0-9]*", key)
    assert key == resolve_key("org/model_v1.0", "main")
    assert key != resolve_key("org/model_v1.0", "v2")
    assert key != resolve_key("org/model_v1.0", "main", refresh=True)
    assert resolve_key("./my-model", "main") != resolve_key("./my-model", "main")
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example")
    assert key != resolve_key("org/model_v1.0", "main")


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
    assert Serving.model_validate(json.loads(given["serving"])) == config.serving
    assert Profile.model_validate(json.loads(given["profile"])) == config.profile


def test_fewer_variants_make_a_smaller_dag():
    compiled = render(load(assignments=["optimize.variants=[fp16, gptq]"]))
    assert not [name for name in tasks(compiled) if name.endswith("-awq")]
    assert "awq" not in tasks(compiled)["select"]["depends"]


@pytest.mark.parametrize("name", ["a/b/c", "org/../etc", "org/na me", "", "org/", "-x/--y", "a" * 97])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(InvalidName):
        arguments(load(), name, "main", serve=False)
