"""A rollout on KServe that is killed around what it asks of the API server, and then given up or started again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stages.parts.base.errors import Conflict
from stages.parts.records.rollout import read_journal
from stages.parts.releases import release as releases
from stages.parts.releases.release import Split
from stages.rollout.commands import abort
from stages.rollout.state_machine import roll_out
from tests.serving import wait_until
from tests.stages.rollout.kserve.on_kserve import OnKServe
from tests.stages.rollout.kserve.test_kserve_rollout import MODES
from tests.stages.rollout.stage import GOOD, NEXT, SETTINGS

BEFORE: dict[str, str] = {"promote": "100", "withdraw": "10", "remove": "10"}
"""How far a rollout is when it gets there."""
PROGRAM = {"deploy": ["--step", "deploy"], "promote": ["--step", "promote"]}
GIVE_UP = ["--abort"]


def killed(kserve: OnKServe, call: str, *, done: bool, mode: str = "standard") -> None:
    """A process that dies in *call*, either after its request has taken effect (*done*) or before."""
    kserve.first()
    kserve.make(NEXT)
    kserve.nominate(NEXT)
    if until := BEFORE.get(call):
        roll_out(kserve.store, kserve.connect(), NEXT, SETTINGS, until=until)
    if call == "remove":  # the canary, which has no traffic any more
        kserve.connect().shift(NEXT, 0)
    asked = ("patch", f"*/{'httproutes' if mode == 'route' else 'inferenceservices'}/*")

    def so_far() -> int:
        """The requests until now. The first may change nothing, and then no generation tells that it has come."""
        return len(kserve.server.requests_for(*asked))

    before = so_far()
    (kserve.server.lose_answer if done else kserve.server.hang_up)(*asked, times=None)
    with kserve.program(*PROGRAM.get(call, GIVE_UP)) as process:
        wait_until(lambda: so_far() > before or process.poll() is not None, call)
        assert process.poll() is None, process.communicate()
        process.kill()
    kserve.server.heal()


@pytest.mark.parametrize(
    ("call", "done"),
    [
        ("deploy", True),
        ("promote", True),
        ("withdraw", True),
        ("remove", True),
        pytest.param("deploy", False, marks=pytest.mark.slow),
        pytest.param("promote", False, marks=pytest.mark.slow),
        pytest.param("withdraw", False, marks=pytest.mark.slow),
        pytest.param("remove", False, marks=pytest.mark.slow),
    ],
)
def test_a_rollout_that_was_killed_is_given_up_unless_kserve_has_promoted_it(
    standard: OnKServe, call: str, done: bool
) -> None:
    killed(standard, call, done=done)
    stays = NEXT if (call, done) == ("promote", True) else GOOD
    if stays == NEXT:
        with pytest.raises(Conflict, match=f"{NEXT} is promoted already"):
            abort(standard.store, standard.connect())
    else:
        assert abort(standard.store, standard.connect()) == NEXT
    assert standard.connect().split() == Split(stays)
    assert releases.current_release(standard.store) == stays
    wait_until(lambda: {each.release for each in standard.kserve.deployments.values()} == {stays}, "the other is gone")
    assert standard.kserve.started.count(stays) == 1
    assert standard.kserve.sent_into_the_void == []


@pytest.mark.parametrize(
    ("mode", "call", "done"),
    [
        ("standard", "promote", True),
        pytest.param("standard", "deploy", True, marks=pytest.mark.slow),
        pytest.param("standard", "promote", False, marks=pytest.mark.slow),
        pytest.param("knative", "promote", True, marks=pytest.mark.slow),
        pytest.param("route", "promote", True, marks=pytest.mark.slow),
    ],
)
def test_a_rollout_that_was_killed_is_started_again_and_promoted(
    serve: Callable[..., OnKServe], mode: str, call: str, done: bool
) -> None:
    kserve = serve(**MODES[mode])
    killed(kserve, call, done=done, mode=mode)
    assert kserve.roll(NEXT).state == "promoted"
    assert kserve.connect().split() == Split(NEXT)
    journal = read_journal(kserve.store)
    assert journal
    assert journal.state == "promoted"
    assert kserve.kserve.started == [GOOD, NEXT]
