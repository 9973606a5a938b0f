"""A canary that is judged by copies of clients' requests before any client is sent to it: the real Envoy, supervisor
and state machine, stand-in servers."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from stages.parts.base.errors import ConfigError, RolledBack
from stages.parts.base.rollout_settings import Mirror, Rollout
from stages.parts.endpoint.access_log import LoggedRequest
from stages.parts.records.rollout import Journal, read_journal
from stages.parts.vllm.client import RELEASE_HEADER
from stages.rollout.copies import STREAM, compared
from stages.rollout.slices import Timing
from stages.rollout.state_machine import roll_out
from tests.serving import MODEL, wait_until
from tests.stages.rollout.stage import GOOD, NEXT, SETTINGS, Stage
from tests.stages.rollout.test_one_machine import Place, place

__all__ = ["place"]  # a fixture
MIRRORED = Rollout(
    steps=(50, 100),
    step_s=0,
    min_requests=5,
    step_timeout_s=60,
    poll_s=0.1,
    own_timeout_s=3,
    agreement=0,
    ttft_slack_ms=200,
    tpot_slack_ms=200,
    mirror=Mirror(percent=100, duration_s=3),
)


class Clients:
    """Ask without a pause, and note which release answered, or that none did."""

    def __init__(self, place: Place) -> None:
        self.url, self.answers = place.endpoint().url, list[str]()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(2)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 5, "stream": True}
        with httpx.Client(timeout=60) as client:
            while not self._stop.is_set():
                with client.stream("POST", f"{self.url}/v1/completions", json=body) as reply:
                    whole = "[DONE]" in "".join(reply.iter_text())
                self.answers.append(reply.headers[RELEASE_HEADER] if reply.is_success and whole else "failed")


def rolled_out(place: Place, canary: str, during: Callable[[], None]) -> tuple[Journal, str]:
    """Roll *canary* out, and do something as soon as it gets copies. Returns the journal, and the error."""
    errors: list[str] = []

    def roll() -> None:
        try:
            roll_out(place.store, place.target, canary, MIRRORED)
        except RolledBack as error:
            errors.append(str(error))

    thread = threading.Thread(target=roll)
    thread.start()
    wait_until(lambda: place.endpoint().copied == 100 or not thread.is_alive(), "copies")
    during()
    thread.join()
    journal = read_journal(place.store)
    assert journal
    return journal, "".join(errors)


def test_a_sound_canary_gets_copies_first_then_clients(place: Place) -> None:
    old, new = place.release(1, token_s=0.01), place.release(2, token_s=0.01)
    roll_out(place.store, place.target, old, MIRRORED)
    with Clients(place) as clients:
        asked: list[int] = []
        journal, error = rolled_out(place, new, lambda: asked.append(len(clients.answers)))
    assert not error
    assert journal.state == "promoted"
    mirrored, *others = journal.observed
    assert mirrored.percent == 0
    copies = sum(part.canary.copies for part in mirrored.slices)
    assert copies > 20
    assert sum(part.pairs for part in mirrored.slices) > copies - 5, "their speed is compared, too"
    assert not any(part.canary.copies for step in others for part in step.slices)
    assert "failed" not in clients.answers
    assert new not in clients.answers[: asked[0] + copies // 2]
    assert new in clients.answers
    assert place.endpoint().copied == 0


def hang(place: Place, release: str) -> None:
    server = place.endpoint().server(release)
    assert server
    for process in psutil.Process(server.pid).children():
        os.kill(process.pid, signal.SIGSTOP)


@pytest.mark.parametrize("trouble", ["hangs", "dies", "fails"])
def test_a_bad_canary_is_noticed_before_any_client_is_sent_to_it(place: Place, tmp_path: Path, trouble: str) -> None:
    old = place.release(1, token_s=0.01)
    new = place.release(2, token_s=0.01, **({"fails_every": 5} if trouble == "fails" else {}))
    roll_out(place.store, place.target, old, MIRRORED)
    spoil = {
        "hangs": lambda: hang(place, new),
        "dies": lambda: place.kill_server(new, back_after=tmp_path / "never"),
        "fails": lambda: None,
    }
    with Clients(place) as clients:
        journal, error = rolled_out(place, new, spoil[trouble])
    assert "was rolled back: " in error
    assert journal.observed == (), "it never left the first step"
    assert set(clients.answers) == {old}
    assert place.endpoint().canary is None


def line(**fields: Any) -> LoggedRequest:
    made = {
        "id": "1",
        "at": 0,
        "status": 200,
        "flags": "-",
        "server": "s",
        "content_type": STREAM,
        "prompt_tokens": 100,
    }
    made |= {"cached_tokens": 0, "output_tokens": 11, "server_ttft_us": 50_000, "server_answer_us": 100_000}
    return LoggedRequest.model_validate(made | fields)


@pytest.mark.parametrize(
    ("original", "copy", "lost", "timed"),
    [
        ({}, {"server_ttft_us": 60_000, "output_tokens": 21}, (False, False), True),
        ({"cached_tokens": 90}, {}, (False, False), False),
        ({"content_type": "application/json"}, {"content_type": "application/json"}, (False, False), False),
        ({}, {"status": 503, "server": None}, (True, False), False),
        ({}, {"flags": "UC"}, (True, False), False),
        ({}, {"output_tokens": None}, (True, False), False),
        ({}, {"status": 400, "output_tokens": None}, (True, False), False),
        ({"status": 500, "output_tokens": None}, {"status": 500, "output_tokens": None}, (True, True), False),
    ],
)
def test_a_request_and_its_copy_are_compared(
    original: dict[str, Any], copy: dict[str, Any], lost: tuple[bool, bool], timed: bool
) -> None:
    copied = compared(line(**original), line(**copy))
    assert copied
    assert (copied.lost, copied.failed) == lost
    assert bool(copied.timings) == timed
    if timed:
        assert copied.timings == (Timing(0.06, 0.005), Timing(0.05, 0.01))


def test_what_is_no_fault_of_the_canary_says_nothing() -> None:
    assert compared(line(flags="DC"), line()) is None
    assert compared(line(status=400), line(status=400)) is None
    assert compared(line(), line(status=413, server=None)) is None


def test_copies_come_before_the_first_step_and_are_refused_where_nothing_can_copy(stage: Stage) -> None:
    stage.served()
    stage.make(NEXT)
    (stage.target.folder / "copies nothing").touch()
    mirrored = SETTINGS.model_copy(update={"mirror": Mirror(percent=20, duration_s=0.1)})
    before = stage.target.calls()
    with pytest.raises(ConfigError, match=r"rollout\.mirror: a disk copies nothing"):
        roll_out(stage.store, stage.target, NEXT, mirrored)
    assert stage.target.calls() == before
    (stage.target.folder / "copies nothing").unlink()
    assert roll_out(stage.store, stage.target, NEXT, mirrored).state == "promoted"
    assert [call for call in stage.target.calls() if call.startswith(("copy", "shift"))][:2] == ["copy 20", "shift 10"]
    assert json.loads((stage.target.folder / "platform.json").read_text())["stable"] == NEXT != GOOD
