"""What goes wrong between a rollout and KServe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from stages.parts.base.errors import AccessDenied, Conflict, NotInstalled, RolledBack, ServerFailed, TransientError
from stages.parts.records.rollout import read_journal
from stages.parts.releases.release import Split
from stages.rollout.commands import abort
from stages.rollout.kserve.objects import ISVCS
from tests.serving import wait_until
from tests.stages.rollout.kserve.on_kserve import OnKServe
from tests.stages.rollout.kserve.test_kserve_rollout import MODES
from tests.stages.rollout.stage import GOOD, NEXT

ISVC_PATHS = "*/inferenceservices/*"


def edited(kserve: OnKServe, change: Callable[[dict[str, Any]], None], kind: str = "InferenceService") -> None:
    """Somebody uses kubectl edit."""
    now = kserve.server.find(kind, kserve.route if kind == "HTTPRoute" else kserve.name)
    change(now)
    kserve.server.put({key: now[key] for key in ("apiVersion", "kind", "metadata", "spec")}, manager="kubectl-edit")


def told(kserve: OnKServe) -> Split | None:
    """The split; None while it is not certain."""
    try:
        return kserve.connect().split()
    except TransientError:
        return None


def canary_at(kserve: OnKServe, percent: int) -> None:
    kserve.first()
    kserve.make(NEXT)
    target = kserve.connect()
    target.deploy(NEXT)
    wait_until(lambda: target.ready(NEXT), "the canary is ready")
    target.shift(NEXT, percent)


def test_a_route_that_is_not_programmed_is_not_in_force(standard: OnKServe) -> None:
    standard.first()
    standard.make(NEXT)
    target = standard.connect(in_force_s=3)
    target.deploy(NEXT)
    wait_until(lambda: target.ready(NEXT), "the canary is ready")
    standard.kserve.gateway_stuck = True
    with pytest.raises(TransientError, match=r"10 % for 0002.* was not in force within 3 s: its gateway has not seen"):
        target.shift(NEXT, 10)
    assert (
        standard.service()["status"]["canaryStatuses"][0]["trafficPercent"] == 10
    )  # what was requested, not what is in force
    with pytest.raises(TransientError, match="the split in force is not certain"):
        target.split()
    standard.kserve.gateway_stuck = False
    standard.connect().shift(NEXT, 10)
    assert target.split() == Split(GOOD, NEXT, 10)


def test_a_rollout_stays_where_it_was_until_its_gateway_works_again(standard: OnKServe) -> None:
    standard.first()
    standard.make(NEXT)
    standard.kserve.gateway_stuck = True
    with pytest.raises(TransientError, match="not in force"):
        standard.roll(NEXT, standard.connect(in_force_s=1))
    journal = read_journal(standard.store)
    assert journal is not None
    assert (journal.state, journal.percent) == ("shifting", 10)
    standard.kserve.gateway_stuck = False
    standard.connect().shift(NEXT, 10)
    assert standard.roll(NEXT).state == "promoted"


def test_a_weight_that_somebody_else_set_is_a_conflict(standard: OnKServe) -> None:
    canary_at(standard, 10)
    edited(standard, lambda now: now["spec"]["canary"][0].update(trafficPercent=90))
    with pytest.raises(Conflict, match=r'somebody else changed .*conflict with "kubectl-edit": .spec.canary'):
        standard.connect().shift(NEXT, 50)
    wait_until(lambda: told(standard) == Split(GOOD, NEXT, 90), "what is in force is told as it is")
    with pytest.raises(Conflict, match="somebody else changed"):
        standard.connect().promote(NEXT)


@pytest.mark.parametrize(("mode", "percent"), [("standard", 90), ("knative", 90), ("knative", 0), ("route", 90)])
def test_a_weight_that_somebody_else_set_is_overwritten_on_the_way_back(
    serve: Callable[..., OnKServe], mode: str, percent: int
) -> None:
    kserve = serve(**MODES[mode])
    canary_at(kserve, 10)

    def change(now: dict[str, Any]) -> None:
        if mode == "standard":
            now["spec"]["canary"][0]["trafficPercent"] = percent
        elif mode == "knative":
            now["spec"]["predictor"]["canaryTrafficPercent"] = percent
        else:
            stable, canary = now["spec"]["rules"][0]["backendRefs"]
            stable["weight"], canary["weight"] = 100 - percent, percent

    edited(kserve, change, "HTTPRoute" if mode == "route" else "InferenceService")
    wait_until(lambda: told(kserve) == Split(GOOD, NEXT, percent), "what somebody else wants is in force")
    assert abort(kserve.store, kserve.connect()) == NEXT
    assert kserve.connect().split() == Split(GOOD)
    wait_until(lambda: {each.release for each in kserve.kserve.deployments.values()} == {GOOD}, "the canary is gone")


def test_a_rollout_whose_share_somebody_else_sets_goes_back(standard: OnKServe) -> None:
    standard.first()
    standard.make(NEXT)

    def more_for_it() -> None:
        wait_until(lambda: (standard.service()["spec"].get("canary") or [{}])[0].get("trafficPercent") == 10, "10 %")
        edited(standard, lambda now: now["spec"]["canary"][0].update(trafficPercent=90))

    other = threading.Thread(target=more_for_it)
    other.start()
    with pytest.raises(RolledBack, match="somebody else changed"):
        standard.roll(NEXT, step_s=3)
    other.join()
    assert standard.connect().split() == Split(GOOD)


def test_a_release_that_somebody_else_replaced_is_a_conflict(standard: OnKServe) -> None:
    canary_at(standard, 10)
    edited(standard, lambda now: now["spec"].update(canary=[]))
    for call in (lambda: standard.connect().shift(NEXT, 50), lambda: standard.connect().promote(NEXT)):
        with pytest.raises(Conflict, match=f"{NEXT} is not the canary"):
            call()
    assert standard.connect().split() == Split(GOOD)


def test_a_rollout_goes_back_if_somebody_else_withdraws_its_canary(standard: OnKServe) -> None:
    standard.first()
    standard.make(NEXT)

    def take_away() -> None:
        wait_until(lambda: (standard.service()["spec"].get("canary") or [{}])[0].get("trafficPercent") == 10, "10 %")
        edited(standard, lambda now: now["spec"].update(canary=[]))

    other = threading.Thread(target=take_away)
    other.start()
    with pytest.raises(RolledBack, match="somebody else"):
        standard.roll(NEXT, step_s=60)
    other.join()
    assert standard.connect().split() == Split(GOOD)


def test_a_lost_answer_is_not_a_conflict(standard: OnKServe) -> None:
    canary_at(standard, 10)
    standard.server.lose_answer("patch", ISVC_PATHS)
    standard.connect().shift(NEXT, 50)
    assert standard.connect().split() == Split(GOOD, NEXT, 50)


def test_a_status_that_changes_meanwhile_is_not_a_conflict(standard: OnKServe) -> None:
    canary_at(standard, 10)
    target = standard.connect()
    seen = standard.service()
    standard.server.set_status("InferenceService", "default", standard.name, {"conditions": []}, manager="kserve")
    body = {key: seen[key] for key in ("apiVersion", "kind", "spec")}
    body["metadata"] = {key: seen["metadata"][key] for key in ("name", "labels", "annotations")}
    body["spec"]["canary"][0]["trafficPercent"] = 20
    assert target.objects.apply(ISVCS, body, seen)["spec"]["canary"][0]["trafficPercent"] == 20


def test_canary_traffic_percent_is_ignored_in_standard_mode(standard: OnKServe) -> None:
    standard.first()
    edited(standard, lambda now: now["spec"]["predictor"].update(canaryTrafficPercent=20))
    assert standard.connect().split() == Split(GOOD)


def test_readiness_that_changes_during_a_slow_load_is_waited_for(standard: OnKServe) -> None:
    standard.make(GOOD)
    standard.kserve.flickering = True
    recovers = threading.Timer(0.5, lambda: setattr(standard.kserve, "flickering", False))
    recovers.start()
    assert standard.roll(GOOD).state == "promoted"
    standard.kserve.flickering = True
    wait_until(lambda: standard.service()["status"]["conditions"][0]["status"] == "False", "it is not ready any more")
    assert standard.connect().split() == Split(GOOD)
    standard.make(NEXT)
    recovers = threading.Timer(0.5, lambda: setattr(standard.kserve, "flickering", False))
    recovers.start()
    assert standard.roll(NEXT).state == "promoted"


def test_the_observed_generation_of_a_child_object_is_ignored(standard: OnKServe) -> None:
    standard.first()
    standard.make(NEXT)
    assert standard.roll(NEXT).state == "promoted"
    now = standard.service()
    assert now["metadata"]["generation"] > now["status"]["observedGeneration"] == 1


def test_what_kserve_can_not_make_fails_at_once_with_its_words(standard: OnKServe) -> None:
    standard.first()
    standard.make(NEXT)
    target = standard.connect()
    standard.kserve.refuses = "a-host"
    target.deploy(NEXT)
    with pytest.raises(ServerFailed, match=r'KServe can.t serve .*: invalid domain name "a-host"'):
        wait_until(lambda: target.ready(NEXT), "KServe refuses")


def test_another_models_service_under_the_same_name_is_left_alone(standard: OnKServe) -> None:
    standard.make(GOOD)
    spec = {"predictor": {"model": {"storageUri": f"pvc://models/x/releases/{GOOD}"}}}
    metadata = {"name": standard.name, "namespace": "default"}
    standard.server.put(
        {"apiVersion": "serving.kserve.io/v1beta1", "kind": "InferenceService", "metadata": metadata, "spec": spec}
    )
    with pytest.raises(Conflict, match="does not serve org/name"):
        standard.roll(GOOD)


def test_a_crashed_server_counts_as_one_restart_and_loses_no_counts(standard: OnKServe) -> None:
    canary_at(standard, 10)
    target = standard.connect()
    before = target.counters(NEXT)
    standard.kserve.crash(NEXT)
    wait_until(lambda: standard.server.find("Pod", f"{standard.deployment(NEXT)}-0")["status"]["containerStatuses"][0][
        "restartCount"] == 1, "it is started again")  # fmt: skip
    wait_until(lambda: target.ready(NEXT), "it is ready again")
    after = target.counters(NEXT)
    assert (before.instance, after.instance) == ("0 restarts", "1 restarts")
    assert after.answered >= before.answered


def test_a_headless_service_is_reached_at_its_pods_port(standard: OnKServe) -> None:
    canary_at(standard, 10)
    target = standard.connect(service_url="http://{service}.{namespace}.svc:{port}")
    name = standard.deployment(NEXT)
    service = standard.server.find("Service", name)
    port = service["spec"]["ports"][0]["port"]
    assert target.url(NEXT) == f"http://{name}.default.svc:{port}"
    standard.kserve.stop()
    service["spec"] |= {"clusterIP": "None", "ports": [{"port": 80, "targetPort": 8080}]}
    standard.server.put(service)
    assert target.url(NEXT) == f"http://{name}.default.svc:8080"


def test_each_release_has_its_own_autoscaler_while_it_is_served(standard: OnKServe) -> None:
    standard.first()
    standard.make(NEXT)
    target = standard.connect(prometheus="http://prometheus:9090")
    target.deploy(GOOD)  # with the present settings
    wait_until(lambda: target.ready(GOOD), "it is ready")
    target.deploy(NEXT)
    wait_until(lambda: target.ready(NEXT), "the canary is ready")
    names = {each["metadata"]["name"]: each for each in standard.server.all("ScaledObject")}
    assert names.keys() == {standard.deployment(GOOD), standard.deployment(NEXT)}
    for name, each in names.items():
        assert each["spec"]["scaleTargetRef"]["name"] == name
    old, new = standard.deployment(GOOD), standard.deployment(NEXT)
    target.promote(NEXT)
    assert [each["metadata"]["name"] for each in standard.server.all("ScaledObject")] == [new]
    assert old != new
    target.withdraw(NEXT, first=True)
    assert standard.server.all("ScaledObject") == []
    assert standard.server.all("PodDisruptionBudget") == []


@pytest.mark.parametrize("call", ["promote", "withdraw"])
def test_an_autoscaler_left_by_an_interrupted_call_is_removed_by_the_next_one(standard: OnKServe, call: str) -> None:
    standard.settings = standard.settings.model_copy(update={"prometheus": "http://prometheus:9090"})
    canary_at(standard, 10)
    stays = standard.deployment(NEXT if call == "promote" else GOOD)
    assert len(standard.server.all("ScaledObject")) == 2
    standard.server.fail("delete", "*/scaledobjects/*", 403)
    with pytest.raises(AccessDenied):
        getattr(standard.connect(), call)(NEXT)
    assert len(standard.server.all("ScaledObject")) == 2
    getattr(standard.connect(), call)(NEXT)
    assert [each["metadata"]["name"] for each in standard.server.all("ScaledObject")] == [stays]


def test_autoscaling_without_keda_says_what_to_install(standard: OnKServe) -> None:
    standard.make(GOOD)
    standard.server.unregister("keda.sh/v1alpha1", "scaledobjects")
    with pytest.raises(NotInstalled, match="has no kind ScaledObject") as raised:
        standard.connect(prometheus="http://prometheus:9090").deploy(GOOD)
    assert "KEDA" in raised.value.hint


def test_a_setting_that_restarts_the_stable_release_waits_for_its_own_rollout(standard: OnKServe) -> None:
    standard.first()
    standard.make(NEXT)
    standard.connect(prometheus="http://prometheus:9090").deploy(NEXT)
    assert standard.service()["metadata"]["annotations"]["serving.kserve.io/autoscalerClass"] == "none"
    assert standard.server.all("ScaledObject") == []  # KServe would set the replicas back
    assert standard.kserve.started.count(GOOD) == 1
