"""A rollout applies exactly what was rendered before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stages.parts.base.errors import ConfigError
from stages.parts.base.rollout_settings import Mirror
from stages.parts.cluster.kinds import Object
from stages.rollout.kserve.modes import render
from stages.rollout.state_machine import roll_out
from tests.stages.rollout.kserve.on_kserve import OnKServe
from tests.stages.rollout.kserve.test_kserve_rollout import MODES
from tests.stages.rollout.stage import GOOD, NEXT, SETTINGS


def contains(there: Any, wanted: Any) -> bool:
    """KServe adds defaults."""
    if isinstance(wanted, dict):
        return isinstance(there, dict) and all(key in there and contains(there[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return isinstance(there, list) and len(there) == len(wanted) and all(map(contains, there, wanted))
    return bool(there == wanted)


def assert_applied(kserve: OnKServe, shown: list[Object]) -> None:
    for each in shown:
        there = kserve.server.find(each["kind"], each["metadata"]["name"])
        for backend in each["spec"]["rules"][0]["backendRefs"] if each["kind"] == "HTTPRoute" else ():
            assert backend["port"] == 80
            # Services here listen on ports of this machine.
            backend["port"] = kserve.server.find("Service", backend["name"])["spec"]["ports"][0]["port"]
        assert contains(there["spec"], each["spec"]), each["kind"]
        assert contains(there["metadata"], each["metadata"]), each["kind"]


@pytest.mark.parametrize("mode", MODES)
def test_the_rendered_objects_are_those_that_are_applied(serve: Callable[..., OnKServe], mode: str) -> None:
    kserve = serve(**MODES[mode])
    kserve.make(GOOD)
    kserve.roll(GOOD)
    assert_applied(kserve, render(kserve.endpoint(), GOOD, None, mode, 100))
    kserve.make(NEXT)
    roll_out(kserve.store, kserve.connect(), NEXT, SETTINGS, until="10")
    kserve.connect().shift(NEXT, 10)
    shown = render(kserve.endpoint(), NEXT, GOOD, mode, 10)
    kinds = {"standard": 1, "knative": 1, "route": 2, "llm": 0}[mode] * ["InferenceService"]
    kinds += ["LLMInferenceService"] * 2 if mode == "llm" else []
    assert [each["kind"] for each in shown] == [
        *kinds,
        *(["HTTPRoute"] if mode == "route" else []),
        "PodDisruptionBudget",
    ]
    assert_applied(kserve, shown)


def test_with_prometheus_each_release_is_rendered_with_its_autoscaler(serve: Callable[..., OnKServe]) -> None:
    kserve = serve()
    for each in (GOOD, NEXT):
        kserve.make(each)
    kserve.settings = kserve.settings.model_copy(update={"prometheus": "http://prometheus:9090"})
    shown = render(kserve.endpoint(), NEXT, GOOD, "standard", 10)
    scaled = [each["spec"]["scaleTargetRef"]["name"] for each in shown if each["kind"] == "ScaledObject"]
    assert scaled == [f"{kserve.name}-r1-000000-predictor", f"{kserve.name}-r2-000000-predictor"]
    assert "ScaledObject" not in {each["kind"] for each in render(kserve.endpoint(), NEXT, GOOD, "knative", 10)}


@pytest.mark.parametrize("copied", [20, 100])
def test_copies_are_rendered_as_they_are_applied_and_end_with_the_first_share(
    serve: Callable[..., OnKServe], copied: int
) -> None:
    kserve = serve(**MODES["route"])
    kserve.first(GOOD)
    kserve.make(NEXT)
    roll_out(kserve.store, kserve.connect(), NEXT, SETTINGS, until="deploy")
    target = kserve.connect()
    target.copy(NEXT, copied)
    shown = render(kserve.endpoint(), NEXT, GOOD, "route", 0, copied)
    (rule,) = next(each for each in shown if each["kind"] == "HTTPRoute")["spec"]["rules"]
    (mirror,) = rule["filters"]
    canary = rule["backendRefs"][-1]["name"]
    assert mirror["requestMirror"]["backendRef"]["name"] == canary
    assert mirror["requestMirror"].get("percent", 100) == copied
    assert [backend["weight"] for backend in rule["backendRefs"]] == [100, 0]
    applied = kserve.server.find("HTTPRoute", kserve.route)["spec"]["rules"][0]
    assert applied["filters"][0]["requestMirror"]["backendRef"]["name"] == canary
    assert target.split().percent == 0
    target.shift(NEXT, 10)
    assert "filters" not in kserve.server.find("HTTPRoute", kserve.route)["spec"]["rules"][0]
    target.copy(NEXT, copied)
    target.withdraw(NEXT)
    assert "filters" not in kserve.server.find("HTTPRoute", kserve.route)["spec"]["rules"][0]


@pytest.mark.parametrize("mode", ["standard", "knative", "llm"])
def test_copies_are_refused_where_kserve_makes_the_routes(serve: Callable[..., OnKServe], mode: str) -> None:
    kserve = serve(**MODES[mode])
    kserve.first(GOOD)
    kserve.make(NEXT)
    mirrored = SETTINGS.model_copy(update={"mirror": Mirror()})
    with pytest.raises(ConfigError, match=rf"rollout\.mirror: .* in mode {mode} can't copy requests"):
        roll_out(kserve.store, kserve.connect(), NEXT, mirrored)
    with pytest.raises(ConfigError, match=f"mode {mode} can't copy requests"):
        render(kserve.endpoint(), NEXT, GOOD, mode, 0, 20)


def test_a_rollout_with_copies_on_a_cluster(serve: Callable[..., OnKServe]) -> None:
    kserve = serve(**MODES["route"])
    kserve.first(GOOD)
    kserve.make(NEXT)
    journal = kserve.roll(NEXT, mirror=Mirror(percent=20, duration_s=0.1))
    assert journal.state == "promoted"
    assert [step.percent for step in journal.observed][:2] == [0, 10]
