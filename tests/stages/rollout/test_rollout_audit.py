"""Who began, approved, gave up or changed what is served."""

from __future__ import annotations

import getpass
from collections.abc import Callable

import pytest

from stages.parts.base.errors import RolledBack
from stages.parts.records.rollout import REQUEST, OperatorRequest
from stages.parts.releases.release import before, history, user
from stages.rollout.commands import abort, promote, roll_back
from stages.rollout.state_machine import roll_out
from tests.stages.rollout.stage import GOOD, NEXT, SETTINGS, Stage

ASKS = SETTINGS.model_copy(update={"approval": True})


def acts(stage: Stage) -> list[tuple[str, str]]:
    return [(each.what, each.by) for each in history(stage.store)[-1].acts]


def test_the_history_names_who_began_and_who_approved(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.served()
    assert acts(stage) == [("began", "somebody")]
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, ASKS, until="90")
    monkeypatch.setattr(stage.target, "who", lambda: "jane", raising=True)
    promote(stage.store, stage.target)
    assert acts(stage) == [("began", "somebody"), ("approved", "jane")]
    told = (stage.target.folder / "announced").read_text().splitlines()
    assert told[-3].startswith(f"Started: the rollout of {NEXT} began, by somebody")
    assert told[-2] == f"Approved: the rollout of {NEXT}: approved by jane"
    assert told[-1].startswith(f"Promoted: {NEXT}: sound with all the traffic")
    assert told[-1].endswith("; began by somebody; approved by jane")


def test_the_history_names_who_gave_a_rollout_up_and_who_rolled_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.served()
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS, until="10")
    monkeypatch.setattr(stage.target, "who", lambda: "jane")
    abort(stage.store, stage.target)
    assert acts(stage) == [("began", "somebody"), ("gave up", "jane")]
    roll_out(stage.store, stage.target, NEXT, SETTINGS)
    roll_back(stage.store, stage.target, SETTINGS)
    assert (history(stage.store)[-1].kind, acts(stage)) == ("rollback", [("began", "jane")])


def test_a_request_to_the_process_that_runs_the_rollout_names_its_author(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    journal = roll_out(stage.store, stage.target, NEXT, SETTINGS, until="10")
    OperatorRequest(id=journal.id, action="abort", reason="slow", by="jane").write(stage.store.path / REQUEST)
    with pytest.raises(RolledBack, match="slow"):
        roll_out(stage.store, stage.target, NEXT, SETTINGS)
    assert acts(stage) == [("began", "somebody"), ("gave up", "jane")]


def test_other_settings_for_the_release_that_is_served_are_in_the_history(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.served()
    stage.make(NEXT)
    roll_out(stage.store, stage.target, NEXT, SETTINGS)
    monkeypatch.setattr(stage.target, "changes", lambda _: "max_model_len")
    roll_out(stage.store, stage.target, NEXT, SETTINGS)
    last = history(stage.store)[-1]
    assert (last.kind, last.release, last.before) == ("settings", NEXT, NEXT)
    assert last.reason.endswith("; changed: max_model_len")
    assert before(stage.store, NEXT) == GOOD, "the way back is still the release before"


def no_name() -> str:
    raise KeyError("getpwuid(): uid not found: 8737")


@pytest.mark.parametrize(("name", "found"), [(lambda: "jane", "jane"), (no_name, "uid ")])
def test_on_one_machine_the_user_is_that_of_the_system(
    name: Callable[[], str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getpass, "getuser", name)
    assert user().startswith(found)
