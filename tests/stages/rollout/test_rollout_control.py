"""What a person may ask of a rollout: to let it through, to give it up, to go back."""

from __future__ import annotations

import threading

import pytest

from stages import releases
from stages.errors import Busy, Conflict, NothingToServe, RolledBack, UnknownName
from stages.rollout.control import abort, promote, roll_back
from stages.rollout.journal import read_journal
from stages.rollout.machine import roll_out
from stages.rollout.settings import Rollout
from stages.rollout.target import Split
from tests.serving import wait_until
from tests.stages.rollout.stage import GOOD, NEXT, SETTINGS, Stage

THIRD = "0003-gptq-000000000003"
SLOW_STEPS = SETTINGS.model_copy(update={"step_s": 120.0, "step_timeout_s": 240.0})


def watched(stage: Stage, settings: Rollout) -> tuple[threading.Thread, list[object]]:
    """A rollout by another thread, as another process would run it, once it observes its first step."""
    ended: list[object] = []

    def run() -> None:
        try:
            ended.append(roll_out(stage.store, stage.target, NEXT, settings).state)
        except RolledBack as error:
            ended.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: (found := read_journal(stage.store)) and found.state == "observing", "the first step")
    return thread, ended


def test_with_approval_it_stops_before_all_traffic_until_a_person_lets_it_through(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    asks = SETTINGS.model_copy(update={"approval": True})
    for _ in range(2):  # asked again, it still waits
        journal = roll_out(stage.store, stage.target, NEXT, asks)
        assert (journal.state, journal.percent) == ("awaiting approval", 50)
    assert stage.target.split() == Split(stable=GOOD, canary=NEXT, percent=50)
    assert promote(stage.store, stage.target).state == "promoted"
    assert stage.target.split() == Split(stable=NEXT, standby=GOOD)
    assert read_journal(stage.store).analyses[-1].percent == 100  # type: ignore[union-attr]


def test_promote_skips_the_waiting_of_a_rollout_that_another_process_runs(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    thread, ended = watched(stage, SLOW_STEPS)
    assert promote(stage.store, stage.target).approved
    thread.join(60)
    assert ended == ["promoted"]


def test_promote_skips_no_evidence(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT, first_s=0.05)
    roll_out(stage.store, stage.target, NEXT, SLOW_STEPS, until="deploy")
    with pytest.raises(RolledBack, match="time to first token"):
        promote(stage.store, stage.target)
    assert stage.target.split() == Split(stable=GOOD)


def test_abort_ends_a_rollout_that_another_process_runs(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    stage.nominate(NEXT)
    thread, ended = watched(stage, SLOW_STEPS)
    assert abort(stage.store, stage.target, "the customer called") == NEXT
    thread.join(60)
    assert ended == [f"{NEXT} was rolled back: the customer called"]
    assert stage.target.split() == Split(stable=GOOD)
    assert releases.candidate(stage.store) is None
    assert releases.history(stage.store)[-1].reason == "the customer called"


@pytest.mark.parametrize("until", ["deploy", "10", "100"])
def test_abort_ends_a_rollout_that_nobody_runs_any_more(stage: Stage, until: str) -> None:
    stage.served()
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS, until=until)
    assert abort(stage.store, stage.target) == NEXT
    assert stage.target.split() == Split(stable=GOOD)
    assert stage.reasons() == GOOD
    assert read_journal(stage.store).state == "rolled back"  # type: ignore[union-attr]


def test_without_a_rollout_there_is_nothing_to_abort_or_promote(stage: Stage) -> None:
    stage.served()
    assert abort(stage.store, stage.target) is None
    with pytest.raises(NothingToServe, match="no rollout of org/name is under way"):
        promote(stage.store, stage.target)
    assert stage.target.split() == Split(stable=GOOD)


def test_only_one_process_runs_a_rollout(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    stage.target.hold("before deploy")
    with stage.started(NEXT) as process:
        wait_until(stage.target.held, "the first process")
        with pytest.raises(Busy, match="the rollout of org/name is in use by another process"):
            roll_out(stage.store, stage.target, NEXT, SETTINGS)
        process.kill()
    stage.target.release_hold()


def test_sigterm_leaves_the_rollout_where_it_is(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    stage.target.hold("before counters 10")
    with stage.started(NEXT) as process:
        wait_until(stage.target.held, "the first step")
        process.terminate()
        assert process.wait(30) == 143
    stage.target.release_hold()
    assert stage.target.split() == Split(stable=GOOD, canary=NEXT, percent=10)
    assert roll_out(stage.store, stage.target, NEXT, SETTINGS).state == "promoted"


def test_rollback_goes_to_what_was_in_production_before_and_again_one_further(stage: Stage) -> None:
    stage.served()
    for name in (NEXT, THIRD):
        stage.make(name)
        roll_out(stage.store, stage.target, name, SETTINGS)
    for expected, standby in ((NEXT, THIRD), (GOOD, NEXT)):
        assert roll_back(stage.store, stage.target, SETTINGS) == (expected, True)
        assert stage.target.split() == Split(stable=expected, standby=standby)
        assert (releases.current_release(stage.store), stage.reasons()) == (expected, expected)
    with pytest.raises(NothingToServe, match=f"org/name has no release before {GOOD}"):
        roll_back(stage.store, stage.target, SETTINGS)
    assert roll_back(stage.store, stage.target, SETTINGS, to="3") == (THIRD, True)
    kinds = [(each.kind, each.release) for each in releases.history(stage.store)]
    assert kinds[-3:] == [("rollback", NEXT), ("rollback", GOOD), ("rollback", THIRD)]


def test_rollback_compares_nothing_and_needs_no_recorded_answers(stage: Stage) -> None:
    stage.served(recorded=False, first_s=0.05)
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS)
    assert roll_back(stage.store, stage.target, SETTINGS) == (GOOD, True)
    assert read_journal(stage.store).analyses == ()  # type: ignore[union-attr]


def test_rollback_to_a_release_that_cannot_be_served_leaves_the_one_that_is(stage: Stage) -> None:
    stage.served()
    broken = stage.make(NEXT, never_ready=True)
    with pytest.raises(RolledBack, match="did not answer a completion"):
        roll_back(stage.store, stage.target, SETTINGS.model_copy(update={"ready_timeout_s": 0.2}), to=broken)
    assert stage.target.split() == Split(stable=GOOD)
    assert releases.current_release(stage.store) == GOOD


def test_rollback_works_when_nothing_is_served(stage: Stage) -> None:
    for name in (GOOD, NEXT):
        stage.make(name)
        stage.nominate(name)
        releases.settle(stage.store, name, serve=False)
    assert roll_back(stage.store, stage.target, SETTINGS) == (GOOD, False)
    assert (releases.current_release(stage.store), stage.reasons()) == (GOOD, GOOD)
    assert stage.target.calls() == []
    moves = [(each.kind, each.release, each.before) for each in releases.history(stage.store)]
    assert moves == [("publish", GOOD, None), ("publish", NEXT, GOOD), ("rollback", GOOD, NEXT)]


def test_rollback_is_refused_while_a_rollout_is_under_way_and_unknown_releases_are_named(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS, until="10")
    with pytest.raises(Conflict, match=r"the rollout of 0002-awq-000000000002 is under way \(shifting, 50 %\)"):
        roll_back(stage.store, stage.target, SETTINGS, to="1")
    with pytest.raises(UnknownName, match="unknown release '7'"):
        roll_back(stage.store, stage.target, SETTINGS, to="7")


def test_a_rollback_that_is_killed_is_completed_by_asking_again(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS)
    stage.target.hold("after shift 100")
    with stage.started(GOOD, "rollback") as process:
        wait_until(stage.target.held, "the shift of all traffic")
        process.kill()
    stage.target.release_hold()
    assert roll_back(stage.store, stage.target, SETTINGS) == (GOOD, True)
    assert stage.target.split() == Split(stable=GOOD, standby=NEXT)
    assert [each.kind for each in releases.history(stage.store)] == ["rollout", "rollout", "rollback"]


def test_a_server_that_is_started_anew_once_begins_the_step_again_and_twice_is_crashing(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    thread, ended = watched(stage, SLOW_STEPS)
    for count in (1, 2):
        wait_until(lambda: (found := read_journal(stage.store)) and found.window, "the step's beginning")
        stage.target.stop(NEXT)
        stage.target._start(NEXT)
        wait_until(lambda count=count: _restarts(stage) == count or not thread.is_alive(), "the restart to be noticed")
    thread.join(60)
    assert ended == [f"{NEXT} was rolled back: at 10 %: its server was started anew 2 times"]
    assert stage.target.split() == Split(stable=GOOD)


def _restarts(stage: Stage) -> int:
    found = read_journal(stage.store)
    return found.restarts if found else 0
