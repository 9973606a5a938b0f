"""What a person may ask of a rollout: to approve it, to give it up, or to go back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from functools import partial
from pathlib import Path

import pytest

from stages.parts.base.errors import Busy, ConfigError, Conflict, NothingToServe, RolledBack, UnknownName
from stages.parts.base.files import exclusive, write_json
from stages.parts.base.rollout_settings import Rollout
from stages.parts.endpoint.endpoint import being_served
from stages.parts.records.rollout import journal_path, read_journal
from stages.parts.releases import release as releases
from stages.parts.releases.release import Split, history
from stages.rollout import state_machine
from stages.rollout.commands import abort, promote, roll_back
from stages.rollout.observation import BURST
from stages.rollout.state_machine import roll_out
from tests.serving import wait_until
from tests.stages.rollout.disk_target import DiskTarget
from tests.stages.rollout.stage import GOOD, NEXT, SETTINGS, Stage

THIRD = "0003-gptq-000000000003"
ASKS = SETTINGS.model_copy(update={"approval": True})
SLOW_STEPS = SETTINGS.model_copy(update={"step_s": 120.0, "step_timeout_s": 240.0})


def watched(stage: Stage, settings: Rollout, state: str = "observing") -> tuple[threading.Thread, list[object]]:
    """A rollout that another thread runs, as another process would; returns once it is in *state*."""
    ended: list[object] = []

    def run() -> None:
        try:
            ended.append(roll_out(stage.store, stage.target, NEXT, settings).state)
        except RolledBack as error:
            ended.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: (found := read_journal(stage.store)) and found.state == state, state)
    return thread, ended


def made_worse(stage: Stage, release: str) -> None:
    """Restart its server, which then fails every second request."""
    (stage.store.releases / release / "behaviour.json").write_text('{"fails_every": 2}')
    stage.target.stop(release)
    stage.target._start(release)


def test_with_approval_the_rollout_stops_before_100_percent_until_a_person_approves(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    for _ in range(2):  # asked again, it still waits
        journal = roll_out(stage.store, stage.target, NEXT, ASKS, until="90")
        assert (journal.state, journal.percent) == ("awaiting approval", 90)
    assert stage.target.split() == Split(stable=GOOD, canary=NEXT, percent=90)
    ended = promote(stage.store, stage.target)
    assert stage.target.split() == Split(stable=NEXT, standby=GOOD)
    assert [(each.state, each.percent) for each in ended.transitions][-6:] == [
        ("awaiting approval", 90),
        ("observing", 90),  # it may have waited for long
        ("shifting", 100),
        ("observing", 100),
        ("promoting", 100),
        ("promoted", 100),
    ]


def test_a_rollout_that_waits_for_approval_continues_when_another_process_approves(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    thread, ended = watched(stage, ASKS, "awaiting approval")
    assert promote(stage.store, stage.target).approved
    thread.join(60)
    assert ended == ["promoted"]


def test_a_canary_that_gets_worse_while_it_waits_for_approval_is_rolled_back(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    thread, ended = watched(stage, ASKS, "awaiting approval")
    made_worse(stage, NEXT)
    thread.join(60)
    assert "at 90 %" in str(ended[0])
    assert "requests failed" in str(ended[0])
    assert stage.target.split() == Split(stable=GOOD)


def test_an_approved_canary_that_got_worse_unobserved_does_not_get_all_traffic(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, ASKS, until="90")
    made_worse(stage, NEXT)
    with pytest.raises(RolledBack, match=r"at 90 %: .*requests failed"):
        roll_out(stage.store, stage.target, NEXT, ASKS, until="100", approved=True)
    assert "shift 100" not in stage.target.calls()
    assert stage.target.split() == Split(stable=GOOD)


def test_with_a_single_step_approval_is_needed_before_any_traffic(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    thread, ended = watched(stage, ASKS.model_copy(update={"steps": (100,)}), "awaiting approval")
    assert stage.target.split() == Split(stable=GOOD, canary=NEXT)
    promote(stage.store, stage.target)
    thread.join(60)
    assert ended == ["promoted"]


def test_a_canary_that_hangs_is_found_by_a_few_requests(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT, hangs=True)
    with pytest.raises(RolledBack, match=r"at 10 %: (\d+) of \1 of the rollout's own requests failed \(stable"):
        roll_out(stage.store, stage.target, NEXT, SETTINGS.model_copy(update={"own_timeout_s": 3.0}))
    assert stage.target.split() == Split(stable=GOOD)


def test_a_rollout_whose_canary_hangs_can_be_given_up_during_a_look(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT, hangs=True)
    never_sure = SETTINGS.model_copy(update={"own_timeout_s": 3.0, "error_rate": 1e-12})
    thread, ended = watched(stage, never_sure)
    wait_until(lambda: (found := read_journal(stage.store)) and found.window, "the step's beginning")
    assert abort(stage.store, stage.target) == NEXT
    thread.join(60)
    assert ended == [f"{NEXT} was rolled back: given up by a person"]
    assert read_journal(stage.store).window.sent == BURST, "those of one look"


def test_a_canary_that_somebody_promotes_while_it_is_observed_stays_promoted(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    thread, ended = watched(stage, SLOW_STEPS)
    stage.target.promote(NEXT)
    thread.join(60)
    assert ended == ["promoted"]
    assert stage.target.split() == Split(stable=NEXT, standby=GOOD)
    assert "withdraw" not in stage.target.calls()
    assert (releases.current_release(stage.store), stage.reasons()) == (NEXT, NEXT)


def test_a_canary_that_somebody_promoted_can_no_longer_be_given_up(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS, until="50")
    stage.target.promote(NEXT)
    with pytest.raises(Conflict, match=f"{NEXT} is promoted already") as refused:
        abort(stage.store, stage.target)
    assert refused.value.hint == "slipway rollback org/name"
    assert stage.target.split() == Split(stable=NEXT, standby=GOOD)
    assert "withdraw" not in stage.target.calls()
    assert history(stage.store)[-1].result == "promoted"


def test_a_canary_that_somebody_withdraws_before_its_next_share_is_rolled_back(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    stage.target.hold("before shift 50")
    thread, ended = watched(stage, SETTINGS, "shifting")
    wait_until(stage.target.held, "the next share")
    stage.target.withdraw(NEXT)
    stage.target.release_hold()
    thread.join(60)
    assert ended == [f"{NEXT} was rolled back: somebody else changed what is served: {NEXT} is not the canary"]


def test_a_first_release_that_is_given_up_leaves_nothing(stage: Stage) -> None:
    stage.make(GOOD)
    roll_out(stage.store, stage.target, GOOD, SETTINGS, until="deploy")
    assert abort(stage.store, stage.target) == GOOD
    assert stage.target.split() == Split(stable=None)
    assert releases.current_release(stage.store) is None


def test_promote_ends_the_waiting_of_a_rollout_that_another_process_runs(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    thread, ended = watched(stage, SLOW_STEPS)
    assert promote(stage.store, stage.target).approved
    thread.join(60)
    assert ended == ["promoted"]


def test_promote_does_not_skip_the_evidence(stage: Stage) -> None:
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
    assert history(stage.store)[-1].reason == "the customer called"


@pytest.mark.parametrize("until", ["deploy", "10", "100"])
def test_abort_ends_a_rollout_that_no_process_runs(stage: Stage, until: str) -> None:
    stage.served()
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS, until=until)
    assert abort(stage.store, stage.target) == NEXT
    assert stage.target.split() == Split(stable=GOOD)
    assert stage.reasons() == GOOD
    journal = read_journal(stage.store)
    assert journal
    last = [(each.state, each.percent) for each in journal.transitions[-2:]]
    assert last == [("rolling back", 0), ("rolled back", 0)]


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
        assert process.wait(60) == 143
    stage.target.release_hold()
    assert stage.target.split() == Split(stable=GOOD, canary=NEXT, percent=10)
    assert roll_out(stage.store, stage.target, NEXT, SETTINGS).state == "promoted"


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_clock_that_is_set_neither_ends_a_step_nor_holds_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            is_set = any(call.startswith("counters") for call in stage.target.calls())
            return super().now(tz) + timedelta(hours=hours if is_set else 0)

    stage.served()
    stage.make(NEXT)
    monkeypatch.setattr(state_machine, "datetime", Clock)
    journal = roll_out(stage.store, stage.target, NEXT, SETTINGS)
    assert journal.state == "promoted"
    times = [each.at for each in journal.transitions]
    assert times == sorted(times)
    assert times[-1] - times[0] < timedelta(hours=1)


def test_a_rollout_continues_though_the_clock_was_set_back_meanwhile(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    stage.target.hold("before counters 10")
    with stage.started(NEXT) as process:
        wait_until(stage.target.held, "the first step")
        process.terminate()
        process.wait(60)
    stage.target.release_hold()
    journal = read_journal(stage.store)
    assert journal
    assert journal.state == "observing"
    write_json(journal_path(stage.store), journal.changed(entered_at=journal.entered_at + timedelta(hours=2)))
    assert roll_out(stage.store, stage.target, NEXT, SETTINGS).state == "promoted"


def test_rollback_goes_to_the_release_before_and_a_second_one_goes_one_further(stage: Stage) -> None:
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
    kinds = [(each.kind, each.release) for each in history(stage.store)]
    assert kinds[-3:] == [("rollback", NEXT), ("rollback", GOOD), ("rollback", THIRD)]


def test_rollback_compares_nothing_and_needs_no_recorded_answers(stage: Stage) -> None:
    stage.served(recorded=False, first_s=0.05)
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS)
    assert roll_back(stage.store, stage.target, SETTINGS) == (GOOD, True)
    assert read_journal(stage.store).analyses == ()


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
        releases.settle(stage.store, name, "candidate" if being_served(stage.store) else "production")
    assert roll_back(stage.store, stage.target, SETTINGS) == (GOOD, False)
    assert (releases.current_release(stage.store), stage.reasons()) == (GOOD, GOOD)
    assert stage.target.calls() == []
    moves = [(each.kind, each.release, each.before) for each in history(stage.store)]
    assert moves == [("publish", GOOD, None), ("publish", NEXT, GOOD), ("rollback", GOOD, NEXT)]


@pytest.mark.parametrize("at", ["promote", "swap_link", "withdraw_candidate", "remember"])
def test_a_move_that_is_killed_while_nothing_is_served_is_finished_once_by_asking_again(
    stage: Stage, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(act: Callable[[], object]) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(releases, at, interrupt)
            with pytest.raises(KeyboardInterrupt):
                act()

    for name in (GOOD, NEXT, THIRD):
        stage.make(name)
        stage.nominate(name)
        releases.settle(stage.store, name, "production")
    if at != "withdraw_candidate":
        killed(lambda: roll_back(stage.store, stage.target, SETTINGS))
        assert roll_back(stage.store, stage.target, SETTINGS) == (NEXT, False)
    else:
        roll_back(stage.store, stage.target, SETTINGS)
    last = stage.make("0004-gptq-000000000004")
    stage.nominate(last)
    killed(lambda: releases.settle(stage.store, last, "production"))
    releases.settle(stage.store, last, "production")
    assert (releases.current_release(stage.store), stage.reasons()) == (last, last)
    assert releases.candidate(stage.store) is None
    moves = [(each.kind, each.release, each.before) for each in history(stage.store)]
    assert moves[2:] == [("publish", THIRD, NEXT), ("rollback", NEXT, THIRD), ("publish", last, NEXT)]
    assert not (stage.store.path / releases.UNFINISHED).exists()


def test_a_publication_and_a_rollback_without_a_rollout_take_turns(stage: Stage) -> None:
    stage.make(GOOD)
    stage.nominate(GOOD)
    publish = threading.Thread(target=releases.settle, args=(stage.store, GOOD, "production"))
    with exclusive(stage.store.lock(releases.MOVING), "a move"):
        publish.start()
        publish.join(0.3)
        assert releases.current_release(stage.store) is None
    publish.join(10)
    assert releases.current_release(stage.store) == GOOD


def test_a_move_that_was_killed_is_forgotten_once_another_one_was_made(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (GOOD, NEXT):
        stage.make(name)
        stage.nominate(name)
        releases.settle(stage.store, name, "production")
    with monkeypatch.context() as patched:
        patched.setattr(releases, "promote", interrupt)
        with pytest.raises(KeyboardInterrupt):
            roll_back(stage.store, stage.target, SETTINGS)
    roll_out(stage.store, stage.target, NEXT, SETTINGS)
    third = stage.make(THIRD)
    roll_out(stage.store, stage.target, third, SETTINGS)
    assert releases.finish(stage.store) is None
    assert releases.current_release(stage.store) == third


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


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
    assert [each.kind for each in history(stage.store)] == ["rollout", "rollout", "rollback"]


def test_restarts_are_counted_over_all_steps_and_between_them(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    for until in ("10", "50"):
        assert roll_out(stage.store, stage.target, NEXT, SETTINGS, until=until).state == "shifting"
        stage.target.stop(NEXT)
        stage.target._start(NEXT)
    with pytest.raises(RolledBack, match="at 90 %: its server was restarted 2 times"):
        roll_out(stage.store, stage.target, NEXT, SETTINGS)


def test_a_resubmitted_run_takes_the_rollout_over(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.served()
    stage.make(NEXT)
    for run, until in (("run-1", "deploy"), ("run-2", "deploy")):
        monkeypatch.setenv("SLIPWAY_RUN", run)
        roll_out(stage.store, stage.target, NEXT, SETTINGS, until=until)
        assert read_journal(stage.store).run == run
    monkeypatch.delenv("SLIPWAY_RUN")
    assert promote(stage.store, stage.target).run == "run-2"


def test_a_release_that_another_platform_serves_is_not_rolled_back_here(stage: Stage, tmp_path: Path) -> None:
    stage.target.name = "kserve"
    for name in (GOOD, NEXT):
        stage.make(name)
        roll_out(stage.store, stage.target, name, SETTINGS)
    here = DiskTarget(tmp_path / "here", stage.store.releases)
    with pytest.raises(ConfigError, match="served on local; it was rolled out on kserve") as told:
        roll_back(stage.store, here, SETTINGS)
    assert told.value.hint == "slipway rollback org/name --platform, with a platform that serves on kserve"
    assert releases.current_release(stage.store) == NEXT
    assert roll_back(stage.store, stage.target, SETTINGS) == (GOOD, True)


def test_a_rollout_under_way_on_another_platform_is_not_continued_here(stage: Stage, tmp_path: Path) -> None:
    stage.target.name = "kserve"
    stage.served()
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS, until="10")
    here = DiskTarget(tmp_path / "here", stage.store.releases)
    with pytest.raises(Conflict, match=f"the rollout of {NEXT} is under way on kserve, not local"):
        roll_out(stage.store, here, NEXT, SETTINGS)
    assert here.calls() == []


def test_one_restart_of_a_server_begins_the_step_again_and_two_count_as_crashing(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    thread, ended = watched(stage, SLOW_STEPS)
    for count in (1, 2):
        wait_until(lambda: (found := read_journal(stage.store)) and found.window, "the step's beginning")
        stage.target.stop(NEXT)
        stage.target._start(NEXT)
        noticed = partial(lambda times: _restarts(stage) == times or not thread.is_alive(), count)
        wait_until(noticed, "the restart to be noticed")
    thread.join(60)
    assert ended == [f"{NEXT} was rolled back: at 10 %: its server was restarted 2 times"]
    assert stage.target.split() == Split(stable=GOOD)


def _restarts(stage: Stage) -> int:
    found = read_journal(stage.store)
    return found.restarts if found else 0
