"""Platforms: files that extend another one, and what a stage's pod gets of them."""

from __future__ import annotations

import pytest

from pipeline.config import load
from stages.parts.base.errors import ConfigError

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
    assert chosen.stages.evaluate.gpus == 1
    assert not chosen.stages.evaluate.spot


def test_a_stage_without_a_gpu_runs_on_any_node():
    chosen = load(chosen={"platform": "gke"}).platform
    assert chosen.nodes_of(chosen.stages.select).selector == {}
    assert chosen.nodes_of(chosen.stages.select).tolerations == ()
