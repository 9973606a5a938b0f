"""Rollouts and drills on KServe as clients see them: they ask all the while, through the cluster's gateway."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from pipeline.settings.config import kserve_settings, load
from stages.parts.base.errors import AccessDenied, ConfigError, DrillFailed, NothingToServe, RolledBack
from stages.parts.base.serving_settings import PINNED, Serving
from stages.parts.base.store import STORE_VARIABLE
from stages.parts.records.drills import Drill
from stages.parts.records.drills import drilled as drills_of
from stages.parts.records.rollout import under_way
from stages.parts.releases import release as releases
from stages.parts.releases.release import Split
from stages.parts.vllm.client import Access, Reply
from stages.rollout import drills
from stages.rollout import scene as scenes
from stages.rollout.commands import abort
from stages.rollout.drills import drill_crash, drill_rollback
from stages.rollout.kserve.settings import Scaling
from stages.rollout.scene import Scene, SteadyLoad, answers
from tests.serving import REPOSITORY, Said, wait_until
from tests.stages.parts.vllm.test_engine_log import STARTED
from tests.stages.rollout.kserve.on_kserve import PROPAGATION_S, STRAIGHT, OnKServe
from tests.stages.rollout.kserve.test_kserve_rollout import MODES
from tests.stages.rollout.stage import GOOD, MODEL, NEXT, SETTINGS

Serve = Callable[..., OnKServe]
PACE: dict[str, Any] = {"first_s": 0.02, "token_s": 0.01}
ERRING, SLOW, BETTER = "0002-awq-000000000002", "0003-gptq-000000000003", "0004-fp16-000000000004"
OTHERS = ["knative", "route"]
LOADS_S = 1.5
"""How long a pod's model loads before it is ready."""
OUT_OF_LUCK = '500 {"error": {"message": "out of luck"}}'
"""The error that only an erring release gives."""
FAST = ("--set", "workload.concurrency=3", "--set", "workload.prompt_tokens=8", "--set", "workload.output_tokens=8")
WORKLOAD = load(None, assignments=FAST[1::2]).workload


class Drilled:
    """A cluster with a gateway, and the command line with the configuration that leads there."""

    def __init__(self, kserve: OnKServe) -> None:
        self.kserve, self.config = kserve, kserve.folder / "config.yaml"
        self.configure(in_force_s=60)

    def configure(self, in_force_s: int) -> None:
        kserve = self.kserve
        reached = {"namespace": "default", "service_url": STRAIGHT, "gateway_url": kserve.gateway.url}
        times = {"in_force_s": in_force_s, "propagation_s": PROPAGATION_S, "drain_s": 0}
        # These releases were never measured, so that auto has no answer.
        serving = {"dtype": "bfloat16"} | Serving().model_dump(include=set(PINNED))
        document = {"kserve": reached | times, "rollout": {"poll_s": 0.05}, "serving": serving}
        self.config.write_text(yaml.safe_dump(document))
        settings = load(self.config, chosen={"platform": "kind"})
        kserve.settings, kserve.serving = kserve_settings(settings), settings.serving.pinned()

    def two_releases(self) -> None:
        self.kserve.first(GOOD, **PACE)
        self.kserve.make(NEXT, **PACE)
        self.kserve.roll(NEXT)

    def served(self) -> tuple[Any, ...]:
        """Everything that decides what clients get."""
        specs = [each["spec"] for each in self.kserve.server.all("InferenceService")]
        routes = [each["spec"]["rules"][0]["backendRefs"] for each in self.kserve.server.all("HTTPRoute")]
        backends = [{each["name"] for each in route if each.get("weight", 1)} for route in routes]
        return releases.current_release(self.kserve.store), self.kserve.connect().split(), specs, backends

    def drill(self, *arguments: str) -> Said:
        """Run the command as a person would."""
        where = ["--platform", "kind", "--config", str(self.config)]
        environment = os.environ | {
            "KUBECONFIG": str(self.kserve.server.kubeconfig(self.kserve.folder / "kubeconfig")),
            STORE_VARIABLE: str(self.kserve.store.root),
        }
        return subprocess.run(
            [sys.executable, "-m", "pipeline", "drill", arguments[0], MODEL, *where, *FAST, *arguments[1:]],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )


def clients(kserve: OnKServe) -> SteadyLoad:
    access = Access(kserve.connect().client_url(), MODEL, via=kserve.gateway.url)
    return SteadyLoad(access, 6, (4, 8))


def by_release(replies: Sequence[Reply]) -> set[str]:
    return {each.release for each in replies if not each.error}


@pytest.mark.parametrize("mode", MODES)
def test_clients_decide_what_is_promoted_and_notice_only_the_errors_of_a_canary(serve: Serve, mode: str) -> None:
    kserve = serve(gateway=True, **MODES[mode])
    kserve.first(GOOD, **PACE)
    kserve.make(ERRING, fails_every=2, **PACE)
    kserve.make(SLOW, first_s=0.1, token_s=0.02)
    kserve.make(BETTER, **PACE)
    by_clients: dict[str, Any] = {"synthetic": False, "steps": (50, 100), "poll_s": 0.1}
    with clients(kserve) as load:
        with pytest.raises(RolledBack, match=r"at 50 %: .*requests failed"):
            kserve.roll(ERRING, **by_clients)
        wait_until(lambda: by_release(load.replies()[-6:]) == {GOOD}, "the stable release's answers")
        gone_s = time.monotonic()
        # Either measure of its speed may be the first one known to be worse.
        with pytest.raises(RolledBack, match=r"at 50 %: .*time (to first|per output) token"):
            kserve.roll(SLOW, **by_clients)
        assert kserve.roll(BETTER, **by_clients).state == "promoted"
        wait_until(lambda: by_release(load.replies()[-6:]) == {BETTER}, "the new release's answers")
    replies = load.replies()
    assert {each.error for each in replies if each.sent_s < gone_s} == {"", OUT_OF_LUCK}
    assert {each.error for each in replies if each.sent_s >= gone_s} == {""}
    assert by_release(replies) == {GOOD, ERRING, SLOW, BETTER}
    assert {each.tokens for each in replies if not each.error} == {8}
    assert kserve.kserve.sent_into_the_void == []


def only(said: Said) -> Drill:
    """The only drill of a document."""
    (drill,) = json.loads(said.stdout)["drills"]
    return Drill.model_validate(drill)


def test_a_rollback_drill_prints_its_duration_and_restores_everything(serve: Serve) -> None:
    drilled = Drilled(serve(gateway=True))
    drilled.two_releases()
    before = drilled.served()
    said = drilled.drill("rollback")
    assert said.returncode == 0, said.stderr
    (rollback_s,) = re.findall(r"^rollback +held .*\brollback_s (\d+\.?\d*)", said.stdout, re.MULTILINE)
    assert float(rollback_s) > PROPAGATION_S
    assert re.search(rf"^{GOOD} gets all requests after \d+\.\d s$", said.stderr, re.MULTILINE)
    assert re.search(r"^rollback: held, after \d+ s$", said.stderr, re.MULTILINE)
    assert drilled.served() == before
    assert drilled.kserve.kserve.sent_into_the_void == []
    (kept,) = drills_of(drilled.kserve.store, NEXT)
    assert (kept.drill, kept.verdict, set(kept.answers.releases)) == ("rollback", "held", {GOOD, NEXT})
    assert kept.answers.requests > 10


@pytest.mark.slow
@pytest.mark.parametrize("mode", OTHERS)
def test_a_rollback_that_takes_too_long_fails_the_drill(
    serve: Serve, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kserve = serve(gateway=True, **MODES[mode])
    kserve.first(GOOD, **PACE)
    kserve.make(NEXT, **PACE)
    kserve.roll(NEXT)
    monkeypatch.setattr(drills, "ROLLBACK_LIMIT_S", 0.1)
    drill = drill_rollback(Scene(kserve.store, kserve.connect(), WORKLOAD, SETTINGS, kserve.gateway.url))
    assert drill.failures == (f"the rollback took {drill.figures['rollback_s']:.1f} s, allowed 0.1 s",)
    assert (drill.answers.failed, set(drill.answers.releases)) == (0, {GOOD, NEXT})
    assert kserve.connect().split() == Split(NEXT)


def test_a_drill_whose_route_is_never_programmed_fails_in_time_and_is_given_up(serve: Serve) -> None:
    drilled = Drilled(serve(gateway=True))
    drilled.two_releases()
    before = drilled.served()
    drilled.configure(in_force_s=3)
    drilled.kserve.kserve.gateway_stuck = True
    said = drilled.drill("rollback")
    assert said.returncode == 44
    assert f"error: {GOOD} did not get all requests: 100 % for {GOOD} was not in force within 3 s" in said.stderr
    assert "its gateway has not seen the last change" in said.stderr
    assert f"slipway rollout abort {MODEL}" in said.stderr, "nor is it known that it is back"
    assert drilled.kserve.service()["spec"]["canary"][0]["trafficPercent"] == 0, "back, once its gateway works"
    drilled.kserve.kserve.gateway_stuck = False
    drilled.configure(in_force_s=60)
    assert abort(drilled.kserve.store, drilled.kserve.connect()) == GOOD
    assert under_way(drilled.kserve.store) is None
    assert drilled.kserve.connect().split() == Split(NEXT)
    wait_until(lambda: drilled.served() == before, "the route is as it was")


def test_a_load_drill_sends_requests_through_the_gateway_without_a_store(serve: Serve, tmp_path: Path) -> None:
    drilled, elsewhere = Drilled(serve(gateway=True)), ("--store", str(tmp_path / "none"))
    said = drilled.drill("load", "--short", *elsewhere)
    assert (said.returncode, "is not being served on kserve" in said.stderr) == (33, True)
    drilled.kserve.first(GOOD, **PACE)
    said = drilled.drill("load", "--short", *elsewhere)
    assert (said.returncode, "add --peak" in said.stderr) == (ConfigError.exit_code, True)
    said = drilled.drill("load", "--short", "--peak", "4", "--json", *elsewhere)
    drill = only(said)
    assert (said.returncode, drill.failures, drill.answers.failed) == (0, (), 0)
    assert list(drill.answers.releases) == [GOOD]
    assert drill.figures["ttft_p95_ms"] >= 20
    assert not (tmp_path / "none").exists()


def test_a_cold_start_on_a_cluster_is_timed_by_its_pod_and_its_log(serve: Serve, tmp_path: Path) -> None:
    drilled = Drilled(serve(gateway=True))
    drilled.kserve.kserve.log = STARTED
    drilled.kserve.first(GOOD, loads_s=LOADS_S, **PACE)
    said = drilled.drill("cold", "--json", "--store", str(tmp_path / "none"))
    assert said.returncode == 0, said.stderr
    figures = only(said).figures
    assert figures["total_s"] >= LOADS_S
    assert (figures["weights_s"], figures["compilation_s"]) == (2.399, 41.5)
    assert figures["process_s"] < figures["total_s"]
    drilled.kserve.server.forbidden.add(("get", "pods/log"))
    said = drilled.drill("cold", "--json", "--store", str(tmp_path / "none"))
    assert (said.returncode, "weights_s" in only(said).figures) == (0, False)


def test_no_traffic_is_moved_if_no_request_is_answered(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    kserve = serve()
    kserve.first()
    kserve.make(NEXT)
    kserve.roll(NEXT)
    changes = len(kserve.server.requests_for("patch", "*"))
    capsys.readouterr()
    with pytest.raises(DrillFailed, match="no request is answered, and nothing was changed: ConnectError") as raised:
        drill_rollback(Scene(kserve.store, kserve.connect(), WORKLOAD, SETTINGS, "http://127.0.0.1:9"))
    assert "kserve.gateway_url" in raised.value.hint
    assert len(kserve.server.requests_for("patch", "*")) == changes
    assert capsys.readouterr().err == ""


@pytest.fixture
def settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less load before and after."""
    for module in (drills, scenes):
        monkeypatch.setattr(module, "SETTLE_S", 0.3)


def crashed(kserve: OnKServe) -> Drill:
    return drill_crash(Scene(kserve.store, kserve.connect(), WORKLOAD, SETTINGS, kserve.gateway.url))


def test_without_another_replica_a_crash_drill_reports_the_outage(serve: Serve, tmp_path: Path) -> None:
    drilled = Drilled(serve(gateway=True))
    drilled.kserve.first(GOOD, loads_s=LOADS_S, **PACE)
    said = drilled.drill("crash", "--json", "--store", str(tmp_path / "none"))
    assert said.returncode == 0, said.stderr
    drill = only(said)
    assert (drill.failures, drill.release, list(drill.answers.releases)) == ((), GOOD, [GOOD])
    assert drill.figures["recovered_s"] >= LOADS_S
    assert drill.figures["outage_s"] > 0
    assert "503 no healthy upstream" in drill.answers.errors
    assert f"killing a server of {GOOD}" in said.stderr
    assert drilled.kserve.kserve.started == [GOOD, GOOD]


@pytest.mark.parametrize("mode", ["standard", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)])
@pytest.mark.usefixtures("settling")
def test_with_another_replica_a_crash_fails_only_requests_in_flight(serve: Serve, mode: str) -> None:
    kserve = serve(gateway=True, **MODES[mode])
    kserve.settings = kserve.settings.model_copy(update={"scaling": Scaling(minimum=2)})
    kserve.first(GOOD, loads_s=LOADS_S, **PACE)
    told = crashed(kserve)
    assert told.failures == ()
    assert told.figures["recovered_s"] >= LOADS_S
    assert told.answers.failed <= WORKLOAD.concurrency
    assert [each.query for each in kserve.server.requests_for("delete", "*/pods/*")] == [{"gracePeriodSeconds": "0"}]
    assert kserve.kserve.started == [GOOD] * 3


@pytest.mark.usefixtures("settling")
def test_a_pod_that_does_not_come_back_fails_the_crash_drill(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drills, "RECOVERY_LIMIT_S", 1.0)
    kserve = serve(gateway=True)
    kserve.first(GOOD, **PACE)
    (kserve.store.releases / GOOD / "behaviour.json").write_text('{"never_ready": true}')
    told = crashed(kserve)
    assert (told.figures["recovered_s"], told.failures) == (None, (f"{GOOD} was not up again after 1 s",))


@pytest.mark.usefixtures("settling")
def test_a_crash_drill_that_cannot_kill_anything_says_why(serve: Serve) -> None:
    kserve = serve(gateway=True)
    with pytest.raises(NothingToServe, match="org/name is not being served on kserve"):
        crashed(kserve)
    kserve.first(GOOD, **PACE)
    kserve.server.forbidden.add(("delete", "pods"))
    with pytest.raises(AccessDenied, match='cannot delete resource "pods"') as raised:
        crashed(kserve)
    assert "delete on pods in the namespace default" in raised.value.hint
    assert kserve.kserve.started == [GOOD]


def test_pods_stay_until_the_gateways_proxies_have_followed_its_status(serve: Serve) -> None:
    kserve = serve(gateway=True, lag_s=0.5)
    kserve.settings = kserve.settings.model_copy(update={"propagation_s": 0.8})
    kserve.first(GOOD, **PACE)
    kserve.make(NEXT, **PACE)
    target = kserve.connect()
    target.deploy(NEXT)
    wait_until(lambda: target.ready(NEXT), "the canary is ready")
    with clients(kserve) as load:
        target.shift(NEXT, 50)
        wait_until(lambda: by_release(load.replies()) == {GOOD, NEXT}, "answers of both")
        target.withdraw(NEXT)
        wait_until(lambda: by_release(load.replies()[-6:]) == {GOOD}, "the stable release's answers")
    assert answers(load.replies()).errors == ()
    assert kserve.kserve.sent_into_the_void == []


def test_a_chat_client_reads_a_stream_and_the_release_that_gave_it(serve: Serve) -> None:
    kserve = serve(gateway=True)
    kserve.first(GOOD)
    host = kserve.connect().client_url().removeprefix("http://")
    client = openai.OpenAI(base_url=f"{kserve.gateway.url}/v1", api_key="none", default_headers={"Host": host})
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == "!!!!"
    assert (last.usage and last.usage.completion_tokens, last.system_fingerprint) == (4, GOOD)
