"""Installing on a cluster, and checking one."""

from __future__ import annotations

import json

import pytest

from pipeline.argo.engine import ArgoEngine
from pipeline.cluster.doctor import check_cluster, check_serving
from pipeline.cluster.install import install
from pipeline.runs.engine import Printout
from pipeline.settings.config import RunConfig, load
from pipeline.settings.platform import LOCKS
from pipeline.workflow.parameters import NAME, RESOLVE_CACHE
from stages.parts.base.errors import AccessDenied, Conflict, NotInstalled
from stages.parts.base.settings import parse
from stages.parts.cluster.api import Cluster
from stages.parts.cluster.kinds import CONFIG_MAPS
from stages.rollout.kserve.settings import KServe
from tests.kubernetes import KubernetesServer
from tests.kubernetes.objects import Object, Resource
from tests.pipeline.argo.argo_bench import PLATFORM, controller, definition, namespace, with_kserve


def argo_definitions(server: KubernetesServer, *cron_fields: str) -> None:
    for name in ("workflows", "workflowtemplates"):
        server.put(definition(f"{name}.argoproj.io", "entrypoint"))
    server.put(definition("cronworkflows.argoproj.io", *cron_fields))


def submit(cluster: Cluster, config: RunConfig, *, serve: bool) -> Printout:
    return ArgoEngine(cluster, check_serving, follow=False).start(config, "org/model", "main", serve=serve)


def test_everything_is_applied_once_and_again_changes_nothing(server, there, platform):
    first = install(there, platform, dry_run=False, force=False)
    assert {each.state for each in first} == {"created"}
    assert server.find("WorkflowTemplate", NAME, there.namespace)
    assert first[0].kind == "Namespace"
    second = install(there, platform, dry_run=False, force=False)
    assert {each.state for each in second} == {"unchanged"}
    assert server.mistakes == []


def test_a_dry_run_changes_nothing(server, there, platform):
    before = server.objects.version
    found = install(there, platform, dry_run=True, force=False)
    assert {each.state for each in found} == {"would be created"}
    assert server.objects.version == before


def test_a_field_that_somebody_else_changed_is_named_and_force_takes_it(server, there, platform):
    install(there, platform, dry_run=False, force=False)
    template = server.find("WorkflowTemplate", NAME, there.namespace)
    template["spec"]["onExit"] = "other"
    server.put(template, manager="kubectl-edit")
    with pytest.raises(Conflict, match=r"WorkflowTemplate slipway: .*kubectl-edit.*\.spec\.onExit") as conflict:
        install(there, platform, dry_run=False, force=False)
    assert "--force" in conflict.value.hint
    states = {each.name: each.state for each in install(there, platform, dry_run=False, force=True)}
    assert states[NAME] == "changed"
    assert server.find("WorkflowTemplate", NAME, there.namespace)["spec"]["onExit"] != "other"


def test_the_nightly_run_stays_as_people_set_it(server, there, platform):
    install(there, platform, dry_run=False, force=False)
    nightly = server.find("CronWorkflow", "slipway-nightly", there.namespace)
    models = {"parameters": [{"name": "models", "value": '["my/model"]'}, {"name": "revision", "value": "main"}]}
    nightly["spec"] |= {"suspend": False, "workflowSpec": nightly["spec"]["workflowSpec"] | {"arguments": models}}
    server.put(nightly, manager="kubectl-patch")
    for force in (False, True):
        assert {each.state for each in install(there, platform, dry_run=False, force=force)} == {"unchanged"}
    spec = server.find("CronWorkflow", "slipway-nightly", there.namespace)["spec"]
    assert (spec["suspend"], spec["workflowSpec"]["arguments"]) == (False, models)


def test_a_limit_that_somebody_patched_stays_until_install_is_forced(server, there, platform):
    install(there, platform, dry_run=False, force=False)
    locks = server.find("ConfigMap", LOCKS, there.namespace)
    server.put(locks | {"data": {"gpu-pods": "5"}}, manager="kubectl-patch")
    for dry_run in (False, True, False):
        changes = install(there, platform, dry_run=dry_run, force=False)
        assert {change.state for change in changes} == {"unchanged"}
        assert {change.name: change.reason for change in changes if change.reason} == {
            LOCKS: "gpu-pods stays 5, as somebody set it; --force sets 3"
        }
    assert server.find("ConfigMap", LOCKS, there.namespace)["data"] == {"gpu-pods": "5"}
    states = {change.name: change.state for change in install(there, platform, dry_run=False, force=True)}
    assert states[LOCKS] == "changed"
    assert server.find("ConfigMap", LOCKS, there.namespace)["data"] == {"gpu-pods": "3"}
    assert {change.state for change in install(there, platform, dry_run=False, force=False)} == {"unchanged"}


def test_without_argo_nothing_is_applied(server, there, platform):
    before = server.objects.version
    server.unregister("argoproj.io/v1alpha1", "workflowtemplates")
    with pytest.raises(NotInstalled, match="has no kind WorkflowTemplate") as missing:
        install(there, platform, dry_run=False, force=False)
    assert "Argo Workflows 3.6" in missing.value.hint
    assert server.objects.version == before


def test_a_forbidden_object_is_reported(server, there, platform):
    server.forbidden.add(("patch", "workflowtemplates"))
    with pytest.raises(AccessDenied, match="cannot patch resource"):
        install(there, platform, dry_run=False, force=False)


def checks(cluster: Cluster, platform) -> dict[str, tuple[str, ...]]:
    return {what: tuple(finding) for what, finding in check_cluster(cluster, platform).items()}


def test_a_bare_cluster_lacks_argo_the_volume_and_the_template(there, platform):
    found = checks(there, platform)
    assert found["Kubernetes"][0] == "ok"
    assert found["Argo Workflows"][0] == found["volume"][0] == found["template"][0] == "missing"
    assert "Argo Workflows 3.6" in found["Argo Workflows"][2]
    assert found["template"][2] == f"slipway install --platform {PLATFORM}"
    assert found["KServe"][0] == "warning"


CONTROLLER = controller("quay.io/argoproj/workflow-controller:v3.7.3")


def test_an_installed_cluster_has_everything(server, there, platform):
    argo_definitions(server, "schedules")
    server.put(CONTROLLER)
    with_kserve(server)
    install(there, platform, dry_run=False, force=False)
    claim = platform.platform.claim
    server.set_status("PersistentVolumeClaim", there.namespace, claim, {"phase": "Bound"})
    server.put(
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": "node-1"},
            "status": {"allocatable": {"nvidia.com/gpu": "4", "cpu": "8", "memory": "32Gi"}},
        }
    )
    found = checks(there, platform)
    assert {what for what, (state, _, _) in found.items() if state == "off"} == {"door", "monitoring", "notifications"}
    assert {state for state, _, _ in found.values()} == {"ok", "off"}, found
    assert found["GPUs"][1] == "4 on 1 of 1 nodes"
    assert found["Argo Workflows"][1] == "4.0 or newer, argo-workflow-controller v3.7.3 in argo"
    assert found["KServe"][1] == "mode standard, gateway kserve/kserve-ingress-gateway"


@pytest.mark.parametrize(("said", "within_s"), [(None, "10"), ("2s", "2"), ("1m30s", "90"), ("500ms", "0.5")])
def test_how_soon_a_step_follows_another_one_is_said(server, there, platform, said, within_s):
    deployment = controller("quay.io/argoproj/workflow-controller:v3.7.3")
    env = [{"name": "DEFAULT_REQUEUE_TIME", "value": said}] if said else []
    deployment["spec"]["template"]["spec"]["containers"][0]["env"] = env
    server.put(deployment)
    state, found, hint = checks(there, platform)["steps"]
    assert (state, found) == ("ok", f"the controller notices the end of one within {within_s} s")
    assert ("DEFAULT_REQUEUE_TIME=2s" in hint) == (within_s in ("10", "90"))


def test_nodes_that_are_too_small_for_a_stage_are_named(server, there):
    platform = load(chosen={"platform": "gke"})
    selector = platform.platform.cluster.gpu.selector
    taint = [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
    for name, labels, taints, cpu in (("small", {}, [], "2"), ("gpu", selector, taint, "4")):
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        allocatable = {"cpu": cpu, "memory": "15Gi", "nvidia.com/gpu": "1" if taints else "0"}
        server.put(node | {"spec": {"taints": taints}, "status": {"allocatable": allocatable}})
    state, found, hint = checks(there, platform)["nodes"]
    assert (state, "autoscaler" in hint) == ("warning", True)
    assert "evaluate: asks for 8 CPU; the largest node that matches has 4 CPU" in found
    assert "optimize: asks for 4 CPU, 1 GPU; " in found
    assert "resolve" not in found
    server.remove("Node", "gpu")
    assert "none of 1 nodes matches cloud.google.com/" in checks(there, platform)["nodes"][1]


def prometheus(server, name="prometheus-operated"):
    """A Service as prometheus-operator makes it."""
    server.put(namespace("monitoring"))
    metadata = {"name": name, "namespace": "monitoring", "labels": {"operated-prometheus": "true"}}
    spec = {"ports": [{"name": "web", "port": 9090}]}
    server.put({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})


def scaling(config, **changed):
    return config.model_copy(update={"kserve": parse(KServe, config.kserve.model_dump() | changed, "kserve")})


def test_autoscaling_needs_keda_where_it_is_asked_for(server, there, platform):
    with_kserve(server)
    server.unregister("keda.sh/v1alpha1", "scaledobjects")
    wanted = scaling(platform, prometheus="http://x:9090")
    state, found, hint = checks(there, wanted)["autoscaling"]
    assert (state, "no kind ScaledObject" in found, "KEDA" in hint) == ("missing", True, True)
    server.register(Resource("keda.sh/v1alpha1", "ScaledObject", "scaledobjects", status=True))
    there = Cluster(there.login, there.namespace)  # as another command would find it
    state, found, hint = checks(there, wanted)["autoscaling"]
    assert (state, "nothing answers external.metrics.k8s.io" in found, "apiservice" in hint) == ("missing", True, True)
    server.register(Resource("external.metrics.k8s.io/v1beta1", "ExternalMetricValueList", "externalmetrics"))
    assert checks(there, wanted)["autoscaling"][:2] == ("ok", "KEDA: 1 to 3 replicas of a release by concurrency")
    server.put(namespace(there.namespace))
    labels = {"app.kubernetes.io/part-of": "slipway"}
    metadata = {"name": "d", "namespace": there.namespace, "labels": labels}
    spec = {"scaleTargetRef": {"name": "d"}, "triggers": [{"type": "prometheus"}]}
    scaled = {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": metadata, "spec": spec}
    conditions = [{"type": "Ready", "status": "False", "message": "no triggers work"}]
    server.put(scaled | {"status": {"conditions": conditions}})
    state, found, hint = checks(there, wanted)["autoscaling"]
    assert (state, "d: KEDA says Ready False: no triggers work" in found, "http://x:9090" in hint) == (
        "warning",
        True,
        True,
    )


def test_keda_and_prometheus_are_found_and_install_tells_rollouts(server, there, platform):
    with_kserve(server)
    server.register(Resource("external.metrics.k8s.io/v1beta1", "ExternalMetricValueList", "externalmetrics"))
    install(there, platform, dry_run=False, force=False)
    state, found, hint = checks(there, platform)["autoscaling"]
    assert (state, found) == (
        "ok",
        "off: as many replicas under any load: no Prometheus (slipway install looks for it)",
    )
    assert hint == "to follow the load: KEDA 2, and a Prometheus with manifests/monitoring"
    prometheus(server)
    url = "http://prometheus-operated.monitoring.svc:9090"
    assert f"slipway install tells rollouts of {url}" in checks(there, platform)["autoscaling"][2]
    changes = install(there, platform, dry_run=False, force=False)
    assert [change.kind for change in changes if change.state == "changed"] == ["ServingRuntime"]
    assert checks(there, platform)["autoscaling"][:2] == (
        "ok",
        f"KEDA: 1 to 3 replicas of a release by concurrency, by the Prometheus that was found ({url})",
    )
    assert {change.state for change in install(there, platform, dry_run=False, force=False)} == {"unchanged"}
    prometheus(server, "another")
    install(there, platform, dry_run=False, force=False)
    state, found, hint = checks(there, platform)["autoscaling"]
    assert "off: " in found
    assert hint.startswith("there are several Prometheus, name one in kserve.prometheus: http://another.")


def test_without_keda_the_metrics_of_pods_are_said_or_what_is_lacking(server, there, platform):
    with_kserve(server)
    install(there, platform, dry_run=False, force=False)
    server.unregister("keda.sh/v1alpha1", "scaledobjects")
    assert checks(there, platform)["autoscaling"][1].endswith("looks for it) and no KEDA")
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        server.register(Resource("custom.metrics.k8s.io/v1beta1", "MetricValueList", f"pods/{name}"))
    state, found, _ = checks(there, platform)["autoscaling"]
    assert state == "ok"
    assert found.startswith("HorizontalPodAutoscaler, because there is no Prometheus")
    assert found.endswith("by concurrency (vllm:num_requests_running, vllm:num_requests_waiting)")
    state, found, hint = checks(there, scaling(platform, scaling={"metric": "ttft"}))["autoscaling"]
    assert (state, "nothing scales by ttft" in found, "KEDA" in hint) == ("missing", True, True)
    off = checks(there, scaling(platform, prometheus=None))["autoscaling"]
    assert off[:2] == ("ok", "off: as many replicas under any load: kserve.prometheus is null")


def test_argo_without_a_controller_that_is_ready_is_not_ok(server, there, platform):
    argo_definitions(server, "schedule", "schedules")
    state, found, hint = checks(there, platform)["Argo Workflows"]
    assert (state, found) == ("missing", "its definitions, but no workflow-controller in namespace argo")
    assert "cluster.controller_namespace" in hint
    server.put(controller("mirror.example/argo/workflow-controller@sha256:0", ready=0))
    assert checks(there, platform)["Argo Workflows"][:2] == ("missing", "argo-workflow-controller is not ready")
    server.put(CONTROLLER)
    assert checks(there, platform)["Argo Workflows"][:2] == (
        "ok",
        "3.6 to 3.7, argo-workflow-controller v3.7.3 in argo",
    )


def test_what_rollouts_need_is_installed_where_kserve_is(server, there, platform):
    without = install(there, platform, dry_run=False, force=False)
    assert "ServingRuntime" not in {each.kind for each in without}
    with_kserve(server)
    assert checks(there, platform)["KServe"][:2] == (
        "missing",
        "no ServingRuntime slipway/slipway-vllm, ConfigMap slipway/slipway-door, Role slipway/slipway-serve-kserve, "
        "RoleBinding slipway/slipway-serve-kserve, Role kserve/slipway-serve, RoleBinding kserve/slipway-serve-slipway",
    )
    brought = {
        f"{each.kind} {each.namespace}/{each.name}" for each in install(there, platform, dry_run=False, force=False)
    }
    assert {"ServingRuntime slipway/slipway-vllm", "Role kserve/slipway-serve"} <= brought
    assert checks(there, platform)["KServe"][0] == "ok"


def test_two_namespaces_have_their_own_right_to_read_kserves_configuration(server, there, platform):
    with_kserve(server)
    install(there, platform, dry_run=False, force=False)
    other = platform.model_copy(update={"platform": platform.platform.model_copy(update={"namespace": "team-b"})})
    install(Cluster(there.login, "team-b"), other, dry_run=False, force=False)
    bindings = {each["metadata"]["name"]: each["subjects"] for each in server.all("RoleBinding", "kserve")}
    assert {name: subjects[0]["namespace"] for name, subjects in bindings.items()} == {
        "slipway-serve-slipway": "slipway",
        "slipway-serve-team-b": "team-b",
    }


def test_where_kserve_has_llm_inference_services_it_is_said_and_what_lacks_for_them(server, there, platform):
    with_kserve(server)
    install(there, platform, dry_run=False, force=False)
    wanted = platform.model_copy(update={"kserve": platform.kserve.model_copy(update={"mode": "llm"})})
    lacking = "no llmisvc-controller-manager in namespace kserve"
    assert checks(there, wanted)["KServe"][:2] == ("missing", lacking)
    with pytest.raises(NotInstalled, match=lacking):
        submit(there, wanted, serve=True)
    assert "LLMInferenceService" not in checks(there, platform)["KServe"][1]
    server.put(definition("llminferenceservices.serving.kserve.io", "router"))
    state, found, _ = checks(there, platform)["KServe"]
    assert (state, found.partition("; ")[2]) == ("ok", "LLMInferenceService is there, too (kserve.mode llm)")
    running = controller("kserve/llmisvc-controller:v0.20.0")
    running["metadata"] = {"name": "llmisvc-controller-manager", "namespace": "kserve"}
    running["spec"]["template"]["spec"]["containers"][0]["name"] = "manager"
    server.put(running)
    assert "no LLMInferenceServiceConfig kserve-config-llm-template" in checks(there, wanted)["KServe"][1]
    for name in ("kserve-config-llm-template", "kserve-config-llm-router-route"):
        preset = {"apiVersion": "serving.kserve.io/v1alpha1", "kind": "LLMInferenceServiceConfig"}
        server.put(preset | {"metadata": {"name": name, "namespace": "kserve"}})
    state, found, _ = checks(there, wanted)["KServe"]
    assert (state, found.partition(",")[0]) == ("ok", "mode llm")


def test_a_model_in_another_mode_than_kserves_is_named_and_another_mode_is_refused_before_a_run(
    server, there, platform
):
    with_kserve(server)
    install(there, platform, dry_run=False, force=False)
    server.register(Resource("serving.kserve.io/v1beta1", "InferenceService", "inferenceservices"))
    labels = {"app.kubernetes.io/part-of": "slipway", "slipway/endpoint": "org-model-123456"}
    metadata = {"name": "org-model-123456-r1", "namespace": there.namespace, "labels": labels}
    metadata["annotations"] = {"slipway/model": "org/model"}
    server.put({"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "metadata": metadata})
    state, found, hint = checks(there, platform)["KServe"]
    assert (state, found.partition("; ")[2]) == ("warning", "org/model (route) stay as they are")
    assert "docs/rollout.md" in hint
    named = platform.model_copy(update={"kserve": platform.kserve.model_copy(update={"mode": "standard"})})
    with pytest.raises(Conflict, match=r"served in mode route, and kserve\.mode says standard"):
        submit(there, named, serve=True)
    assert submit(there, platform, serve=True)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"ingress": "{}"}, "without the Gateway API"),
        ({"version": "lab"}, "version can't be read"),
    ],
)
def test_a_kserve_on_which_the_rollout_would_fail_is_found_before_a_run(server, there, platform, changed, why):
    with_kserve(server, **changed)
    install(there, platform, dry_run=False, force=False)
    assert why in checks(there, platform)["KServe"][1]
    with pytest.raises(NotInstalled, match=why):
        submit(there, platform, serve=True)
    assert submit(there, platform, serve=False)


def test_an_old_argo_a_changed_template_and_a_missing_right_are_reported(server, there, platform):
    argo_definitions(server, "schedule")
    server.put(CONTROLLER)
    install(there, platform, dry_run=False, force=False)
    template = server.find("WorkflowTemplate", NAME, there.namespace)
    template["spec"]["entrypoint"] = "other"
    server.put(template)
    server.forbidden |= {("create", "workflows"), ("list", "nodes"), ("get", "pods/log")}
    found = checks(there, platform)
    assert found["Argo Workflows"][1] == "older than 3.6"
    assert found["template"][:2] == ("warning", "not what would be installed now: spec.entrypoint")
    assert found["rights: workflows"][:2] == ("missing", "no create")
    assert found["rights: pods/log"][:2] == ("missing", "no get")
    assert found["GPUs"][0] == "warning"
    assert "may not be seen" in found["GPUs"][1]


HELM = "prod-argo-workflows-workflow-controller"


@pytest.mark.parametrize(
    "labels", [{"app": "workflow-controller"}, {"app.kubernetes.io/component": "workflow-controller"}]
)
def test_the_account_of_argos_controller_is_found_and_may_keep_the_memo(server, there, platform, labels):
    server.put(controller("mirror.example/argo:4", account=HELM, labels=labels))
    install(there, platform, dry_run=False, force=False)
    subjects = server.find("RoleBinding", RESOLVE_CACHE, "argo")["subjects"]
    assert subjects == [{"kind": "ServiceAccount", "name": HELM, "namespace": "argo"}]
    assert checks(there, platform)["memoization"][:2] == ("ok", f"slipway-resolve in argo, kept by {HELM}")


def test_a_controller_that_may_not_keep_the_memo_is_reported(server, there, platform):
    install(there, platform, dry_run=False, force=False)
    server.put(controller("quay.io/argoproj/workflow-controller:v4.1.2", account=HELM))
    state, found, hint = checks(there, platform)["memoization"]
    assert state == "missing"
    assert found == f"the service account {HELM} of Argo's controller may not get, update slipway-resolve"
    assert "slipway install" in hint
    assert "cluster.controller_account" in hint
    server.forbidden.add(("create", "subjectaccessreviews"))
    assert checks(there, platform)["memoization"][0] == "warning"


def test_the_account_of_argos_controller_can_be_named_and_need_not_be_seen(server, there, platform):
    named = platform.platform.cluster.model_copy(update={"controller_account": "mine"})
    asked = platform.model_copy(update={"platform": platform.platform.model_copy(update={"cluster": named})})
    server.put(controller("quay.io/argoproj/workflow-controller:v4.1.2", account=HELM))
    install(there, asked, dry_run=False, force=False)
    assert server.find("RoleBinding", RESOLVE_CACHE, "argo")["subjects"][0]["name"] == "mine"
    assert "kept by mine" in checks(there, asked)["memoization"][1]
    server.forbidden.add(("list", "deployments"))
    install(there, platform, dry_run=False, force=False)
    assert server.find("RoleBinding", RESOLVE_CACHE, "argo")["subjects"][0]["name"] == "argo"


S3 = "s3:\n  bucket: runs\n  endpoint: store.example"
CONFIGURED = {
    "a field of its own": {"artifactRepository": f"archiveLogs: true\n{S3}"},
    "one text": {"config": "parallelism: 3\nartifactRepository:\n  " + S3.replace("\n", "\n  ") + "\nlinks: []"},
}


@pytest.mark.parametrize("data", CONFIGURED.values(), ids=CONFIGURED)
def test_the_report_goes_to_argos_default_repository(server, there, platform, data):
    server.put(config_map("workflow-controller-configmap", "argo", data))
    install(there, platform, dry_run=False, force=False)
    spec = server.find("WorkflowTemplate", NAME, there.namespace)["spec"]
    assert spec["onExit"] == "end-and-publish"
    assert "artifactRepositoryRef" not in spec
    assert checks(there, platform)["template"][0] == "ok"
    server.forbidden.add(("get", "configmaps"))  # whoever submits need not see Argo's configuration
    assert checks(there, platform)["template"][0] == "ok"


def test_the_repository_of_the_namespace_itself_is_found(server, there, platform):
    server.put(namespace(there.namespace))
    server.put(config_map("artifact-repositories", there.namespace, {"reports": S3}))
    install(there, platform, dry_run=False, force=False)
    assert server.find("WorkflowTemplate", NAME, there.namespace)["spec"]["onExit"] == "ending"
    annotations = {"workflows.argoproj.io/default-artifact-repository": "reports"}
    server.put(config_map("artifact-repositories", there.namespace, {"reports": S3}, annotations))
    install(there, platform, dry_run=False, force=False)
    assert server.find("WorkflowTemplate", NAME, there.namespace)["spec"]["onExit"] == "end-and-publish"


@pytest.mark.parametrize("data", [{"artifactRepository": "archiveLogs: true"}, {"config": "links:\n- s3: no"}, {}])
def test_without_a_repository_the_report_stays_on_the_volume(server, there, platform, data):
    server.put(config_map("workflow-controller-configmap", "argo", data))
    install(there, platform, dry_run=False, force=False)
    assert server.find("WorkflowTemplate", NAME, there.namespace)["spec"]["onExit"] == "ending"


def config_map(name: str, where: str, data: dict[str, str], annotations: dict[str, str] | None = None) -> Object:
    metadata = {"name": name, "namespace": where, "annotations": annotations or {}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def test_a_cache_without_its_label_is_reported(there, platform):
    install(there, platform, dry_run=False, force=False)
    controllers = platform.platform.cluster.controller_namespace
    label = {"workflows.argoproj.io/configmap-type": None}
    there.merge(CONFIG_MAPS, RESOLVE_CACHE, {"metadata": {"labels": label}}, controllers)
    assert "lacks its label" in checks(there, platform)["memoization"][1]


def test_the_command_line_installs_and_checks(server, there, slipway):
    dry = slipway("install", "--platform", PLATFORM, "--dry-run", "--json")
    assert dry.returncode == 0, dry.stderr
    assert {each["state"] for each in json.loads(dry.stdout)} == {"would be created"}
    done = slipway("install", "--platform", PLATFORM)
    assert done.returncode == 0, done.stderr
    assert "WorkflowTemplate" in done.stdout
    found = slipway("doctor", "--engine", "argo", "--platform", PLATFORM, "--json")
    assert found.returncode == 1
    states = {each["what"]: each["state"] for each in json.loads(found.stdout)}
    assert states["template"] == "ok"
    assert states["Argo Workflows"] == "missing"
