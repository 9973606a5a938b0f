"""A rollout on KServe that is killed around what it asks of the API server, and then given up or started again; and one
whose API server fails again and again."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from stages.parts.base.errors import Conflict, TransientError
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


@contextmanager
def failing_again_and_again(kserve: OnKServe, seed: int) -> Iterator[None]:
    """The API server answers with 500, 503 or 429, or not at all, or does what it is asked and does not say so."""
    over, draw, server = threading.Event(), random.Random(seed), kserve.server

    def disturb() -> None:
        while not over.wait(draw.uniform(0.1, 0.5)):
            server.heal()  # of what nobody has met
            verb, times = draw.choice(("get", "list", "patch", "create", "*")), draw.randint(1, 3)
            if draw.random() < 0.5:
                status = draw.choice((500, 503, 429))
                server.fail(verb, "*", status, times=times, retry_after=0 if status == 429 else None)
            else:
                draw.choice((server.hang_up, server.lose_answer))(verb, "*", times=times)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        server.heal()


@pytest.mark.parametrize("seed", range(3))
def test_a_good_canary_is_promoted_though_the_api_fails_again_and_again(standard: OnKServe, seed: int) -> None:
    standard.first()
    standard.make(NEXT)
    standard.nominate(NEXT)
    state = ""
    with failing_again_and_again(standard, seed):
        while not state:
            try:
                state = standard.roll(NEXT).state
            except TransientError:  # the same command continues
                continue
    assert state == "promoted"
    assert standard.connect().split() == Split(NEXT)
    assert [each.release for each in releases.history(standard.store)] == [GOOD, NEXT]
    assert standard.kserve.started == [GOOD, NEXT]
