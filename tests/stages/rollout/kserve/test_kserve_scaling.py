"""Replicas that follow the load, and the drill of that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.settings.config import load
from stages.parts.base.errors import ConfigError, Conflict, NothingToServe, NotInstalled, TransientError
from stages.parts.base.serving_settings import PINNED, Serving
from stages.parts.base.store import STORE_VARIABLE, ModelStore
from stages.parts.records.drills import Drill
from stages.parts.releases.release import Split
from stages.rollout import pressure
from stages.rollout import scene as scenes
from stages.rollout.kserve.settings import Scaling
from stages.rollout.one_machine import OneMachine
from stages.rollout.pressure import drill_scale, failures_of, load_for
from stages.rollout.scene import Scene
from stages.rollout.target import Replicas, Target
from tests.serving import REPOSITORY, Said, wait_until
from tests.stages.rollout.kserve.on_kserve import PROPAGATION_S, STRAIGHT, OnKServe
from tests.stages.rollout.kserve.test_kserve_rollout import MODES
from tests.stages.rollout.stage import GOOD, MODEL, NEXT, SETTINGS

Serve = Callable[..., OnKServe]
LOADS_S = 1.0
BEHAVIOUR: dict[str, Any] = {"first_s": 0.1, "token_s": 0.02, "loads_s": LOADS_S}
PROMETHEUS = "http://prometheus:9090"
SCALING = Scaling(maximum=2, target=2)
FAST = ("workload.prompt_tokens=8", "workload.output_tokens=8")
WORKLOAD = load(None, assignments=FAST).workload
PACE = 0.02
"""The autoscaler's windows of 30 s and 300 s take 0.6 s and 6 s."""


@pytest.fixture(autouse=True)
def _looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "LOOK_S", 0.1)
    monkeypatch.setattr(scenes, "SETTLE_S", 0.3)
    monkeypatch.setattr(pressure, "PAUSE_S", 0.1)
    monkeypatch.setattr(pressure, "LIMIT_S", 60.0)
    monkeypatch.setattr(pressure, "LASTING_S", (1.0, 1.0))


def scaled(serve: Serve, mode: str = "standard", *, scaling: Scaling = SCALING, **behaviour: Any) -> OnKServe:
    """A cluster that serves one release, which KEDA scales."""
    kserve = serve(gateway=True, **MODES[mode])
    kserve.kserve.keda.pace = kserve.kserve.knative.pace = PACE
    kserve.settings = kserve.settings.model_copy(update={"prometheus": PROMETHEUS, "scaling": scaling})
    kserve.make(GOOD, **BEHAVIOUR, **behaviour)
    target = kserve.connect()
    target.deploy(GOOD)
    wait_until(lambda: target.ready(GOOD), "it is ready")
    target.promote(GOOD)
    return kserve


def drilled(kserve: OnKServe, *, short: bool = True) -> Drill:
    return drill_scale(scene(kserve.connect(), kserve.store, via=kserve.gateway.url, short=short))


def scene(target: Target, store: ModelStore, **changed: Any) -> Scene:
    return Scene(store, target, WORKLOAD, SETTINGS, **changed)


def command(kserve: OnKServe, *arguments: str) -> Said:
    """The drill as a person calls it."""
    reached = {"namespace": "default", "service_url": STRAIGHT, "gateway_url": kserve.gateway.url}
    times = {"in_force_s": 60, "propagation_s": PROPAGATION_S, "drain_s": 0}
    scaling = {"prometheus": PROMETHEUS, "scaling": SCALING.model_dump()}
    serving = {"dtype": "bfloat16"} | Serving().model_dump(include=set(PINNED))
    config = kserve.folder / "config.yaml"
    config.write_text(yaml.safe_dump({"kserve": reached | times | scaling, "serving": serving}))
    where = ["--platform", "kind", "--config", str(config), *(part for each in FAST for part in ("--set", each))]
    environment = os.environ | {
        "KUBECONFIG": str(kserve.server.kubeconfig(kserve.folder / "kubeconfig")),
        STORE_VARIABLE: str(kserve.store.root),
    }
    whole = [sys.executable, "-m", "pipeline", "drill", "scale", MODEL, *where, *arguments]
    return subprocess.run(
        whole, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def test_a_load_brings_a_replica_and_its_end_takes_it_away_later_without_a_failed_request(serve: Serve) -> None:
    kserve = scaled(serve)
    said = command(kserve, "--json")
    assert said.returncode == 0, said.stderr
    (drilled,) = json.loads(said.stdout)["drills"]
    assert (drilled["failures"], drilled["release"], drilled["answers"]["failed"]) == ([], GOOD, 0)
    figures = drilled["figures"]
    assert [figures[name] for name in ("replicas", "concurrency", "minimum", "maximum", "goal")] == [1, 4, 1, 2, 2]
    assert figures["lacking"] == ""
    assert figures["ready_s"] >= figures["wanted_s"] > 0
    assert figures["ttft_before_p95_ms"] >= 100
    assert figures["ttft_after_p95_ms"] >= 100
    assert figures["back_s"] >= figures["first_s"] > figures["wanted_s"]
    assert figures["fewest"] == 1
    assert kserve.kserve.started == [GOOD, GOOD]
    assert "4 requests in flight, where 1 × 2 should be" in said.stderr


@pytest.mark.parametrize("mode", ["route", "knative"])
def test_a_replica_that_comes_and_goes_costs_no_request_in_other_modes(serve: Serve, mode: str) -> None:
    kserve = scaled(serve, mode)
    told = drilled(kserve, short=False)
    assert told.failures == ()
    assert told.figures["ready_s"] >= told.figures["wanted_s"] + LOADS_S / 2
    assert (told.answers.failed, told.figures["fewest"]) == (0, 1)


def test_a_server_that_tells_its_requests_only_between_them_is_scaled_all_the_same(serve: Serve) -> None:
    kserve = scaled(serve, tells_late=True)
    told = drilled(kserve)
    assert told.failures == ()


def test_without_an_answer_from_prometheus_the_drill_fails_and_says_so(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    kserve = scaled(serve)
    kserve.kserve.keda.prometheus = False
    monkeypatch.setattr(pressure, "LIMIT_S", 4.0)
    (failure,) = drilled(kserve).failures
    assert failure.startswith("the autoscaler did not ask for 2 replicas within 4 s: KEDA says Fallback True: At least")
    assert kserve.kserve.started == [GOOD]


def test_a_replica_that_is_never_ready_fails_the_drill(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    kserve = scaled(serve)
    (kserve.store.releases / GOOD / "behaviour.json").write_text('{"never_ready": true}')
    monkeypatch.setattr(pressure, "LIMIT_S", 3.0)
    told = drilled(kserve, short=False)
    assert told.failures == ("2 replicas were asked for, but not ready within 3 s",)
    assert "first_s" not in told.figures


def test_what_can_not_scale_is_refused_before_any_request_is_sent(serve: Serve) -> None:
    kserve = scaled(serve)
    with pytest.raises(ConfigError, match=r"nothing scales .*: kserve.prometheus is null"):
        drill_scale(scene(kserve.connect(prometheus=None), kserve.store))
    (scaler,) = kserve.server.all("ScaledObject")
    kserve.server.put(scaler | {"spec": scaler["spec"] | {"maxReplicaCount": 1}})
    with pytest.raises(ConfigError, match="has 1 replicas under any load: its minimum is its maximum"):
        drilled(kserve)
    kserve.server.put(scaler | {"spec": scaler["spec"] | {"maxReplicaCount": 3, "minReplicaCount": 2}})
    wait_until(lambda: kserve.connect().replicas(GOOD).running == 2, "KEDA has raised the replicas")
    kserve.server.put(scaler)
    with pytest.raises(TransientError, match="has all of its 2 replicas already"):
        drilled(kserve)
    kserve.server.remove("ScaledObject", scaler["metadata"]["name"])
    with pytest.raises(ConfigError, match="there is no KEDA of ") as raised:
        drilled(kserve)
    assert "slipway rollout start org/name" in raised.value.hint
    kserve.server.unregister("keda.sh/v1alpha1", "scaledobjects")
    with pytest.raises(NotInstalled, match="has no kind ScaledObject"):
        drilled(kserve)


def test_a_canary_or_no_release_at_all_is_not_drilled(serve: Serve) -> None:
    kserve = serve()
    kserve.settings = kserve.settings.model_copy(update={"prometheus": PROMETHEUS, "scaling": SCALING})
    with pytest.raises(NothingToServe, match="org/name is not being served"):
        drilled(kserve)
    target = kserve.connect()
    for release in (GOOD, NEXT):
        kserve.make(release)
        target.deploy(release)
        wait_until(lambda release=release: target.ready(release), "it is ready")  # type: ignore[misc]
        if release == GOOD:
            target.promote(GOOD)
    with pytest.raises(Conflict, match=f"{NEXT} is being tried, and gets a part of the load"):
        drilled(kserve)


@pytest.mark.parametrize("mode", MODES)
def test_without_an_autoscaler_a_release_has_its_minimum_of_replicas(serve: Serve, mode: str) -> None:
    kserve = serve(**MODES[mode])
    kserve.settings = kserve.settings.model_copy(update={"scaling": Scaling(minimum=2)})
    kserve.first(GOOD)
    wait_until(lambda: len(kserve.connect().pods.ready_names(GOOD)) == 2, "both are ready")
    assert kserve.connect().servers(GOOD) == (2, 2)


def test_one_machine_does_not_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ModelStore(tmp_path, MODEL)
    target = OneMachine(store, MODEL, Serving())
    monkeypatch.setattr(target, "split", lambda: Split(GOOD))
    with pytest.raises(ConfigError, match="one machine has the same servers under any load"):
        drill_scale(scene(target, store))


def test_knative_scales_within_the_bounds_of_its_revision(serve: Serve) -> None:
    kserve = serve(**MODES["knative"])
    kserve.settings = kserve.settings.model_copy(update={"scaling": Scaling(minimum=2, maximum=5, target=7)})
    kserve.first(GOOD)
    assert kserve.connect().replicas(GOOD) == Replicas(running=2, ready=2, minimum=2, maximum=5, concurrency=7)


def test_a_pod_that_its_node_has_evicted_is_no_replica(serve: Serve) -> None:
    kserve = scaled(serve)
    pod = kserve.server.all("Pod")[0]
    metadata = {key: pod["metadata"][key] for key in ("namespace", "labels")} | {"name": "evicted"}
    kserve.server.put(pod | {"metadata": metadata, "status": pod["status"] | {"phase": "Failed"}})
    assert len(kserve.connect().pods.of(GOOD)) == 2
    assert kserve.connect().replicas(GOOD).running == 1


@pytest.mark.parametrize(
    ("there", "maximum", "expected"),
    [(1, 3, (2, 20)), (4, 9, (5, 50)), (8, 20, (10, 100)), (8, 9, (9, 100))],
    ids=["one more", "one more of five", "a quarter more", "as many as there may be"],
)
def test_the_load_needs_more_than_a_tenth_above_what_is_there(
    there: int, maximum: int, expected: tuple[int, int]
) -> None:
    assert load_for(Replicas(there, there, 1, maximum, 10)) == expected


def test_a_long_models_name_fits_the_autoscalers(serve: Serve) -> None:
    kserve = serve(**MODES["route"])
    kserve.settings = kserve.settings.model_copy(update={"prometheus": PROMETHEUS})
    kserve.store = ModelStore(kserve.store.root, "org/a-name-that-is-as-long-as-they-come")
    kserve.store.releases.mkdir(parents=True)
    kserve.kserve.releases = kserve.store.releases
    kserve.connect().deploy(kserve.make("0012-fp16-000000000001"))
    assert len(kserve.server.all("ScaledObject")[0]["metadata"]["name"]) > 63 - len("keda-hpa-")


SEEN = {
    "replicas": 1,
    "minimum": 1,
    "maximum": 2,
    "goal": 2,
    "limit_s": 60,
    "wanted_s": 40.0,
    "ready_s": 50.0,
    "lacking": "",
    "first_s": 300.0,
    "back_s": 300.0,
    "fewest": 1,
}
"""The figures of a drill that has held."""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        ({"wanted_s": None, "ready_s": None}, ["the autoscaler did not ask for 2 replicas within 60 s"]),
        (
            {"ready_s": None, "lacking": "no room"},
            ["2 replicas were asked for, but not ready within 60 s: no room"],
        ),
        ({"first_s": 40.0}, ["it scaled down after 40.0 s, sooner than up (40.0 s)"]),
        ({"back_s": None}, ["more than 1 replicas were left 60 s after the load"]),
        ({"fewest": 0}, ["only 0 replicas were left, fewer than the minimum 1"]),
    ],
    ids=["held", "not wanted", "not ready", "down too soon", "not back", "too few"],
)
def test_a_drill_of_scaling_has_held_only_if_everything_came_and_went(changed: dict[str, Any], said: list[str]) -> None:
    assert failures_of(SEEN | changed) == said


def test_without_the_way_back_the_way_up_suffices() -> None:
    only_up = {name: value for name, value in SEEN.items() if name not in ("first_s", "back_s", "fewest")}
    assert failures_of(only_up) == []
