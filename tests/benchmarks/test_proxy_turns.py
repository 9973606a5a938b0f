"""What the turns of the proxy's benchmark show together."""

from __future__ import annotations

import asyncio
import random

import pytest

from benchmarks import proxy
from benchmarks.proxy import Turn, answered, ratio, together


def test_turns_together_have_all_times_and_the_rate_of_the_whole_time() -> None:
    whole = together([Turn([1.0, 2.0], 10.0), Turn([3.0, 100.0], 30.0)])
    assert (whole.p50, whole.p95, whole.per_s) == (2.0, 100.0, 15.0)


def test_a_ratio_shows_between_which_the_middle_half_of_the_turns_lie() -> None:
    beside = [Turn([10.0], 1.0)] * 4
    assert ratio([Turn([each], 1.0) for each in (10.0, 20.0, 20.0, 40.0)], beside, "p50") == "p50 2.00 (1.25–3.50)"


def test_an_answer_that_was_refused_is_no_time() -> None:
    assert answered([1.0, 2.0]) == [1.0, 2.0]
    with pytest.raises(RuntimeError, match="within the limits"):
        answered([1.0, None])


def test_a_request_is_sent_at_its_time_whatever_becomes_of_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = asyncio.Event()

    async def late(*_: object) -> float:
        """Answers once the tenth has been sent."""
        sent.append(1)
        if len(sent) == 10:
            waiting.set()
        await asyncio.wait_for(waiting.wait(), 30)
        return 1.0

    sent: list[int] = []
    monkeypatch.setattr(proxy, "ask", late)
    monkeypatch.setattr(proxy, "FLOOD_TURN_S", 0.1)
    times = asyncio.run(proxy.open_loop(proxy.Way("x", "http://x"), 100, random.Random(0)))
    assert times == [1.0] * 10
