"""A model is moved from one mode of KServe to the other, and clients notice nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stages.parts.base.errors import ConfigError, Conflict, DrillFailed, NothingToServe, TransientError
from stages.parts.releases.release import Split, history
from stages.rollout.kserve import move as moving
from stages.rollout.kserve import objects
from stages.rollout.kserve.detect import served_modes
from stages.rollout.kserve.modes import all_modes
from stages.rollout.kserve.move import Moved, move
from tests.stages.rollout.kserve.on_kserve import OnKServe
from tests.stages.rollout.kserve.test_kserve_audit import told
from tests.stages.rollout.kserve.test_kserve_drills import PACE, clients
from tests.stages.rollout.kserve.test_kserve_kept import upgraded
from tests.stages.rollout.kserve.test_kserve_rollout import MODES
from tests.stages.rollout.stage import GOOD, NEXT

Serve = Callable[..., OnKServe]


@pytest.fixture
def served(serve: Serve) -> OnKServe:
    """A release that an older KServe serves in mode ``route``, after an upgrade to one with ``spec.canary``."""
    kserve = serve(gateway=True, **MODES["route"])
    kserve.first(GOOD, **PACE)
    upgraded(kserve)
    return kserve


def moved(kserve: OnKServe, mode: Any, **changed: Any) -> Moved:
    settings = kserve.settings.model_copy(update={"gateway_url": kserve.gateway.url} | changed)
    return move(kserve.cluster(), kserve.store, kserve.serving, settings, mode)


def modes(kserve: OnKServe) -> set[str]:
    return set(served_modes(kserve.cluster())[kserve.store.model])


def test_there_and_back_no_request_fails_and_nothing_is_left(served: OnKServe) -> None:
    with clients(served) as load:
        for mode, before in (("standard", "route"), ("route", "standard")):
            found = moved(served, mode)
            assert (found.release, found.before) == (GOOD, before)
            assert found.answers
            assert (found.answers.failed, set(found.answers.releases)) == (0, {GOOD})
            assert modes(served) == {mode}
            assert served.connect().split() == Split(GOOD)
            assert len(served.server.all("HTTPRoute")) == 1
            assert len(served.server.all("PodDisruptionBudget")) == 1
    assert load.failed() == []
    assert served.kserve.contested == []
    assert served.kserve.sent_into_the_void == []
    assert [each.reason for each in history(served.store) if each.kind == "settings"] == [
        "served in mode standard, no longer route",
        "served in mode route, no longer standard",
    ]
    assert [each["note"] for each in told(served) if each["reason"] == "ModeMoved"] == [
        f"{GOOD}: served in mode standard, no longer route",
        f"{GOOD}: served in mode route, no longer standard",
    ]


def test_an_endpoint_whose_name_is_too_long_for_the_other_mode_stays(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    kserve = serve(gateway=True, **MODES["route"])
    monkeypatch.setattr(objects, "endpoint_name", lambda *_: f"{'n' * 30}-123456")
    kserve.first(GOOD, **PACE)
    upgraded(kserve)
    before = kserve.server.all("InferenceService")
    with pytest.raises(ConfigError, match="with more than 63 characters in a row"):
        moved(kserve, "standard")
    assert kserve.server.all("InferenceService") == before


def test_a_rollout_goes_on_in_the_new_mode(served: OnKServe) -> None:
    moved(served, "standard")
    served.make(NEXT, **PACE)
    assert served.roll(NEXT).state == "promoted"
    assert served.connect().split() == Split(NEXT)
    assert modes(served) == {"standard"}


def test_a_mode_that_serves_already_is_left_alone(served: OnKServe) -> None:
    before = served.server.all("InferenceService")
    assert moved(served, "route").answers is None
    assert served.server.all("InferenceService") == before


@pytest.mark.parametrize("point", ["promote", "leave_host", "remove_services"])
def test_a_move_that_was_killed_is_completed(served: OnKServe, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    @contextlib.contextmanager
    def not_undone(*_: object) -> Iterator[None]:
        yield

    with clients(served) as load:
        with monkeypatch.context() as now:
            for mode in all_modes():
                now.setattr(mode.target, point, killed)
            now.setattr(moving, "_undone", not_undone)  # as after SIGKILL
            with pytest.raises(Killed):
                moved(served, "standard")
        assert modes(served) == {"route", "standard"}
        with pytest.raises(Conflict) as refused:
            served.connect()
        assert "slipway rollout move" in refused.value.hint
        found = moved(served, "standard")
        assert found.answers
        assert found.answers.failed == 0
    assert load.failed() == []
    assert modes(served) == {"standard"}


def test_servers_that_do_not_come_up_are_removed_again(served: OnKServe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "responds", lambda *_: False)
    monkeypatch.setattr(moving, "SCHEDULED_S", -10_000)
    with clients(served) as load, pytest.raises(TransientError, match="did not come up in mode standard"):
        moved(served, "standard")
    assert load.failed() == []
    assert modes(served) == {"route"}
    assert served.connect().split() == Split(GOOD)


def test_if_nobody_is_answered_in_the_other_mode_it_goes_back(
    served: OnKServe, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def answered_only_at_first(*given: Any) -> None:
        asked.append(given)
        if len(asked) > 1:
            raise DrillFailed("no request is answered")

    monkeypatch.setattr(moving, "_until_answered", answered_only_at_first)
    with clients(served) as load, pytest.raises(DrillFailed):
        moved(served, "standard")
    assert load.failed() == []
    assert modes(served) == {"route"}
    assert served.connect().split() == Split(GOOD)


def test_what_can_not_be_tried_is_not_moved(served: OnKServe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "ANSWER_S", 1.0)
    with pytest.raises(DrillFailed, match="no request is answered, and nothing was changed") as refused:
        moved(served, "standard", gateway_url="http://127.0.0.1:9")
    assert "gateway_url" in refused.value.hint
    assert modes(served) == {"route"}


def test_neither_a_rollout_nor_another_gateway_is_disturbed(serve: Serve) -> None:
    kserve = serve(**MODES["knative"], gateway=True)
    with pytest.raises(NothingToServe):
        moved(kserve, "standard")
    kserve.first()
    with pytest.raises(Conflict, match="from knative to standard"):
        moved(kserve, "standard")
