"""Mode ``llm``: what a LLMInferenceService says, and what others may do to the routing group meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from stages.parts.base.errors import Conflict, ServerFailed, TransientError
from stages.parts.base.serving_settings import Serving
from stages.parts.base.store import ModelStore
from stages.parts.endpoint.routing import OFFERED
from stages.parts.releases.release import Split
from stages.rollout.commands import abort
from stages.rollout.kserve.llm import LLM_SERVICES, cache, llm_name, llm_service
from stages.rollout.kserve.modes import render
from stages.rollout.kserve.objects import KServeEndpoint, predictor
from stages.rollout.kserve.settings import LLM, KServe
from stages.rollout.state_machine import roll_out
from tests.serving import REPOSITORY, wait_until
from tests.stages.rollout.kserve.on_kserve import OnKServe
from tests.stages.rollout.kserve.test_kserve_rollout import MODES
from tests.stages.rollout.stage import GOOD, NEXT, SETTINGS

KIND = LLM_SERVICES.name


@pytest.fixture
def kserve(serve: Callable[..., OnKServe]) -> OnKServe:
    return serve(**MODES["llm"])


def endpoint(tmp_path: Path, model: str = "org/name", **settings: Any) -> KServeEndpoint:
    return KServeEndpoint(ModelStore(tmp_path, model), Serving(), KServe.model_validate(settings), "slipway")


def made(at: KServeEndpoint, *, scheduler: bool = False) -> dict[str, Any]:
    return llm_service(at, NEXT, "edge/public", "host.example.com", scheduler=scheduler)


def server_of(service: dict[str, Any]) -> dict[str, Any]:
    (found,) = service["spec"]["template"]["containers"]
    assert found["name"] == "main"
    return dict(found)


def test_the_container_is_the_one_of_the_other_modes(tmp_path: Path) -> None:
    """Nothing of it is left to KServe's preset: it merges variables, mounts and probes with ours."""
    at = endpoint(tmp_path)
    server, model = server_of(made(at)), predictor(at, NEXT)["model"]
    runtime = yaml.safe_load((REPOSITORY / "manifests/kserve/serving-runtime.yaml").read_text())["spec"]
    (kept,) = runtime["containers"]
    assert server["command"] == kept["command"]
    assert server["env"] == [*model["env"], *kept["env"]]
    assert server["securityContext"] == kept["securityContext"]
    assert [each["mountPath"] for each in server["volumeMounts"]] == [
        each["mountPath"] for each in (*model["volumeMounts"], *kept["volumeMounts"])
    ]
    assert [each.replace("8000", "8080") for each in server["args"]] == model["args"]
    assert server["resources"] == model["resources"]
    assert server["ports"] == [{"containerPort": 8000, "protocol": "TCP"}]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[name]["httpGet"] == {"path": "/health", "port": 8000, "scheme": "HTTP"}


def test_clients_find_what_an_endpoint_offers_at_its_own_host_name(tmp_path: Path) -> None:
    at = endpoint(tmp_path)
    service = made(at)
    route = service["spec"]["router"]["route"]
    assert (route["group"], route["weight"]) == (at.name, 0)
    spec = route["http"]["spec"]
    assert spec["hostnames"] == ["host.example.com"]
    assert (spec["parentRefs"][0]["namespace"], spec["parentRefs"][0]["name"]) == ("edge", "public")
    (rule,) = spec["rules"]
    assert {each["path"]["value"]: each["method"] for each in rule["matches"]} == OFFERED
    (backend,) = rule["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("Service", f"{service['metadata']['name']}-kserve-workload-svc")


def test_with_a_scheduler_requests_go_to_its_pool(tmp_path: Path) -> None:
    service = made(endpoint(tmp_path), scheduler=True)
    (backend,) = service["spec"]["router"]["route"]["http"]["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", f"{service['metadata']['name']}-inference-pool")
    assert service["spec"]["router"]["scheduler"]["labels"] == {"slipway/endpoint": endpoint(tmp_path).name}
    assert "scheduler" not in made(endpoint(tmp_path))["spec"]["router"]


def test_labels_are_the_same_with_any_settings(tmp_path: Path) -> None:
    """KServe makes them part of the Deployment's selector, which can't change."""
    one, other = made(endpoint(tmp_path)), made(endpoint(tmp_path, cpu="8"))
    assert one["spec"]["labels"] == other["spec"]["labels"]
    assert one["spec"]["annotations"] != other["spec"]["annotations"]
    weighed = render(endpoint(tmp_path), NEXT, None, "llm", 100)[0]
    assert weighed["spec"]["annotations"] == one["spec"]["annotations"], "a weight restarts nothing"


@pytest.mark.parametrize("model", ["org/name", "0x/" + "y" * 90])
def test_kserve_abbreviates_no_name_that_is_read(tmp_path: Path, model: str) -> None:
    names = [llm_name(endpoint(tmp_path, model), f"{number:04}-awq-bbbbbbbbbbbb") for number in (1, 9999, 123456)]
    assert all(len(f"{name}-kserve-workload-svc") <= 63 for name in names)
    assert all(endpoint(tmp_path, model).name[-6:] in name and "--" not in name for name in names)


def test_with_prometheus_the_replicas_are_left_to_its_autoscaler(tmp_path: Path) -> None:
    assert made(endpoint(tmp_path))["spec"]["replicas"] == 1
    at = endpoint(tmp_path, prometheus="http://p:9090")
    assert "replicas" not in made(at)["spec"]
    (scaler,) = [each for each in render(at, NEXT, None, "llm", 100) if each["kind"] == "ScaledObject"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == f"{llm_name(at, NEXT)}-kserve"


def test_nodes_keep_only_what_lies_in_object_storage(tmp_path: Path) -> None:
    at = endpoint(tmp_path)
    assert made(at)["spec"]["model"]["uri"] == at.storage_uri(NEXT)
    with pytest.raises(ValidationError, match="cache_nodes needs source"):
        LLM(cache_nodes="gpus")
    for wrong in ("gs://bucket/a", "s3://bucket/a/", "s3:///a"):
        with pytest.raises(ValidationError):
            LLM(source=wrong)
    at = endpoint(tmp_path, llm={"source": "s3://bucket/models", "cache_nodes": "gpus"})
    copies = cache(at, NEXT, "gpus")
    assert copies["spec"]["sourceModelUri"] == made(at)["spec"]["model"]["uri"]
    assert copies["spec"]["sourceModelUri"] == f"s3://bucket/models/org--name/releases/{NEXT}"
    assert [each["kind"] for each in render(at, NEXT, None, "llm", 100)][:2] == ["LocalModelNamespaceCache", KIND]


def test_a_release_is_served_once_its_copies_are_on_the_nodes_and_they_go_with_it(kserve: OnKServe) -> None:
    kserve.kserve.llm.copying = True
    copied = LLM(source="s3://bucket/models", cache_nodes="gpus")
    kserve.settings = kserve.settings.model_copy(update={"llm": copied})
    kserve.make(GOOD)
    target = kserve.connect()
    deploying = threading.Thread(target=target.deploy, args=(GOOD,))
    deploying.start()
    name = llm_name(kserve.endpoint(), GOOD)
    wait_until(lambda: len(kserve.server.all("LocalModelNamespaceCache")) == 1, "the copies are asked for")
    assert kserve.services() == []
    kserve.kserve.llm.copying = False
    deploying.join()
    (owner,) = kserve.server.find("LocalModelNamespaceCache", name)["metadata"]["ownerReferences"]
    assert owner["uid"] == kserve.server.find(KIND, name)["metadata"]["uid"]
    target.withdraw(GOOD, first=True)
    wait_until(lambda: kserve.server.all("LocalModelNamespaceCache") == [], "the copies are gone")


def test_copies_that_never_come_end_the_rollout_in_time(kserve: OnKServe) -> None:
    kserve.kserve.llm.copying = True
    copied = LLM(source="s3://bucket/models", cache_nodes="gpus")
    kserve.settings, kserve.serving = (
        kserve.settings.model_copy(update={"llm": copied}),
        Serving(startup_timeout_s=1),
    )
    kserve.make(GOOD)
    with pytest.raises(TransientError, match=f"{GOOD} is on 0 of .* nodes of gpus"):
        kserve.connect().deploy(GOOD)
    assert kserve.services() == []


def test_a_changed_setting_replaces_the_pods_in_place(kserve: OnKServe) -> None:
    kserve.first()
    kserve.settings = kserve.settings.model_copy(update={"cpu": "8", "llm": LLM(scheduler=True)})
    assert kserve.connect(llm=LLM()).changes(GOOD) == "how its pods are started"
    target = kserve.connect(llm=LLM())
    target.deploy(GOOD)
    wait_until(lambda: target.ready(GOOD), "it is ready")
    assert kserve.kserve.started == [GOOD, GOOD]
    assert target.split() == Split(GOOD)
    (service,) = kserve.server.all(KIND)
    assert service["spec"]["router"]["route"]["weight"] == 100


def weigh(kserve: OnKServe, release: str, share: int) -> None:
    service = kserve.server.find(KIND, llm_name(kserve.endpoint(), release))
    service["spec"]["router"]["route"]["weight"] = share
    kserve.server.put(service, manager="kubectl-edit")


def canary_at(kserve: OnKServe, percent: int) -> None:
    kserve.first()
    kserve.make(NEXT)
    roll_out(kserve.store, kserve.connect(), NEXT, SETTINGS, until="10")
    kserve.connect().shift(NEXT, percent)


def test_a_weight_of_somebody_else_is_told_and_never_overwritten_on_the_way_forward(kserve: OnKServe) -> None:
    canary_at(kserve, 10)
    weigh(kserve, NEXT, 810)

    def told() -> Split | None:
        try:
            return kserve.connect().split()
        except TransientError:
            return None

    wait_until(lambda: told() == Split(GOOD, NEXT, 90), "what is in force is told as it is")
    with pytest.raises(Conflict, match=r'somebody else changed .*conflict with "kubectl-edit"'):
        kserve.connect().shift(NEXT, 50)
    assert abort(kserve.store, kserve.connect()) == NEXT
    assert kserve.connect().split() == Split(GOOD)
    wait_until(lambda: {each.release for each in kserve.kserve.deployments.values()} == {GOOD}, "the canary is gone")
    assert kserve.kserve.sent_into_the_void == []


def test_at_no_time_have_all_members_no_weight(kserve: OnKServe, monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[int] = []

    def note(_: str, __: dict[str, Any]) -> None:
        weights = [each["spec"]["router"]["route"]["weight"] for each in kserve.server.all(KIND)]
        if len(weights) > 1:
            sums.append(sum(weights))

    canary_at(kserve, 10)
    kserve.server.on_change(KIND, note)
    kserve.connect().shift(NEXT, 100)
    kserve.connect().withdraw(NEXT)
    wait_until(lambda: len(sums) > 3, "changes were seen")
    assert min(sums) >= 100


def test_a_service_of_somebody_else_is_refused_by_name(kserve: OnKServe) -> None:
    kserve.make(GOOD)
    name = llm_name(kserve.endpoint(), GOOD)
    theirs = made(kserve.endpoint())
    theirs["metadata"] |= {"name": name, "namespace": "default", "annotations": {}, "labels": {}}
    kserve.kserve.stop()
    kserve.server.put(theirs, manager="theirs")
    with pytest.raises(Conflict, match=f"the {KIND} {name} does not serve org/name"):
        kserve.connect().deploy(GOOD)
    owner = {"apiVersion": "v1", "kind": "Rollout", "name": "theirs", "uid": "1"}
    theirs["metadata"] |= {"ownerReferences": [owner], "labels": {"slipway/endpoint": kserve.name}}
    kserve.server.put(theirs, manager="theirs")
    with pytest.raises(Conflict, match=f"the {KIND} {name} belongs to the Rollout theirs"):
        kserve.connect().split()


def test_a_third_member_of_the_group_is_a_conflict(kserve: OnKServe) -> None:
    canary_at(kserve, 10)
    theirs = made(kserve.endpoint())
    theirs["spec"]["model"]["uri"] = kserve.endpoint().storage_uri(GOOD)
    theirs["spec"]["router"]["route"] |= {"weight": 100, "group": kserve.name}
    theirs["metadata"] |= {"name": "theirs", "namespace": "default", "labels": {}}
    kserve.server.put(theirs, manager="theirs")
    shown = f"{llm_name(kserve.endpoint(), GOOD)}-kserve-route"

    def members() -> int:
        return len(kserve.server.find("HTTPRoute", shown)["spec"]["rules"][0]["backendRefs"])

    wait_until(lambda: members() == 3, "it gets requests")
    with pytest.raises(TransientError, match="does not split so"):
        kserve.connect(in_force_s=1).shift(NEXT, 50)


def test_what_kserve_can_not_make_is_said_with_its_own_words(kserve: OnKServe) -> None:
    kserve.first()
    kserve.kserve.stop()
    (service,) = kserve.server.all(KIND)
    said = {"type": "PresetsCombined", "status": "False", "reason": "ConfigNotFound", "message": "no preset"}
    conditions = {"conditions": [said | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    kserve.server.set_status(KIND, "default", service["metadata"]["name"], conditions)
    with pytest.raises(ServerFailed, match=r"KServe can't serve .*: no preset") as failed:
        kserve.connect().ready(GOOD)
    assert failed.value.hint.startswith("kubectl describe llminferenceservice ")
