"""The rollout's own state machine on KServe, in each of its modes, against an API server and real servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stages.parts.base.errors import Conflict, RolledBack, TransientError
from stages.parts.records.rollout import read_journal
from stages.parts.releases import release as releases
from stages.parts.releases.release import Split
from stages.rollout.commands import abort, roll_back
from stages.rollout.kserve.settings import Scaling
from stages.rollout.state_machine import roll_out
from tests.serving import wait_until
from tests.stages.rollout.kserve.on_kserve import OnKServe
from tests.stages.rollout.stage import GOOD, NEXT, SETTINGS

MODES: dict[str, dict[str, Any]] = {
    "standard": {"mode": "Standard"},
    "knative": {"mode": "Serverless"},
    "route": {"mode": "RawDeployment", "version": "v0.19.0", "gateway_api": False},
    "llm": {"mode": "RawDeployment", "version": "v0.20.0", "gateway_api": False, "asked": "llm"},
}


@pytest.fixture(params=MODES)
def kserve(request: pytest.FixtureRequest, serve: Callable[..., OnKServe]) -> OnKServe:
    return serve(**MODES[request.param])


def test_a_first_release_gets_all_traffic_once_it_answers(kserve: OnKServe) -> None:
    kserve.make(GOOD)
    assert kserve.connect().split() == Split(None)
    assert kserve.roll(GOOD).state == "promoted"
    target = kserve.connect()
    assert target.split() == Split(GOOD)
    assert target.client_url().startswith("http://org-name-")
    assert target.counters(GOOD).answered > 0
    assert releases.current_release(kserve.store) == GOOD


def test_a_good_canary_is_promoted_step_by_step_without_a_restart(kserve: OnKServe) -> None:
    kserve.first()
    kserve.make(NEXT)
    journal = kserve.roll(NEXT)
    assert journal.state == "promoted"
    assert [each.percent for each in journal.analyses] == [10, 50, 90, 100]
    assert kserve.connect().split() == Split(NEXT)
    assert kserve.kserve.started == [GOOD, NEXT]
    wait_until(lambda: {each.release for each in kserve.kserve.deployments.values()} == {NEXT}, "the old one is gone")
    assert kserve.kserve.sent_into_the_void == []


@pytest.mark.parametrize("ends", ["promoted", "rolled back"])
def test_the_stable_release_keeps_its_replicas_beside_a_canary(serve: Callable[..., OnKServe], ends: str) -> None:
    kserve = serve()
    kserve.settings = kserve.settings.model_copy(update={"scaling": Scaling(minimum=2, maximum=2)})
    kserve.first()
    wait_until(lambda: kserve.kserve.started.count(GOOD) == 2, "two replicas")
    kserve.make(NEXT)
    for _ in range(2):
        roll_out(kserve.store, kserve.connect(), NEXT, SETTINGS, until="10")
        kserve.connect().deploy(NEXT)
    (stable,) = [each for each in kserve.kserve.deployments.values() if each.release == GOOD]
    assert len(stable.pods) == 2
    if ends == "promoted":
        kserve.roll(NEXT)
    else:
        abort(kserve.store, kserve.connect())
    left = kserve.service()["spec"]["predictor"]
    assert (left["minReplicas"], left["maxReplicas"]) == (2, 2)
    assert kserve.kserve.started == [GOOD, GOOD, NEXT, NEXT], "nothing was started twice"


def test_a_bad_canary_is_rolled_back_and_removed(kserve: OnKServe) -> None:
    kserve.first()
    kserve.make(NEXT, first_s=0.3)
    with pytest.raises(RolledBack, match="time to first token"):
        kserve.roll(NEXT)
    assert kserve.connect().split() == Split(GOOD)
    assert releases.current_release(kserve.store) == GOOD
    wait_until(lambda: {each.release for each in kserve.kserve.deployments.values()} == {GOOD}, "the canary is gone")
    assert kserve.kserve.sent_into_the_void == []


def test_a_canary_whose_pods_crash_never_gets_traffic(kserve: OnKServe) -> None:
    kserve.first()
    kserve.make(NEXT)
    kserve.kserve.crashing.add(NEXT)
    with pytest.raises(RolledBack, match="it crashed 5 times: CUDA out of memory"):
        kserve.roll(NEXT)
    journal = read_journal(kserve.store)
    assert journal is not None
    assert "shifting" not in {each.state for each in journal.transitions}
    assert kserve.connect().split() == Split(GOOD)


def test_a_canary_that_never_becomes_ready_is_given_up_in_time(kserve: OnKServe) -> None:
    kserve.first()
    kserve.make(NEXT, never_ready=True)
    with pytest.raises(RolledBack, match="did not answer a completion within 1 s"):
        kserve.roll(NEXT, ready_timeout_s=1.0)
    assert kserve.connect().split() == Split(GOOD)


def test_a_canary_whose_image_can_not_be_pulled_is_given_up_and_the_reason_said(kserve: OnKServe) -> None:
    kserve.first()
    kserve.make(NEXT)
    kserve.kserve.unpulled.add(NEXT)
    with pytest.raises(RolledBack, match=r"within 1 s: \S+: the image localhost/x:1 can't be pulled"):
        kserve.roll(NEXT, ready_timeout_s=1.0)
    assert kserve.connect().split() == Split(GOOD)


@pytest.mark.parametrize("mode", ["standard", "route", "llm"])
def test_a_canary_gets_the_replicas_that_its_share_needs(serve: Callable[..., OnKServe], mode: str) -> None:
    kserve = serve(**MODES[mode])
    kserve.settings = kserve.settings.model_copy(update={"prometheus": "http://x:9090", "scaling": Scaling(maximum=4)})
    target = kserve.connect()
    for release in (GOOD, NEXT):
        kserve.make(release)
        target.deploy(release)
        wait_until(lambda release=release: target.ready(release), f"{release} is ready")  # type: ignore[misc]
        if release == GOOD:
            target.promote(GOOD)
    scaler = kserve.server.find("ScaledObject", kserve.deployment(GOOD))
    scaler["spec"]["minReplicaCount"] = 3  # as KEDA does under load
    kserve.server.put(scaler)
    wait_until(lambda: len(target.pods.ready_names(GOOD)) == 3, "the stable release has three replicas")
    assert target.prepare(NEXT, 10) == ""
    assert target.prepare(NEXT, 90) == "1 of 4 are ready"
    wait_until(lambda: target.prepare(NEXT, 90) == "", "the canary has its replicas")
    target.shift(NEXT, 90)
    target.promote(NEXT)
    assert [each["spec"]["minReplicaCount"] for each in kserve.server.all("ScaledObject")] == [1]


def test_each_step_may_be_a_process_of_its_own(kserve: OnKServe) -> None:
    kserve.first()
    kserve.make(NEXT)
    shares = []
    for step in ("deploy", "10", "50", "90", "100"):
        roll_out(kserve.store, kserve.connect(), NEXT, SETTINGS, until=step)
        shares.append(kserve.connect().split())
    last = kserve.roll(NEXT)
    assert [each.canary for each in shares] == [NEXT] * 5
    assert last.state == "promoted"
    assert [each.percent for each in last.analyses] == [10, 50, 90, 100]
    assert kserve.connect().split() == Split(NEXT)
    assert kserve.kserve.started == [GOOD, NEXT]


def test_a_rollback_goes_to_the_release_before(kserve: OnKServe) -> None:
    kserve.first()
    kserve.make(NEXT)
    kserve.roll(NEXT)
    assert roll_back(kserve.store, kserve.connect(), SETTINGS) == (GOOD, True)
    assert kserve.connect().split() == Split(GOOD)
    assert releases.current_release(kserve.store) == GOOD
    assert kserve.kserve.sent_into_the_void == []


def test_every_call_may_be_repeated(kserve: OnKServe) -> None:
    kserve.first()
    kserve.make(NEXT)
    target = kserve.connect()
    for _ in range(2):
        kserve.connect().deploy(NEXT)
    wait_until(lambda: kserve.connect().ready(NEXT), "the canary is ready")
    assert target.split() == Split(GOOD, NEXT, 0)
    assert target.url(NEXT) != target.url(GOOD)
    for _ in range(2):
        kserve.connect().shift(NEXT, 10)
    assert target.split() == Split(GOOD, NEXT, 10)
    for _ in range(2):
        kserve.connect().withdraw(NEXT)
    assert target.split() == Split(GOOD)
    target.deploy(NEXT)
    wait_until(lambda: target.ready(NEXT), "the canary is ready")
    for _ in range(2):
        kserve.connect().promote(NEXT)
    assert target.split() == Split(NEXT)
    for _ in range(2):
        kserve.connect().withdraw(NEXT, first=True)
    assert target.split() == Split(None)
    wait_until(lambda: not kserve.kserve.deployments, "everything is gone")


def test_the_stable_release_is_not_withdrawn(kserve: OnKServe) -> None:
    kserve.first()
    before = kserve.services()
    with pytest.raises(Conflict, match=f"{GOOD} is the stable release of org/name") as refused:
        kserve.connect().withdraw(GOOD)
    assert refused.value.hint == "slipway rollback org/name"
    assert [each["spec"] for each in kserve.services()] == [each["spec"] for each in before]
    assert kserve.connect().split() == Split(GOOD)


@pytest.mark.parametrize(
    ("mode", "state"),
    [
        ("standard", "shifting"),
        pytest.param("standard", "observing", marks=pytest.mark.slow),
        pytest.param("knative", "shifting", marks=pytest.mark.slow),
        pytest.param("route", "shifting", marks=pytest.mark.slow),
        pytest.param("llm", "observing", marks=pytest.mark.slow),
    ],
)
def test_a_rollout_that_is_killed_continues_where_it_was(serve: Callable[..., OnKServe], mode: str, state: str) -> None:
    kserve = serve(**MODES[mode])
    kserve.first()
    kserve.make(NEXT)
    kserve.nominate(NEXT)
    if state == "shifting":
        kserve.kserve.gateway_stuck = True

    def stands() -> bool:
        journal = read_journal(kserve.store)
        return journal is not None and journal.release == NEXT and journal.state == state

    with kserve.program(step_s=2 if state == "observing" else 0) as process:
        wait_until(lambda: stands() or process.poll() is not None, state)
        assert process.poll() is None, process.communicate()
        process.kill()
    kserve.kserve.gateway_stuck = False
    for _ in range(3):  # as Argo does where the platform was slow to say what holds
        with kserve.program() as again:
            said, log = again.communicate(timeout=120)
        if again.returncode != TransientError.exit_code:
            break
    assert again.returncode == 0, log
    assert said.strip() == kserve.connect().client_url()
    assert kserve.connect().split() == Split(NEXT)
    assert kserve.kserve.started.count(NEXT) == 1
