"""A rollout that is killed at any point and started again ends like one that was not killed."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from stages.parts.base.errors import Conflict, RolledBack
from stages.parts.records.rollout import journal_path, read_journal
from stages.parts.releases import release as releases
from stages.parts.releases.release import Split, history
from stages.rollout.commands import abort
from stages.rollout.state_machine import StateMachine, roll_out
from tests.serving import wait_until
from tests.stages.rollout.stage import GOOD, NEXT, SETTINGS, Stage

"""A journal as it was written, at 10 %, before ``Counters`` was one record; the two servers' pids are left out."""
FORWARD = [
    *("before deploy", "after deploy", "before ready", "after ready"),
    *("before shift 10", "after shift 10", "before counters 10"),
    *("before shift 50", "after shift 50", "before counters 50"),
    *("before shift 90", "after shift 90", "before counters 90"),
    *("before shift 100", "after shift 100", "before counters 100"),
    *("before promote", "after promote"),
]
LAST = ["after deploy", "after shift 50", "before promote", "after promote"]
BACK = ["before counters 10", "before withdraw", "after withdraw"]


def killed_at(stage: Stage, where: str) -> str:
    """Run the rollout up to a call of the platform, kill it there, and return the state that it leaves."""
    stage.target.hold(where)
    with stage.started(NEXT) as process:
        wait_until(lambda: stage.target.held() or process.poll() is not None, where)
        assert process.poll() is None, f"it ended before {where}: {process.communicate()}"
        process.kill()
    stage.target.release_hold()
    journal = read_journal(stage.store)
    assert journal is not None
    return journal.state


def left(stage: Stage) -> tuple[object, ...]:
    """Everything that a rollout leaves, except times."""
    journal = read_journal(stage.store)
    assert journal is not None
    moves = [(each.release, each.before, each.result) for each in history(stage.store)]
    return (
        (journal.state, [(each.percent, each.verdict) for each in journal.analyses]),
        stage.target.split(),
        (releases.current_release(stage.store), releases.candidate(stage.store), stage.reasons()),
        moves,
        sorted(path.stem for path in (stage.target.folder / "servers").glob("*.json")),
    )


def test_a_good_canary_is_promoted_even_if_the_rollout_is_killed_before_and_after_every_call(
    stage: Stage, tmp_path: Path
) -> None:
    alone = Stage(tmp_path / "alone")
    try:
        for each in (stage, alone):
            each.served()
            each.make(NEXT)
            each.nominate(NEXT)
        assert roll_out(alone.store, alone.target, NEXT, SETTINGS).state == "promoted"
        states = [killed_at(stage, where) for where in FORWARD]
        assert set(states) == {"deploying", "starting", "shifting", "observing", "promoting"}
        assert roll_out(stage.store, stage.target, NEXT, SETTINGS).state == "promoted"
        assert left(stage) == left(alone)
    finally:
        alone.target.stop_all()


def test_a_bad_canary_is_rolled_back_even_if_the_rollout_is_killed_before_and_after_every_call(
    stage: Stage, tmp_path: Path
) -> None:
    alone = Stage(tmp_path / "alone")
    try:
        for each in (stage, alone):
            each.served()
            each.make(NEXT, first_s=0.05)
            each.nominate(NEXT)
        with pytest.raises(RolledBack):
            roll_out(alone.store, alone.target, NEXT, SETTINGS)
        states = [killed_at(stage, where) for where in BACK]
        assert states == ["observing", "rolling back", "rolling back"]
        with pytest.raises(RolledBack, match="time to first token"):
            roll_out(stage.store, stage.target, NEXT, SETTINGS)
        assert left(stage) == left(alone)
        assert httpx.get(f"{stage.target.client_url()}/health").is_success
    finally:
        alone.target.stop_all()


@pytest.mark.parametrize(
    "where", [pytest.param(each, marks=() if each in LAST else pytest.mark.slow) for each in FORWARD]
)
def test_a_rollout_killed_before_or_after_any_call_can_be_given_up_unless_it_is_promoted(
    stage: Stage, where: str
) -> None:
    stage.served()
    stage.make(NEXT)
    stage.nominate(NEXT)
    killed_at(stage, where)
    if where == "after promote":
        with pytest.raises(Conflict, match=f"{NEXT} is promoted already"):
            abort(stage.store, stage.target)
        assert stage.target.split() == Split(stable=NEXT, standby=GOOD)
    else:
        assert abort(stage.store, stage.target, "the workflow failed") == NEXT
        assert stage.target.split() == Split(stable=GOOD)
    now = stage.target.split().stable
    assert httpx.get(f"{stage.target.client_url()}/health").is_success
    assert (releases.current_release(stage.store), releases.candidate(stage.store), stage.reasons()) == (now, None, now)
    assert [each.release for each in history(stage.store)] == [GOOD, NEXT]


def test_an_abort_that_is_killed_can_be_repeated(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT, first_s=0.05)
    for where in ("before withdraw", "after withdraw"):
        assert killed_at(stage, where) == "rolling back"
    assert abort(stage.store, stage.target) == NEXT
    assert stage.target.split() == Split(stable=GOOD)


def test_a_canary_that_somebody_promoted_while_it_was_being_rolled_back_stays(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT, first_s=0.05)
    assert killed_at(stage, "before withdraw") == "rolling back"
    stage.target.promote(NEXT)
    assert roll_out(stage.store, stage.target, NEXT, SETTINGS).state == "promoted"
    assert stage.target.split() == Split(stable=NEXT, standby=GOOD)
    assert "withdraw" not in stage.target.calls()


@pytest.mark.parametrize("done", ["nothing", "reasons", "link", "history"])
def test_a_promotion_interrupted_between_its_writes_is_completed_once(stage: Stage, done: str) -> None:
    stage.served()
    stage.make(NEXT)
    stage.nominate(NEXT)
    journal = roll_out(stage.store, stage.target, NEXT, SETTINGS, until="100")
    assert journal.state == "promoting"
    before = journal_path(stage.store).read_bytes()
    if done == "reasons":
        stage.store.production_metrics.write_text((stage.store.releases / NEXT / releases.METRICS).read_text())
    elif done == "link":
        stage.target.promote(NEXT)
        releases.promote(stage.store, NEXT)
    elif done == "history":
        StateMachine(stage.store, stage.target, journal).run()
        journal_path(stage.store).write_bytes(before)  # all but the last write
    assert roll_out(stage.store, stage.target, NEXT, SETTINGS).state == "promoted"
    assert stage.target.split() == Split(stable=NEXT, standby=GOOD)
    assert (releases.current_release(stage.store), stage.reasons(), releases.candidate(stage.store)) == (
        NEXT,
        NEXT,
        None,
    )
    assert [each.release for each in history(stage.store)] == [GOOD, NEXT]


def test_a_canary_that_vanished_unobserved_is_deployed_again(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS, until="50")
    stage.target.withdraw(NEXT)
    assert roll_out(stage.store, stage.target, NEXT, SETTINGS).state == "promoted"
    assert [each for each in stage.target.calls() if each.startswith("shift")] == [
        "shift 10",
        "shift 50",
        "shift 10",
        "shift 50",
        "shift 90",
        "shift 100",
    ]


def test_a_canary_that_the_platform_promoted_unobserved_is_promoted_here(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS, until="10")
    stage.target.promote(NEXT)
    assert roll_out(stage.store, stage.target, NEXT, SETTINGS).state == "promoted"
    assert (releases.current_release(stage.store), stage.reasons()) == (NEXT, NEXT)


def test_a_share_that_somebody_changed_is_restored_before_the_canary_is_judged(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    assert killed_at(stage, "before counters 10") == "observing"
    stage.target.shift(NEXT, 90)
    roll_out(stage.store, stage.target, NEXT, SETTINGS, until="10")
    assert [each for each in stage.target.calls() if each.startswith("shift")] == ["shift 10", "shift 90", "shift 10"]


def test_the_rollout_ends_if_the_stable_release_is_no_longer_the_same(stage: Stage) -> None:
    stage.served()
    other = stage.make("0003-gptq-000000000003")
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS, until="10")
    stage.target._write({"stable": other, "canary": NEXT, "percent": 10, "standby": None})
    with pytest.raises(RolledBack, match=f"somebody else promoted {other} meanwhile"):
        roll_out(stage.store, stage.target, NEXT, SETTINGS)
    assert stage.target.split() == Split(stable=other)


def test_a_different_canary_on_the_platform_is_a_conflict_that_abort_resolves(stage: Stage) -> None:
    stage.served()
    other = stage.make("0003-gptq-000000000003")
    stage.make(NEXT)
    stage.target.deploy(other)
    with pytest.raises(Conflict, match=f"{other} is being tried on the platform") as refused:
        roll_out(stage.store, stage.target, NEXT, SETTINGS)
    assert "slipway rollout abort" in refused.value.hint
    assert abort(stage.store, stage.target) == other
    assert roll_out(stage.store, stage.target, NEXT, SETTINGS).state == "promoted"


def test_the_rollout_continues_as_with_a_first_release_if_nothing_is_served_any_more(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS, until="10")
    stage.target.stop_all()
    (stage.target.folder / "platform.json").unlink()
    assert roll_out(stage.store, stage.target, NEXT, SETTINGS).state == "promoted"
    assert stage.target.split() == Split(stable=NEXT)
    assert [each.before for each in history(stage.store)] == [None, GOOD]
