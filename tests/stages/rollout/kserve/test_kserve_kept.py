"""The mode in which a model is served is kept, and nobody else's objects are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stages.parts.base.errors import Conflict
from stages.parts.releases.release import Split
from stages.rollout.kserve.llm import llm_deployment, llm_name, llm_route
from stages.rollout.kserve.objects import predictor_name
from stages.rollout.kserve.route import route_name, service_name
from tests.stages.rollout.kserve.on_kserve import OnKServe
from tests.stages.rollout.kserve.test_kserve_rollout import MODES
from tests.stages.rollout.stage import GOOD, NEXT

Serve = Callable[..., OnKServe]


def upgraded(kserve: OnKServe) -> None:
    """KServe 0.21 takes the place of an older one."""
    kserve.kserve.version, kserve.kserve.mode, kserve.kserve.gateway_api = "v0.21.0", "Standard", True
    kserve.kserve.configure()


@pytest.mark.parametrize("mode", ["route", "knative"])
def test_an_upgrade_of_kserve_leaves_a_model_in_its_mode(
    serve: Serve, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kserve = serve(**MODES[mode])
    kserve.first()
    assert "stays in mode" not in capsys.readouterr().err
    upgraded(kserve)
    kserve.make(NEXT)
    assert kserve.roll(NEXT).state == "promoted"
    assert f"org/name stays in mode {mode}; KServe's is now standard" in capsys.readouterr().err
    assert kserve.connect().installation.mode == mode
    assert kserve.connect().split() == Split(NEXT)
    assert kserve.kserve.started == [GOOD, NEXT]
    assert kserve.kserve.sent_into_the_void == []


def test_another_mode_than_the_one_that_serves_is_refused(serve: Serve) -> None:
    kserve = serve(**MODES["route"])
    kserve.first()
    upgraded(kserve)
    before = kserve.server.all("InferenceService")
    with pytest.raises(Conflict, match=r"served in mode route, and kserve.mode says standard$") as refused:
        kserve.connect(mode="standard")
    assert "slipway rollout move" in refused.value.hint
    assert kserve.connect(mode="route").split() == Split(GOOD)
    assert kserve.server.all("InferenceService") == before


def test_no_name_belongs_to_two_modes(standard: OnKServe) -> None:
    endpoint = standard.endpoint()
    by_kserve = {endpoint.name, f"{endpoint.name}-predictor", f"{endpoint.name}-{predictor_name(GOOD)}-predictor"}
    ours = {route_name(endpoint), service_name(endpoint, GOOD), f"{service_name(endpoint, GOOD)}-predictor"}
    assert by_kserve.isdisjoint(ours)
    llm = llm_name(endpoint, GOOD)
    by_kserve_too = {llm_deployment(llm), llm_route(llm), llm, f"{llm}-kserve-workload-svc"}
    assert by_kserve_too.isdisjoint(by_kserve | ours)
    longest = f"isvc.{service_name(endpoint, '12345-awq-123456789012')}-predictor"
    assert len(longest) + 28 - len(endpoint.name) <= 63, "a label's value, for the longest name of an endpoint"


def test_a_model_in_mode_llm_stays_in_it(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    kserve = serve(**MODES["llm"])
    kserve.first()
    upgraded(kserve)
    kserve.settings = kserve.settings.model_copy(update={"mode": "auto"})
    kserve.make(NEXT)
    assert kserve.roll(NEXT).state == "promoted"
    assert "org/name stays in mode llm; KServe's is now standard" in capsys.readouterr().err
    assert kserve.connect().installation.mode == "llm"
    assert kserve.server.all("InferenceService") == []
    with pytest.raises(Conflict, match=r"served in mode llm, and kserve.mode says standard$"):
        kserve.connect(mode="standard")


def of_somebody(kserve: OnKServe, name: str, **metadata: Any) -> None:
    spec = {"parentRefs": [{"name": "theirs"}], "hostnames": ["theirs"], "rules": [{"backendRefs": [{"name": "x"}]}]}
    kserve.server.put(
        {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "HTTPRoute",
            "metadata": {"name": name, "namespace": "default", **metadata},
            "spec": spec,
        },
        manager="theirs",
    )


def route_in(kserve: OnKServe, mode: str) -> str:
    of_llm = llm_route(llm_name(kserve.endpoint(), GOOD))
    return {"standard": kserve.name, "route": kserve.route, "llm": of_llm}[mode]


@pytest.mark.parametrize("mode", ["standard", "route", "llm"])
def test_a_route_of_somebody_else_is_refused_by_name(serve: Serve, mode: str) -> None:
    kserve = serve(**MODES[mode])
    kserve.make(GOOD)
    name = route_in(kserve, mode)
    of_somebody(kserve, name)
    with pytest.raises(Conflict, match=f"the HTTPRoute {name} (does not serve org/name|was not made by KServe)"):
        kserve.roll(GOOD)
    assert kserve.services() == []


@pytest.mark.parametrize("mode", ["standard", "route", "llm"])
def test_a_route_that_another_controller_looks_after_is_refused_by_name(serve: Serve, mode: str) -> None:
    kserve = serve(**MODES[mode])
    kserve.make(GOOD)
    owner = {"apiVersion": "v1", "kind": "Rollout", "name": "theirs", "uid": "1"}
    name = route_in(kserve, mode)
    of_somebody(kserve, name, ownerReferences=[owner], annotations={"slipway/model": "org/name"})
    with pytest.raises(Conflict, match=f"the HTTPRoute {name} belongs to the Rollout theirs"):
        kserve.roll(GOOD)
    assert kserve.services() == []


def test_a_model_that_two_modes_serve_is_refused_with_the_names_of_both(serve: Serve) -> None:
    kserve = serve(**MODES["route"])
    kserve.first()
    other = kserve.server.all("InferenceService")[0]
    annotations = {"slipway/model": "org/name", "serving.kserve.io/deploymentMode": "Standard"}
    labels = {"app.kubernetes.io/part-of": "slipway"}
    metadata = {"name": kserve.name, "namespace": "default", "labels": labels, "annotations": annotations}
    kserve.kserve.stop()
    kserve.server.put({**{key: other[key] for key in ("apiVersion", "kind", "spec")}, "metadata": metadata})
    with pytest.raises(Conflict, match=f"in two modes at once: .*standard \\({kserve.name}\\)"):
        kserve.connect()
