"""Every pod as it is rendered meets Kubernetes' Pod Security Standard *restricted*.

https://kubernetes.io/docs/concepts/security/pod-security-standards/
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.cluster.manifests import MANIFESTS, TRIGGERS, clusters, for_triggers
from pipeline.settings.config import kserve_settings, load
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.rollout.kserve.modes import MODES, mode_named
from stages.rollout.kserve.objects import KServeEndpoint
from tests.platforms import documents

Pod = dict[str, Any]
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
PROFILES = ("RuntimeDefault", "Localhost")
RELEASES = {"0001-fp16-aaaaaaaaaaaa": 90, "0002-awq-bbbbbbbbbbbb": 10}


def violations(pod: Pod) -> list[str]:
    """What the standard forbids of a pod's specification."""
    security = pod.get("securityContext") or {}
    wrong = [name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    wrong += [f"volume {each['name']}" for each in pod.get("volumes", []) if not {*each} - {"name"} <= VOLUMES]
    wrong += ["sysctls"] if security.get("sysctls") else []  # a few are allowed; we need none
    containers = [each for kind in ("initContainers", "containers") for each in pod.get(kind, [])]
    assert containers, "no container was found"
    for container in containers:
        own = container.get("securityContext") or {}
        capabilities = own.get("capabilities") or {}
        rules = {
            "privileged": not own.get("privileged"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "capabilities": capabilities.get("drop") == ["ALL"]
            and {*capabilities.get("add", [])} <= {"NET_BIND_SERVICE"},
            "runAsNonRoot": own.get("runAsNonRoot", security.get("runAsNonRoot")) is True,
            "runAsUser": own.get("runAsUser", security.get("runAsUser")) != 0,
            "seccomp": (own.get("seccompProfile") or security.get("seccompProfile") or {}).get("type") in PROFILES,
            "procMount": own.get("procMount", "Default") == "Default",
            "hostPort": not any(port.get("hostPort") for port in container.get("ports", [])),
            "profiles": not {"seLinuxOptions", "appArmorProfile", "windowsOptions"} & {*own, *security},
        }
        wrong += [f"{container['name']}: {rule}" for rule, kept in rules.items() if not kept]
    return wrong


def pods_of_workflow(spec: dict[str, Any]) -> Iterator[Pod]:
    for template in spec["templates"]:
        if container := template.get("container"):
            yield {
                "securityContext": (spec.get("securityContext") or {}) | (template.get("securityContext") or {}),
                "volumes": [*spec.get("volumes", []), *(template.get("volumes") or [])],
                "initContainers": template.get("initContainers") or [],
                "containers": [
                    {"name": template["name"]} | container,
                    *(template.get("sidecars") or []),
                ],
            }


def pods_of(body: dict[str, Any]) -> list[Pod]:
    """The specifications of the pods that an object leads to."""
    spec, kind = body.get("spec", {}), body["kind"]
    if kind in ("WorkflowTemplate", "Workflow", "CronWorkflow"):
        workflow = spec.get("workflowSpec", spec)
        return [*pods_of_workflow(workflow)] if "templates" in workflow else []  # else it starts an installed template
    if kind in ("Deployment", "StatefulSet", "Job", "DaemonSet"):
        return [spec["template"]["spec"]]
    if kind == "CronJob":
        return [spec["jobTemplate"]["spec"]["template"]["spec"]]
    if kind in ("Sensor", "EventSource"):
        template = spec["template"]
        return [template | {"containers": [{"name": kind} | template["container"]]}]
    if kind == "LLMInferenceService":
        return [spec["template"]]
    if kind == "InferenceService":
        predictors = [spec["predictor"], *(each["predictor"] for each in spec.get("canary", []))]
        return [in_runtime(predictor) for predictor in predictors]
    assert "template" not in spec or kind == "HTTPRoute", f"{kind} has pods that this test does not know"
    return []


def in_runtime(predictor: Pod) -> Pod:
    """As KServe merges a predictor with its runtime."""
    runtime = yaml.safe_load((MANIFESTS / "kserve/serving-runtime.yaml").read_text())["spec"]
    (server,) = runtime["containers"]
    volumes = {each["name"]: each for each in [*runtime["volumes"], *predictor["volumes"]]}
    containers = [server | {"args": predictor["model"]["args"]}]
    return predictor | {"containers": containers, "volumes": [*volumes.values()]}


def served(folder: Path, mode: str, platform: str) -> list[dict[str, Any]]:
    config = load(chosen={"platform": platform})
    serving = Serving(max_model_len=128, signing="require", verification_key="/keys/signing.pub")
    at = KServeEndpoint(ModelStore(folder, "org/name"), serving, kserve_settings(config), namespace="slipway")
    return mode_named(mode).render(at, RELEASES)


@pytest.mark.parametrize("platform", clusters())
def test_every_pod_of_the_pipeline_is_restricted(platform: str) -> None:
    config = load(chosen={"platform": platform})
    bodies = [*documents(platform), *(body for trigger in TRIGGERS for body in for_triggers(trigger, config))]
    pods = [(body["metadata"]["name"], pod) for body in bodies for pod in pods_of(body)]
    assert len(pods) > 20
    assert not [(name, wrong) for name, pod in pods if (wrong := violations(pod))]


@pytest.mark.parametrize("mode", MODES)
def test_every_pod_that_serves_is_restricted(tmp_path: Path, mode: str) -> None:
    pods = [pod for body in served(tmp_path, mode, "gke") for pod in pods_of(body)]
    assert pods
    assert not [wrong for pod in pods if (wrong := violations(pod))]
    assert all(pod["initContainers"] for pod in pods)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda pod: pod.update(hostNetwork=True), "hostNetwork"),
        (lambda pod: pod["volumes"].append({"name": "host", "hostPath": {"path": "/"}}), "volume host"),
        (lambda pod: pod["containers"][0]["securityContext"].pop("seccompProfile"), "seccomp"),
        (lambda pod: pod["containers"][0]["securityContext"].update(runAsUser=0), "runAsUser"),
        (lambda pod: pod["containers"][0]["securityContext"].update(privileged=True), "privileged"),
        (
            lambda pod: pod["containers"][0]["securityContext"].update(capabilities={"add": ["CHOWN"]}),
            "capabilities",
        ),
        (lambda pod: pod["initContainers"][0].pop("securityContext"), "verify: runAsNonRoot"),
    ],
)
def test_what_the_standard_forbids_is_found(tmp_path: Path, change: Any, named: str) -> None:
    (first, *_) = served(tmp_path, "llm", "gke")
    (pod,) = pods_of(copy.deepcopy(first))
    change(pod)
    assert named in " ".join(violations(pod))
