"""Platforms: files that extend another one, and what a stage's pod gets of them."""

from __future__ import annotations

import pytest

from pipeline.cluster.manifests import documents_of
from pipeline.settings.config import load
from pipeline.workflow.definition import workflow_template
from stages.parts.base.errors import ConfigError
from stages.parts.base.log import LOG_VARIABLE
from stages.parts.machine.hardware import GPUS_VARIABLE

MINE = """\
extends: {base}
claim: mine
cluster:
  gpu_pods: 1
stages:
  evaluate: {{memory: 96Gi}}
"""


def platform(folder, text):
    file = folder / "mine.yaml"
    file.write_text(text)
    return load(chosen={"platform": str(file)}).platform


def test_a_users_platform_extends_a_shipped_one_field_by_field(tmp_path):
    ours, mine = load(chosen={"platform": "cluster"}).platform, platform(tmp_path, MINE.format(base="cluster"))
    assert (mine.name, mine.claim, mine.namespace) == ("mine", "mine", ours.namespace)
    assert mine.stages.evaluate == ours.stages.evaluate.model_copy(update={"memory": "96Gi"})
    assert mine.stages.optimize == ours.stages.optimize
    assert mine.cluster == ours.cluster.model_copy(update={"gpu_pods": 1})


def test_a_platform_can_extend_a_file_beside_it(tmp_path):
    (tmp_path / "near.yaml").write_text(
        "namespace: near\nimage: x\nclaim: y\nstages:\n"
        + "".join(
            f"  {stage}: {{cpu: '1', memory: 1Gi, deadline_s: 9}}\n"
            for stage in ("resolve", "acquire", "optimize", "evaluate", "select", "serve", "report")
        )
    )
    assert platform(tmp_path, "extends: near\nclaim: mine\n").namespace == "near"


@pytest.mark.parametrize("base", ["kind", "gke"])
def test_a_platform_can_extend_one_that_extends_another(tmp_path, base):
    shipped, mine = load(chosen={"platform": base}).platform, platform(tmp_path, f"extends: {base}\nclaim: mine\n")
    assert mine == shipped.model_copy(update={"name": "mine", "claim": "mine"})


def test_a_platform_can_extend_the_shipped_one_of_its_name_and_not_itself(tmp_path):
    (tmp_path / "kind.yaml").write_text("extends: kind\nclaim: mine\n")
    assert load(chosen={"platform": str(tmp_path / "kind.yaml")}).platform.claim == "mine"
    (tmp_path / "other.yaml").write_text("extends: mine\n")
    with pytest.raises(ConfigError, match="platform to extend 'mine'"):
        platform(tmp_path, "extends: other\n")


def test_an_extended_platform_must_exist(tmp_path):
    with pytest.raises(ConfigError, match="platform to extend 'clutser'") as error:
        platform(tmp_path, MINE.format(base="clutser"))
    assert "cluster" in str(error.value)


def test_all_cores_are_refused_on_a_cluster(tmp_path):
    with pytest.raises(ConfigError, match="one machine only: evaluate"):
        platform(tmp_path, "extends: cluster\nstages:\n  evaluate: {cpu: all}\n")


@pytest.mark.parametrize("name", ["eks", "gke", "aks", "onprem"])
def test_all_variants_are_measured_on_one_type_of_gpu(name):
    chosen = load(chosen={"platform": name}).platform
    assert chosen.nodes_of(chosen.stages.evaluate).selector
    assert chosen.stages.evaluate.gpus == "auto"
    assert chosen.stages.check.gpus == 1
    assert not chosen.stages.evaluate.spot


def test_a_stage_without_a_gpu_runs_on_any_node():
    chosen = load(chosen={"platform": "gke"}).platform
    assert chosen.nodes_of(chosen.stages.select).selector == {}
    assert chosen.nodes_of(chosen.stages.select).tolerations == ()


BEHIND_A_PROXY = """\
extends: kind
cluster:
  environment: {HF_ENDPOINT: "https://mirror.example:8443", NO_PROXY: .svc}
  certificates: trusted
  hub_ports: [443, 8443]
"""


def test_every_pod_of_a_stage_gets_the_platforms_variables_and_certificates(tmp_path):
    (tmp_path / "mine.yaml").write_text(BEHIND_A_PROXY)
    found = documents_of(load(chosen={"platform": str(tmp_path / "mine.yaml")}))
    specs = [each["spec"] for each in found if each["kind"] == "WorkflowTemplate" and "volumes" in each["spec"]]
    assert len(specs) > 1
    assert all({"name": "certificates", "configMap": {"name": "trusted"}} in each["volumes"] for each in specs)
    for template in (template for each in specs for template in each["templates"]):
        if container := template.get("container"):
            variables = {each["name"]: each.get("value") for each in container["env"]}
            assert variables["HF_ENDPOINT"] == "https://mirror.example:8443"
            assert variables["NO_PROXY"] == ".svc"
            mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}["certificates"]
            assert variables["SSL_CERT_FILE"] == variables["REQUESTS_CA_BUNDLE"] == f"{mounted}/ca.crt"
    (policy,) = (each for each in found if each["metadata"]["name"] == "stages-reach-the-hub")
    assert [each["port"] for each in policy["spec"]["egress"][0]["ports"]] == [443, 8443]


@pytest.mark.parametrize(
    ("variable", "why"),
    [
        ("HF_TOKEN: x", "would show HF_TOKEN to everyone"),
        ("HTTPS_PROXY: 'http://user:secret@proxy:3128'", "it has a password"),
        ("SLIPWAY_STORE: /elsewhere", "sets what Slipway or Argo set: SLIPWAY_STORE"),
    ],
)
def test_a_variable_that_is_secret_or_not_the_users_is_refused(tmp_path, variable, why):
    with pytest.raises(ConfigError, match=why):
        platform(tmp_path, f"extends: kind\ncluster:\n  environment: {{{variable}}}\n")


def test_each_task_of_a_cluster_keeps_a_log_of_its_own():
    template = workflow_template(load(chosen={"platform": "cluster"}))
    containers = [each["container"] for each in template["spec"]["templates"] if "container" in each]
    found = [each["value"] for container in containers for each in container["env"] if each["name"] == LOG_VARIABLE]
    assert len(found) == len(containers)
    assert "/mnt/models/{{workflow.parameters.model-directory}}/runs/{{workflow.name}}/logs/acquire.log" in found
    assert len([each for each in found if each.endswith("/optimize-{{inputs.parameters.method}}.log")]) == 3
    assert len(set(found)) == len(found) - 2


def test_a_pod_with_gpus_is_told_how_many_so_that_it_refuses_to_work_without():
    template = workflow_template(load(chosen={"platform": "gke"}))
    told = {
        each["name"]: [it["value"] for it in each["container"]["env"] if it["name"] == GPUS_VARIABLE]
        for each in template["spec"]["templates"]
        if "container" in each
    }
    literal = {name: ["1"] for name in ("check", "optimize", "optimize-llm-compressor")}
    gpus = literal | {"evaluate": ["{{inputs.parameters.gpus}}"]}
    assert {name: found for name, found in told.items() if found} == gpus
