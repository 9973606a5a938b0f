from __future__ import annotations

import math
from typing import Any

import pytest

from scoring.watch import KEPT, LEARNED, Sample, Watch

SOUND = Sample(
    agreement=1.0, requests=200, failed=0, ttft_ms=100.0, tpot_ms=20.0, in_flight=0.0, context=4096, promised=4096
)


def changed(sample: Sample = SOUND, **changes: Any) -> Sample:
    return sample.model_copy(update=changes)


def watched(looks: int = 24) -> Watch:
    watch = Watch()
    for _ in range(looks):
        assert watch.see(SOUND) == set()
    return watch


@pytest.mark.parametrize(
    ("signal", "changes"),
    [
        ("answers", {"agreement": 0.82}),
        ("answers", {"agreement": 0.99}),
        ("tpot", {"tpot_ms": 40.0}),
        ("tpot", {"tpot_ms": 20000.0}),
        ("ttft", {"ttft_ms": 1000.0}),
        ("context", {"context": 2048}),
        ("errors", {"failed": 10}),
    ],
)
@pytest.mark.parametrize("looks", [8, 24])
def test_a_change_is_noticed_at_the_third_look_and_not_before(signal: Any, changes: dict[str, Any], looks: int) -> None:
    watch, other = watched(looks), changed(**changes)
    assert [watch.see(other) for _ in range(3)] == [set(), set(), {signal}]


def test_a_look_or_two_that_are_out_of_line_are_no_change() -> None:
    watch, wild = watched(), changed(agreement=0.0, ttft_ms=1e5, tpot_ms=1e4, context=1)
    for _ in range(50):
        assert [watch.see(each) for each in (wild, wild, SOUND, SOUND, SOUND)] == [set()] * 5


def test_failures_are_noticed_if_they_come_again() -> None:
    watch = watched()
    assert [watch.see(changed(failed=failed)) for failed in (200, 10, 10)] == [set(), set(), {"errors"}]
    often = watched()
    assert [often.see(changed(failed=1)) for _ in range(1000)] == [set()] * 1000


def test_an_alarm_ends_once_the_endpoint_is_sound_again_and_what_was_wrong_does_not_become_usual() -> None:
    watch = watched()
    slow = changed(tpot_ms=50.0)
    for _ in range(500):
        watch.see(slow)
    assert watch.alarms == {"tpot"}
    for _ in range(3):
        watch.see(SOUND)
    assert watch.alarms == set()
    assert [watch.see(slow) for _ in range(3)][-1] == {"tpot"}


def test_a_server_is_compared_with_itself_under_a_similar_load() -> None:
    watch = watched()
    busy = changed(in_flight=30.0, tpot_ms=60.0)
    assert [watch.see(busy) for _ in range(40)] == [set()] * 40
    assert [watch.see(changed(busy, tpot_ms=120.0)) for _ in range(4)][-1] == {"tpot"}


def test_before_anything_is_usual_only_answers_that_are_far_off_count() -> None:
    watch = Watch()
    assert [watch.see(changed(agreement=0.98)) for _ in range(LEARNED)][-1] == set()
    broken = Watch()
    assert [broken.see(changed(agreement=0.6)) for _ in range(3)][-1] == {"answers"}


def test_what_was_usual_more_than_a_week_ago_is_forgotten() -> None:
    watch = watched()
    for _ in range(KEPT):
        watch.see(changed(tpot_ms=21.0))
    usual = watch.usual("tpot", math.log(4))
    assert usual
    assert usual[0] == pytest.approx(math.log(21))


def test_what_a_look_could_not_show_is_no_evidence() -> None:
    watch = watched()
    mute = changed(agreement=None, ttft_ms=None, tpot_ms=None, context=None, requests=0)
    assert [watch.see(mute) for _ in range(20)] == [set()] * 20
