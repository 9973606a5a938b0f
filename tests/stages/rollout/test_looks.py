"""Looks at a release in production, of real processes that answer as a test wants them to."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from scoring.watch import Signal
from stages.parts.base.errors import NothingToServe
from stages.parts.records.watch import FILE, Look, Looks, history, seen
from stages.parts.releases import release as releases
from stages.rollout.state_machine import roll_out
from stages.rollout.watch import go_back, look
from tests.stages.rollout.stage import GOOD, NEXT, SETTINGS, Stage

QUICK: dict[str, Any] = {"first_s": 0.004, "token_s": 0.002}


def looked(stage: Stage) -> Look:
    found = look(stage.store, stage.target)
    assert found
    return found


def usual(stage: Stage, looks: int = 8) -> None:
    """As if that many looks had been like the first."""
    first = looked(stage)
    assert first.alarms == ()
    Looks(looks=(first,) * looks).write(stage.store.path / FILE)


def changed(stage: Stage, release: str, **behaviour: Any) -> None:
    """The server of *release* restarts, and behaves otherwise under the same path."""
    path = stage.store.releases / release / "behaviour.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | behaviour))
    stage.target.stop(release)
    stage.target.deploy(release)


@pytest.mark.parametrize(
    ("behaviour", "signal"),
    [
        ({"garbage": True}, "answers"),
        ({"shift": -0.01}, "answers"),
        ({"token_s": 0.006, "first_s": 0.012}, "tpot"),
        ({"fails_every": 20}, "errors"),
        ({"context": 2048}, "context"),
    ],
    ids=str,
)
def test_a_change_is_noticed_within_three_looks(stage: Stage, behaviour: dict[str, Any], signal: Signal) -> None:
    stage.served(**QUICK)
    usual(stage)
    changed(stage, GOOD, **behaviour)
    looks = [looked(stage) for _ in range(3)]
    assert looks[0].alarms == ()
    assert signal in looks[-1].alarms
    assert "its server was restarted" in looks[0].causes
    assert looks[-1].verdict.startswith("alarm: ")
    assert "alarm: " in history(seen(stage.store).of(GOOD))[-1]
    assert [each.changed for each in looks] == [False, False, True]


def test_a_sound_endpoint_stays_sound(stage: Stage) -> None:
    stage.served(**QUICK)
    usual(stage)
    looks = [looked(stage) for _ in range(4)]
    assert [each.alarms for each in looks] == [()] * 4
    assert all(each.learned and each.verdict == "no alarm" for each in looks)
    assert looks[-1].agreement == pytest.approx(1)
    assert looks[-1].context == looks[-1].promised == 4096
    assert looks[-1].failed == 0
    assert looks[-1].requests == 201


def test_requests_of_clients_that_failed_since_the_last_look_count(stage: Stage) -> None:
    stage.served(**QUICK)
    usual(stage, looks=1)
    before = stage.target.counters(GOOD)
    again = seen(stage.store).looks[-1]
    assert (before.answered, before.failed) == again.counted
    earlier = again.model_copy(update={"counted": (before.answered - 100, before.failed - 7)})
    Looks(looks=(earlier,)).write(stage.store.path / FILE)
    found = looked(stage)
    assert (found.requests, found.failed) == (201 + 107, 7)


def test_what_another_release_showed_or_was_seen_before_the_last_move_is_not_usual(stage: Stage) -> None:
    stage.served(**QUICK)
    old = looked(stage).model_copy(update={"at": datetime(2020, 1, 1, tzinfo=UTC)})
    Looks(looks=(old,) * 30).write(stage.store.path / FILE)
    assert looked(stage).verdict == "no alarm, still learning what is usual"


def test_nothing_is_looked_at_while_another_release_is_tried(stage: Stage) -> None:
    stage.served(**QUICK)
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS, until="deploy")
    assert look(stage.store, stage.target) is None
    assert not (stage.store.path / FILE).exists()


def test_nothing_to_look_at(stage: Stage) -> None:
    with pytest.raises(NothingToServe):
        look(stage.store, stage.target)


def alarm(release: str, **changes: Any) -> Look:
    given = {"release": release, "agreement": 0.5, "requests": 200, "failed": 0, "in_flight": 0, "context": 1}
    given |= {"ttft_ms": 1.0, "tpot_ms": 1.0, "promised": 1, "counted": (0, 0), "instance": ""}
    return Look.model_validate(given | {"alarms": ("answers",), "at": datetime.now(UTC)} | changes)


def two_releases(stage: Stage) -> None:
    stage.served(**QUICK)
    stage.make(NEXT, **QUICK)
    roll_out(stage.store, stage.target, NEXT, SETTINGS)
    assert releases.current_release(stage.store) == NEXT


def test_an_alarm_can_roll_back_to_an_earlier_release(stage: Stage) -> None:
    two_releases(stage)
    assert go_back(stage.store, stage.target, SETTINGS, alarm(NEXT)) == f"rolled back to {GOOD}"
    assert releases.current_release(stage.store) == GOOD
    assert "no earlier release" in go_back(stage.store, stage.target, SETTINGS, alarm(GOOD))


def test_it_does_not_go_back_to_a_release_that_is_not_sound_either(stage: Stage) -> None:
    two_releases(stage)
    changed(stage, GOOD, garbage=True)
    assert f"{GOOD} does not answer as it was measured either" in go_back(
        stage.store, stage.target, SETTINGS, alarm(NEXT)
    )
    Looks(looks=(alarm(GOOD),)).write(stage.store.path / FILE)
    assert f"there was an alarm of {GOOD} too" in go_back(stage.store, stage.target, SETTINGS, alarm(NEXT))
    assert releases.current_release(stage.store) == NEXT


def test_it_does_not_go_back_for_what_would_make_any_release_slow(stage: Stage) -> None:
    two_releases(stage)
    slow = alarm(NEXT, alarms=("tpot",), outside=True, causes=("beside it serves org/other",))
    assert "an earlier release would be as slow; beside it serves org/other" in go_back(
        stage.store, stage.target, SETTINGS, slow
    )
    assert releases.current_release(stage.store) == NEXT
