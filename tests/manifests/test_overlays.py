"""The manifests that a cluster applies: made from configs/, whole, and no more than needed."""

from __future__ import annotations

import copy
import functools
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from pipeline.cluster.doctor import RIGHTS
from pipeline.cluster.manifests import MANIFESTS, clusters, documents_of, files
from pipeline.settings.config import load
from pipeline.workflow.definition import workflow_template
from stages.parts.base.errors import ConfigError, Degraded
from stages.parts.base.formats import FORMATS
from stages.parts.base.notify import MLFLOW
from stages.parts.base.settings import CONFIGS
from tests.platforms import documents

PLATFORMS = clusters()
SECRETS = {
    "HF_TOKEN",
    "SLIPWAY_API_KEY",
    "SLIPWAY_NOTIFY",
    "SLIPWAY_SIGNING_CERTIFICATE",
    "SLIPWAY_SIGNING_KEY",
    *MLFLOW,
}
SPOT = {
    "eks": {"karpenter.sh/capacity-type": "spot"},
    "gke": {"cloud.google.com/gke-spot": "true"},
    "aks": {"kubernetes.azure.com/scalesetpriority": "spot"},
}


def identity(document: dict[str, Any]) -> tuple[str, str, str]:
    metadata = document["metadata"]
    return document["kind"], metadata.get("namespace", ""), metadata["name"]


def by_identity(found: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    named = {identity(each): each for each in found}
    assert len(named) == len(found), "an object is there twice"
    return named


def of_kind(found: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in found if each["kind"] == kind}


@functools.cache
def applied(platform: str) -> list[dict[str, Any]]:
    return documents(platform)


@functools.cache
def workflow(platform: str, *assignments: str) -> dict[str, Any]:
    return workflow_template(load(chosen={"platform": platform}, assignments=assignments))


def stages(template: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in template["spec"]["templates"] if "container" in each}


def patched(document: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """RFC 6902, as far as it is used."""
    whole = copy.deepcopy(document)
    for operation in operations:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        place: Any = whole
        for part in parents:
            place = place[int(part) if isinstance(place, list) else part]
        key = int(last) if isinstance(place, list) else last
        if operation["op"] == "remove":
            del place[key]
        else:
            assert operation["op"] == "add" or key in (place if isinstance(place, dict) else range(len(place)))
            place[key] = operation["value"]
    return whole


def test_the_platforms_of_the_promise_are_there():
    assert set(PLATFORMS) == {"aks", "eks", "gke", "kind", "onprem"}


def test_the_committed_files_are_what_the_code_makes():
    for path, text in files().items():
        assert (MANIFESTS / path).read_text(encoding="utf-8") == text, f"{path} is old: make manifests"
    assert {path.name for path in (MANIFESTS / "overlays").iterdir()} == set(PLATFORMS)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_platform_is_one_file_of_at_most_twelve_lines(platform):
    lines = (CONFIGS / "platforms" / f"{platform}.yaml").read_text().splitlines()
    assert len([line for line in lines if line.strip() and not line.lstrip().startswith("#")]) <= 12


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_committed_patches_make_the_platform_of_the_base(platform):
    overlay = yaml.safe_load((MANIFESTS / "overlays" / platform / "kustomization.yaml").read_text())
    made = by_identity(applied("cluster"))
    for patch in overlay["patches"]:
        (key,) = (each for each in made if (each[0], each[2]) == (patch["target"]["kind"], patch["target"]["name"]))
        made[key] = patched(made[key], yaml.safe_load(patch["patch"]))
    assert made == by_identity(applied(platform))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_kustomize_gives_what_the_code_gives(platform):
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("needs kubectl, which brings kustomize")
    overlay = MANIFESTS / "overlays" / platform
    made = subprocess.run([kubectl, "kustomize", str(overlay)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert by_identity(list(yaml.safe_load_all(made.stdout))) == by_identity(applied(platform))


def test_a_namespace_of_ones_own_is_used_throughout():
    found = documents_of(load(chosen={"platform": "gke"}, assignments=["platform.namespace=ml"]))
    assert "slipway" not in {each["metadata"].get("namespace") for each in found}
    assert set(of_kind(found, "Namespace")) == {"ml"}
    for binding in of_kind(found, "RoleBinding").values():
        assert {each["namespace"] for each in binding["subjects"]} <= {"ml", "argo"}


def test_one_machine_applies_nothing():
    with pytest.raises(ConfigError, match="one machine"):
        documents("local")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_everything_that_is_named_is_there(platform):
    found = applied(platform)
    template = of_kind(found, "WorkflowTemplate")["slipway"]
    accounts = of_kind(found, "ServiceAccount")
    spec = template["spec"]
    named = {spec["serviceAccountName"], spec["executor"]["serviceAccountName"]}
    named |= {each["serviceAccountName"] for each in stages(template).values() if "serviceAccountName" in each}
    assert named <= set(accounts)
    tokens = {name: each["metadata"]["annotations"] for name, each in of_kind(found, "Secret").items()}
    assert tokens == {
        "slipway-executor.service-account-token": {"kubernetes.io/service-account.name": "slipway-executor"}
    }
    assert spec["podPriorityClassName"] in of_kind(found, "PriorityClass")
    claims = {each["persistentVolumeClaim"]["claimName"] for each in spec["volumes"] if "persistentVolumeClaim" in each}
    assert claims == set(of_kind(found, "PersistentVolumeClaim"))
    maps = of_kind(found, "ConfigMap")
    for stage in stages(template).values():
        for semaphore in stage.get("synchronization", {}).get("semaphores", []):
            reference = semaphore["configMapKeyRef"]
            assert int(maps[reference["name"]]["data"][reference["key"]]) > 0
    (memoize,) = (each["memoize"] for each in spec["templates"] if "memoize" in each)
    cache = maps[memoize["cache"]["configMap"]["name"]]
    assert cache["metadata"]["labels"]["workflows.argoproj.io/configmap-type"] == "Cache"
    assert cache["metadata"]["namespace"] == "argo"
    for binding in of_kind(found, "RoleBinding").values():
        assert binding["roleRef"]["name"] in of_kind(found, "Role")


def test_rights_are_few_and_of_one_namespace():
    found = applied("gke")
    assert not {"ClusterRole", "ClusterRoleBinding"} & {each["kind"] for each in found}
    roles = of_kind(found, "Role")
    assert roles["slipway-executor"]["rules"] == [
        {"apiGroups": ["argoproj.io"], "resources": ["workflowtaskresults"], "verbs": ["create", "patch"]}
    ]
    for role in roles.values():
        for rule in role["rules"]:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert "secrets" not in rule["resources"]
    bound = {subject["name"] for each in of_kind(found, "RoleBinding").values() for subject in each["subjects"]}
    assert "slipway-stages" not in bound


def test_whoever_submits_may_do_what_the_command_line_does():
    rules = of_kind(applied("gke"), "Role")["slipway-submitter"]["rules"]
    allowed = {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert {(group, resource, verb) for group, resource, verbs in RIGHTS for verb in verbs} <= allowed


@pytest.mark.parametrize("platform", PLATFORMS)
def test_secrets_are_referenced_and_never_included(platform):
    for document in applied(platform):
        if document["kind"] == "Secret":
            assert not {"data", "stringData"} & document.keys()
    for stage in stages(workflow(platform)).values():
        for variable in stage["container"]["env"]:
            assert ("value" in variable) != (variable["name"] in SECRETS)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_pod_is_hardened(platform):
    template = workflow(platform)
    pod = template["spec"]["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert (pod["runAsUser"], pod["runAsGroup"], pod["fsGroup"]) == (8737, 8737, 8737)
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert template["spec"]["automountServiceAccountToken"] is False
    for name, stage in stages(template).items():
        assert stage["container"]["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
        }
        assert stage.get("automountServiceAccountToken", False) is (name in ("rollout", "ending"))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_a_stage_writes_lies_on_a_volume(platform):
    template = workflow(platform)
    for name, stage in stages(template).items():
        volumes = {each["name"]: each for each in [*template["spec"]["volumes"], *stage.get("volumes", [])]}
        mounts = {each["mountPath"]: volumes[each["name"]] for each in stage["container"]["volumeMounts"]}
        assert {"/mnt/models", "/outputs", "/tmp", "/cache"} <= mounts.keys()
        places = {each["name"]: each["value"] for each in stage["container"]["env"] if "value" in each}
        for variable in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR"):
            assert places[variable].startswith("/cache")
        if name in ("optimize", "evaluate") and asks_for_gpus(stage):
            assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory", name


def asks_for_gpus(stage: dict[str, Any]) -> bool:
    return "nvidia.com/gpu" in stage["container"]["resources"].get("limits", {}) or "nvidia.com/gpu" in stage.get(
        "podSpecPatch", ""
    )


@pytest.mark.parametrize("platform", [name for name in PLATFORMS if name != "kind"])
def test_gpu_stages_get_gpu_nodes_of_one_type_and_no_other_stage_does(platform):
    found = stages(workflow(platform))
    gpu = {name for name, each in found.items() if asks_for_gpus(each)}
    assert gpu == {"optimize", "optimize-llm-compressor", "check", "evaluate"}
    spot = SPOT.get(platform, {})
    for name, stage in found.items():
        assert ("nodeSelector" in stage) == (name in gpu | {"optimize-rewrite"})
        assert ("tolerations" in stage) == (name in gpu | {"optimize-rewrite"})
        assert bool(stage.get("synchronization", {}).get("semaphores")) == (name in gpu)
    assert found["evaluate"]["nodeSelector"] == found["check"]["nodeSelector"]
    for name in ("optimize", "optimize-rewrite"):
        assert found[name]["nodeSelector"] == {**found["evaluate"]["nodeSelector"], **spot}
    assert not spot.items() & found["evaluate"]["nodeSelector"].items()
    assert found["optimize"]["container"]["image"].endswith("/slipway-optimize:0.3.0")
    assert found["evaluate"]["container"]["image"].endswith("/slipway-evaluate:0.3.0")


def test_kind_needs_no_gpu():
    for stage in stages(workflow("kind")).values():
        assert not asks_for_gpus(stage)
        assert not {"nodeSelector", "tolerations"} & stage.keys()
    images = {name: each["container"]["image"] for name, each in stages(workflow("kind")).items()}
    assert images["evaluate"] == "localhost/slipway-evaluate-cpu:0.3.0"
    assert images["select"] == "localhost/slipway-slim:0.3.0"


def test_images_are_of_the_projects_version():
    import tomllib

    version = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text())["project"]["version"]
    for platform in PLATFORMS:
        for stage in stages(workflow(platform)).values():
            assert stage["container"]["image"].endswith(f":{version}")


def test_what_only_rewrites_weights_is_made_beside_the_others_and_takes_no_gpu_from_them():
    template = workflow("gke")
    (dag,) = (each["dag"] for each in template["spec"]["templates"] if each["name"] == "pipeline")
    made = {task["name"]: task["template"] for task in dag["tasks"] if task["name"].startswith("optimize-")}
    light = {f"optimize-{name}" for name, record in FORMATS.items() if not record.quantizer.calibrated}
    assert light >= {"optimize-fp16", "optimize-int8", "optimize-fp8"}
    assert {name for name, template in made.items() if template == "optimize-rewrite"} == light
    apart = {f"optimize-{name}" for name, record in FORMATS.items() if record.environment}
    assert {name for name, template in made.items() if template == "optimize-llm-compressor"} == apart
    assert {made[name] for name in made.keys() - light - apart} == {"optimize"}
    plain, quantizing = (stages(template)[name]["container"] for name in ("optimize-rewrite", "optimize"))
    assert plain["command"] == quantizing["command"]
    assert plain["image"] == quantizing["image"]
    assert plain["resources"]["limits"] == {"memory": "4Gi"}


def test_a_queue_admits_gpu_stages_only():
    found = stages(workflow("gke", "platform.cluster.queue=gpus"))
    queued = {name for name, each in found.items() if "kueue.x-k8s.io/queue-name" in each["metadata"]["labels"]}
    assert queued == {"optimize", "optimize-llm-compressor", "check", "evaluate"}


def test_with_an_artifact_repository_the_report_is_an_artifact_as_it_is():
    template = workflow("gke", "platform.cluster.artifact_repository=reports")
    assert template["spec"]["artifactRepositoryRef"] == {"key": "reports"}
    (artifact,) = stages(template)["publish-report"]["outputs"]["artifacts"]
    assert artifact["archive"] == {"none": {}}
    assert artifact["path"].endswith("/runs/{{workflow.name}}/report.html")
    by_name = {each["name"]: each for each in template["spec"]["templates"]}
    (ending,), (publishing,) = by_name[template["spec"]["onExit"]]["steps"]
    assert ending["template"] == "ending"
    assert "continueOn" not in ending
    assert publishing["continueOn"] == {"error": True, "failed": True}
    assert "artifactRepositoryRef" not in workflow("gke", "platform.cluster.artifact_repository=default")["spec"]
    for without in ((), ("platform.cluster.artifact_repository=none",)):
        plain = workflow("gke", *without)
        assert plain["spec"]["onExit"] == "ending"
        assert "publish-report" not in stages(plain)


def test_each_stage_reaches_what_it_needs_and_no_more():
    found = applied("gke")
    reaches: dict[str, set[str]] = {name: set() for name in stages(of_kind(found, "WorkflowTemplate")["slipway"])}
    for name, policy in of_kind(found, "NetworkPolicy").items():
        if "Egress" in policy["spec"]["policyTypes"]:
            for stage, template in stages(of_kind(found, "WorkflowTemplate")["slipway"]).items():
                if selects(policy["spec"]["podSelector"], template["metadata"]["labels"]):
                    reaches[stage].add(name)
    everyone = {"stages-resolve-names", "pods-report-to-the-api-server"}
    for stage, policies in reaches.items():
        extra = (
            {"stages-reach-the-hub"} if stage in ("resolve", "acquire", "candidates", "check", "evaluate") else set()
        )
        extra |= {"serve-reaches-the-cluster"} if stage in ("rollout", "ending") else set()
        assert policies == everyone | extra
    nothing_in = of_kind(found, "NetworkPolicy")["nothing-comes-in"]["spec"]
    assert nothing_in == {"podSelector": {}, "policyTypes": ["Ingress"]}


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    for each in selector.get("matchExpressions", []):
        if each["key"] not in labels or (each["operator"] == "In" and labels[each["key"]] not in each["values"]):
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def test_the_nightly_run_waits_to_be_wanted_and_fits_the_workflow():
    found = applied("gke")
    spec = of_kind(found, "CronWorkflow")["slipway-nightly"]["spec"]
    assert (spec["suspend"], spec["concurrencyPolicy"]) == (True, "Forbid")
    assert spec["schedules"]
    nightly = of_kind(found, "WorkflowTemplate")[spec["workflowSpec"]["workflowTemplateRef"]["name"]]["spec"]
    asked = {each["name"] for each in nightly["arguments"]["parameters"]}
    assert asked == {each["name"] for each in spec["workflowSpec"]["arguments"]["parameters"]}
    (refresh,) = (each for each in nightly["templates"] if "resource" in each)
    submitted = yaml.safe_load(refresh["resource"]["manifest"])
    parameters = of_kind(found, "WorkflowTemplate")["slipway"]["spec"]["arguments"]["parameters"]
    needed = {each["name"] for each in parameters if "value" not in each}
    given = {each["name"] for each in submitted["spec"]["arguments"]["parameters"]}
    assert needed <= given <= {each["name"] for each in parameters}
    assert submitted["spec"]["workflowTemplateRef"] == {"name": "slipway"}


def test_the_watch_waits_to_be_wanted_and_may_only_roll_back():
    found = applied("gke")
    spec = of_kind(found, "CronWorkflow")["slipway-watch"]["spec"]
    assert (spec["suspend"], spec["concurrencyPolicy"], spec["schedules"]) == (True, "Forbid", ["*/5 * * * *"])
    templates = of_kind(found, "WorkflowTemplate")
    template = templates[spec["workflowSpec"]["workflowTemplateRef"]["name"]]["spec"]
    asked = {each["name"] for each in template["arguments"]["parameters"] if "valueFrom" not in each}
    assert asked == {each["name"] for each in spec["workflowSpec"]["arguments"]["parameters"]}
    (look,) = (each for each in template["templates"] if "container" in each)
    assert look["serviceAccountName"] == "slipway-watch"
    (tasks,) = (each["dag"]["tasks"] for each in template["templates"] if "dag" in each)
    rollback = next(task for task in tasks if task["name"] == "rollback")
    assert rollback["depends"] == "command.Failed"
    assert f"== {Degraded.exit_code} &&" in rollback["when"]
    other = templates[rollback["templateRef"]["name"]]["spec"]
    (goes_back,) = (each for each in other["templates"] if each["name"] == rollback["templateRef"]["template"])
    assert goes_back["serviceAccountName"] == "slipway-serve"
    assert goes_back["container"]["args"][-1] == "--rollback"
    assert {each["name"] for each in other["arguments"]["parameters"]} <= {
        each["name"] for each in template["arguments"]["parameters"]
    }
    reached = {
        name
        for name, policy in of_kind(found, "NetworkPolicy").items()
        if selects(policy["spec"]["podSelector"], look["metadata"]["labels"])
    }
    assert reached == {
        *("stages-resolve-names", "pods-report-to-the-api-server"),
        *("serve-reaches-the-cluster", "nothing-comes-in"),
    }


def test_endpoints_go_before_the_pipeline():
    found = applied("gke")
    priority = of_kind(found, "PriorityClass")["slipway-pipeline"]
    assert priority["value"] < 0
    assert priority["preemptionPolicy"] == "Never"
    assert of_kind(found, "ResourceQuota")["slipway"]["spec"]["hard"]["requests.nvidia.com/gpu"] == "8"
