"""What a web hook gets of a rollout."""

from __future__ import annotations

import pytest

from stages.parts.base.errors import RolledBack
from stages.parts.base.notify import VARIABLE, notify
from stages.rollout.commands import abort, promote, roll_back
from stages.rollout.state_machine import roll_out
from tests.stages.rollout.stage import GOOD, NEXT, SETTINGS, Stage
from tests.webhook import hook

ASKS = SETTINGS.model_copy(update={"approval": True})


def test_an_approval_that_waits_and_a_rollback_are_posted_once_each(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.served()
    stage.make(NEXT)
    with hook() as receiver:
        monkeypatch.setenv(VARIABLE, receiver.url)
        for _ in range(2):
            roll_out(stage.store, stage.target, NEXT, ASKS, until="90")
        (waits,) = receiver.posted
        assert (waits["event"], waits["model"]) == ("awaiting approval", stage.store.model)
        assert f"slipway rollout promote {stage.store.model}" in waits["text"]
        abort(stage.store, stage.target, "not today")
    assert [each["event"] for each in receiver.posted] == ["awaiting approval", "rolled back"]
    said = f"{NEXT}: not today; began by somebody; gave up by somebody"
    assert receiver.posted[-1]["text"] == f"{stage.store.model}: {said}"


def test_a_rollback_on_purpose_is_posted_and_a_promotion_is_not(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.served()
    stage.make(NEXT)
    with hook() as receiver:
        monkeypatch.setenv(VARIABLE, receiver.url)
        roll_out(stage.store, stage.target, NEXT, ASKS, until="90")
        promote(stage.store, stage.target)
        assert [each["event"] for each in receiver.posted] == ["awaiting approval"]
        roll_back(stage.store, stage.target, SETTINGS)
    assert receiver.posted[-1]["event"] == "rolled back"
    assert f"{GOOD}: " in receiver.posted[-1]["text"]


def test_a_hook_that_refuses_or_is_gone_ends_no_rollout_and_its_secret_is_not_in_the_log(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.served()
    stage.make(NEXT, fails_every=2)
    with hook(500) as receiver:
        monkeypatch.setenv(VARIABLE, receiver.url)
        with pytest.raises(RolledBack):
            roll_out(stage.store, stage.target, NEXT, SETTINGS)
    assert len(receiver.posted) == 1
    notify("org/name", "rolled back", "it is gone now", url=receiver.url)
    notify("org/name", "rolled back", "no address", url="slack+nonsense:secret")
    log = capsys.readouterr().err
    assert "not notified: 127.0.0.1: 500" in log
    assert "not notified: 127.0.0.1: ConnectError" in log
    assert "secret" not in log


def test_slacks_form_has_a_text_alone_and_no_markup_of_others() -> None:
    with hook() as receiver:
        notify("org/name", "watch alarm", "<!channel> 2 > 1 & more", url=f"slack+{receiver.url}", look={"a": 1})
        notify("org/name", "watch alarm", "2 > 1", url=receiver.url, look={"a": 1})
        notify("org/name", "watch alarm", "nobody asked")
    slack, plain = receiver.posted
    assert slack == {"text": "*org/name*: watch alarm\n&lt;!channel&gt; 2 &gt; 1 &amp; more"}
    assert plain.pop("at")
    assert plain == {"event": "watch alarm", "model": "org/name", "text": "org/name: 2 > 1", "look": {"a": 1}}
