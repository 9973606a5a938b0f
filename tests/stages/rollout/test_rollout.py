"""What a rollout does with good canaries and with bad ones, on real servers."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from stages.parts.base.errors import Conflict, NothingToServe, RolledBack, ServerFailed
from stages.parts.base.program import RUN_VARIABLE
from stages.parts.base.serving_settings import Serving
from stages.parts.records.rollout import read_journal
from stages.parts.releases import release as releases
from stages.parts.releases.release import Split, history
from stages.rollout.state_machine import StateMachine, roll_out
from tests.stages.rollout.stage import GOOD, MODEL, NEXT, SETTINGS, Stage


@contextmanager
def clients(stage: Stage, every_s: float = 0.002) -> Iterator[list[bool]]:
    """Clients that are routed by the platform's split, one after the other; yields whether each got an answer."""
    got: list[bool] = []
    enough = threading.Event()

    def ask() -> None:
        while not enough.is_set():
            split = stage.target.split()
            release = split.canary if split.canary and len(got) % 100 * 37 % 100 < split.percent else split.stable
            assert release
            body = {"model": MODEL, "prompt": "Hello", "max_tokens": 4}
            try:
                got.append(client.post(f"{stage.target.url(release)}/v1/completions", json=body).is_success)
            except httpx.HTTPError:
                got.append(False)
            time.sleep(every_s)

    client = httpx.Client(timeout=60)
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield got
    finally:
        enough.set()
        thread.join()
        client.close()


def test_the_first_release_gets_all_traffic_once_it_answers(stage: Stage) -> None:
    stage.make(GOOD)
    stage.nominate(GOOD)
    journal = roll_out(stage.store, stage.target, GOOD, SETTINGS)
    assert (journal.kind, journal.state, journal.analyses) == ("first", "promoted", ())
    assert stage.target.split() == Split(stable=GOOD)
    assert (releases.current_release(stage.store), stage.reasons()) == (GOOD, GOOD)
    assert releases.candidate(stage.store) is None
    assert [(each.release, each.before, each.result) for each in history(stage.store)] == [(GOOD, None, "promoted")]


def test_a_good_canary_goes_through_every_step_and_is_promoted_with_its_reasons(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT, first_s=0.003)
    stage.nominate(NEXT)
    journal = roll_out(stage.store, stage.target, NEXT, SETTINGS)
    assert journal.state == "promoted"
    assert [each for each in stage.target.calls()[2:] if not each.startswith("counters")] == [
        "deploy",
        "shift 10",
        "shift 50",
        "shift 90",
        "shift 100",
        "promote",
    ]
    assert [(each.percent, each.verdict) for each in journal.analyses] == [
        (10, "promote"),
        (50, "promote"),
        (90, "promote"),
        (100, "promote"),
    ]
    always = {"requests", "errors", "own requests", "ttft", "tpot", "quality"}
    for each in journal.analyses:
        checks = always | ({"refused"} if each.percent < 100 else set())
        checks |= {"late", "delayed"} if each.percent <= 50 else set()
        assert {check.name: check.verdict for check in each.checks} == dict.fromkeys(checks, "pass")
    assert stage.target.split() == Split(stable=NEXT, standby=GOOD)
    assert (releases.current_release(stage.store), stage.reasons()) == (NEXT, NEXT)
    move = history(stage.store)[-1]
    assert (move.kind, move.release, move.before, move.result) == ("rollout", NEXT, GOOD, "promoted")
    assert len(move.analyses) == 4


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (
            {"first_s": 0.1},
            r"at 10 %: typical time to first token: \d{3}\.\d ms \(stable release: \d+\.\d ms, at most \d+\.\d ms\)",
        ),
        (
            {"token_s": 0.02},
            r"at 10 %: typical time per output token: \d+\.\d ms \(stable release: \d+\.\d ms, at most \d+\.\d ms\)",
        ),
        ({"fails_every": 2}, r"at 10 %: \d+ of \d+ requests failed \(stable release: 0 of"),
        ({"garbage": True}, "its answers agree with the recorded ones by 0.055; at least 0.9 is required"),
        ({"never_ready": True}, "it did not answer a completion within 0.3 s"),
        ({"recorded": False}, "it carries no recorded answers to compare with"),
    ],
    ids=["slow to begin", "slow", "failing", "garbage", "never ready", "not comparable"],
)
def test_a_worse_canary_is_rolled_back_and_the_reason_is_named(
    stage: Stage, behaviour: dict[str, object], reason: str
) -> None:
    stage.served()
    recorded = bool(behaviour.pop("recorded", True))
    stage.make(NEXT, recorded=recorded, **behaviour)
    stage.nominate(NEXT)
    settings = SETTINGS.model_copy(update={"ready_timeout_s": 0.3 if behaviour.get("never_ready") else 20.0})
    with pytest.raises(RolledBack, match=reason):
        roll_out(stage.store, stage.target, NEXT, settings)
    assert stage.target.split() == Split(stable=GOOD)
    assert (releases.current_release(stage.store), stage.reasons()) == (GOOD, GOOD)
    assert releases.candidate(stage.store) is None
    assert (stage.store.releases / NEXT).is_dir()
    move = history(stage.store)[-1]
    assert (move.release, move.before, move.result) == (NEXT, GOOD, "rolled back")
    journal = read_journal(stage.store)
    assert journal is not None
    assert journal.reason == move.reason


def test_a_canary_that_does_not_get_its_replicas_gets_no_traffic(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    (stage.store.releases / NEXT / "alone").touch()
    settings = SETTINGS.model_copy(update={"ready_timeout_s": 0.3})
    with pytest.raises(RolledBack, match="did not get the replicas for 10 % of the requests: no replicas for 10 %"):
        roll_out(stage.store, stage.target, NEXT, settings)
    assert stage.target.split() == Split(stable=GOOD)


@pytest.mark.parametrize("platform", ["local", "kserve"])
def test_the_hint_of_a_rollback_works_where_it_is_read(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, "slipway-1")
    stage.target.name = platform
    stage.served()
    stage.make(NEXT, garbage=True)
    stage.nominate(NEXT)
    with pytest.raises(RolledBack) as rolled_back:
        roll_out(stage.store, stage.target, NEXT, SETTINGS)
    assert ("slipway rollout status" in rolled_back.value.hint) == (platform == "local")
    assert ("the run's report" in rolled_back.value.hint) == (platform == "kserve")


@pytest.mark.parametrize("behaviour", [{"garbage": True}, {"never_ready": True}])
def test_a_canary_that_never_answers_well_gets_no_traffic(stage: Stage, behaviour: dict[str, bool]) -> None:
    stage.served()
    stage.make(NEXT, **behaviour)
    with pytest.raises(RolledBack):
        roll_out(stage.store, stage.target, NEXT, SETTINGS.model_copy(update={"ready_timeout_s": 0.3}))
    assert not [each for each in stage.target.calls() if each.startswith("shift")]


def test_too_little_traffic_is_inconclusive_and_rolled_back_after_the_step_s_time(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.served()
    stage.make(NEXT)
    # The step's time is over after the first look.
    monkeypatch.setattr(StateMachine, "_elapsed_s", lambda machine: 61.0 if machine.journal.analyses else 0.0)
    quiet = SETTINGS.model_copy(update={"synthetic": False})
    with pytest.raises(RolledBack, match="at 10 %, nothing showed that it is as good: 0 requests to the canary"):
        roll_out(stage.store, stage.target, NEXT, quiet)
    journal = read_journal(stage.store)
    assert journal is not None
    assert [each.verdict for each in journal.analyses] == ["inconclusive"]
    assert stage.target.split() == Split(stable=GOOD)


def test_only_the_traffic_of_clients_decides_if_there_is_enough(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    with clients(stage) as got:
        journal = roll_out(stage.store, stage.target, NEXT, SETTINGS.model_copy(update={"synthetic": False}))
        assert journal.state == "promoted"
        seen = len(got)
        while len(got) < seen + 5:
            time.sleep(0.01)
    assert all(got)
    requests = {each.percent: each.checks[0].verdict for each in journal.analyses}
    assert requests == dict.fromkeys((10, 50, 90, 100), "pass")
    assert {check.text for each in journal.analyses for check in each.checks if check.name == "own requests"} == {
        "there were none"
    }


@pytest.mark.parametrize("share", ["50", "90"])
def test_a_sound_canary_on_a_machine_that_becomes_busy_is_promoted(stage: Stage, share: str) -> None:
    stage.served()
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS, until=share)
    for release in (GOOD, NEXT):
        busy = {"first_s": 0.5, "token_s": 0.05}
        (stage.store.releases / release / "behaviour.json").write_text(json.dumps(busy))
        stage.target.stop(release)
        stage.target._start(release)
    assert roll_out(stage.store, stage.target, NEXT, SETTINGS).state == "promoted"


@pytest.mark.parametrize("behaviour", [{"fails_every": 2}, {"garbage": True}])
def test_a_canary_that_fails_only_with_all_the_traffic_is_rolled_back(
    stage: Stage, behaviour: dict[str, object]
) -> None:
    stage.served()
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS, until="90")
    (stage.store.releases / NEXT / "behaviour.json").write_text(json.dumps(behaviour))
    stage.target.stop(NEXT)
    stage.target._start(NEXT)
    with pytest.raises(RolledBack, match="at 100 %: "):
        roll_out(stage.store, stage.target, NEXT, SETTINGS)
    assert stage.target.split() == Split(stable=GOOD)


def test_clients_of_the_stable_release_notice_nothing_of_a_canary_that_dies(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    patient = SETTINGS.model_copy(update={"step_s": 60, "synthetic": False})
    failure: list[BaseException] = []

    def run() -> None:
        try:
            roll_out(stage.store, stage.target, NEXT, patient)
        except RolledBack as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while stage.target.split().percent != 10:
        time.sleep(0.01)
    state = stage.target._state(NEXT)
    assert state is not None
    os.kill(state["pid"], signal.SIGKILL)
    thread.join(60)
    assert "its server failed: the server of 0002-awq" in str(failure[0])
    assert stage.target.split() == Split(stable=GOOD)
    assert httpx.get(f"{stage.target.client_url()}/health").is_success


def test_a_canary_that_fails_no_more_than_the_stable_release_is_promoted(stage: Stage) -> None:
    stage.served(fails_every=7)
    stage.make(NEXT, fails_every=7)
    assert roll_out(stage.store, stage.target, NEXT, SETTINGS).state == "promoted"


def test_a_canary_does_not_fail_within_the_slack(stage: Stage) -> None:
    stage.served(first_s=0.002)
    stage.make(NEXT, first_s=0.004)
    slack = SETTINGS.model_copy(update={"ttft_slack_ms": 5})
    assert roll_out(stage.store, stage.target, NEXT, slack).state == "promoted"


def test_a_first_release_that_cannot_be_served_fails_and_stays_the_candidate(stage: Stage) -> None:
    stage.make(GOOD, never_ready=True)
    stage.nominate(GOOD)
    with pytest.raises(ServerFailed, match="is not served: it did not answer a completion"):
        roll_out(stage.store, stage.target, GOOD, SETTINGS.model_copy(update={"ready_timeout_s": 0.2}))
    assert releases.current_release(stage.store) is None
    assert releases.candidate(stage.store) == GOOD
    assert stage.target.split() == Split(stable=None)


def test_a_release_that_is_served_already_is_only_confirmed(stage: Stage) -> None:
    stage.served()
    journal = roll_out(stage.store, stage.target, GOOD, SETTINGS)
    assert (journal.kind, journal.state) == ("refresh", "promoted")
    assert len(history(stage.store)) == 1
    assert [each for each in stage.target.calls() if each != "counters"] == ["deploy", "promote", "deploy"]


def test_the_time_to_start_follows_from_what_the_server_needs(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.make(GOOD)
    monkeypatch.setattr(stage.target, "serving_of", lambda _: Serving(startup_timeout_s=4396))
    automatic = SETTINGS.model_copy(update={"ready_timeout_s": "auto"})
    assert roll_out(stage.store, stage.target, GOOD, automatic).ready_timeout_s == 900 + 4396
    assert roll_out(stage.store, stage.target, GOOD, SETTINGS).ready_timeout_s == 60


def test_a_second_rollout_is_refused_while_one_is_under_way(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    other = stage.make("0003-gptq-000000000003")
    assert roll_out(stage.store, stage.target, NEXT, SETTINGS, until="deploy").state == "shifting"
    with pytest.raises(Conflict, match="the rollout of 0002-awq-000000000002 is under way") as refused:
        roll_out(stage.store, stage.target, other, SETTINGS)
    assert refused.value.hint.endswith(f"slipway rollout abort {MODEL}")
    assert stage.target.split().canary == NEXT


def test_a_release_that_does_not_exist_cannot_be_rolled_out(stage: Stage) -> None:
    with pytest.raises(NothingToServe, match=f"has no release {NEXT}"):
        roll_out(stage.store, stage.target, NEXT, SETTINGS)


def test_the_steps_can_be_calls_of_their_own_and_each_may_be_repeated(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    seen = []
    for until in ("deploy", "10", "10", "50", "90", "100", "promote"):
        journal = roll_out(stage.store, stage.target, NEXT, SETTINGS, until=until)
        seen.append((until, journal.state, stage.target.split().percent))
    assert seen == [
        ("deploy", "shifting", 0),
        ("10", "shifting", 10),
        ("10", "shifting", 10),
        ("50", "shifting", 50),
        ("90", "shifting", 90),
        ("100", "promoting", 100),
        ("promote", "promoted", 0),
    ]


def test_a_step_repeated_after_the_rollback_of_its_own_run_fails_again_and_starts_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPWAY_RUN", "run-1")
    stage.served()
    monkeypatch.setenv("SLIPWAY_RUN", "run-2")
    stage.make(NEXT, garbage=True)
    for _ in range(2):
        with pytest.raises(RolledBack, match="agree with the recorded ones"):
            roll_out(stage.store, stage.target, NEXT, SETTINGS, until="10")
    assert stage.target.calls().count("deploy") == 2
    monkeypatch.setenv("SLIPWAY_RUN", "run-3")
    with pytest.raises(RolledBack):
        roll_out(stage.store, stage.target, NEXT, SETTINGS, until="10")
    assert stage.target.calls().count("deploy") == 3
