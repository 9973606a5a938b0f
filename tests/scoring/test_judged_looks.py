from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scoring.watch import KEPT, LEARNED, Sample, Watch

SOUND = Sample(divergence=0.0, requests=200, failed=0, ttft_s=0.1, tpot_s=0.02, load=0.0, context=4096, promised=4096)


def watched(looks: int = 24) -> Watch:
    watch = Watch()
    for _ in range(looks):
        assert watch.see(SOUND) == set()
    return watch


@pytest.mark.parametrize(
    ("signal", "changed"),
    [
        ("answers", {"divergence": 0.2}),
        ("answers", {"divergence": 0.01}),
        ("tpot", {"tpot_s": 0.04}),
        ("tpot", {"tpot_s": 20.0}),
        ("ttft", {"ttft_s": 1.0}),
        ("context", {"context": 2048}),
    ],
)
def test_a_change_is_noticed_at_the_third_look_and_not_before(signal: Any, changed: dict[str, Any]) -> None:
    watch, other = watched(), replace(SOUND, **changed)
    assert [watch.see(other) for _ in range(3)] == [set(), set(), {signal}]


def test_a_look_or_two_that_are_out_of_line_are_no_change() -> None:
    watch, wild = watched(), replace(SOUND, divergence=9.0, ttft_s=100.0, tpot_s=10.0, context=1)
    for _ in range(50):
        assert [watch.see(each) for each in (wild, wild, SOUND, SOUND, SOUND)] == [set()] * 5


def test_failures_are_noticed_if_they_come_again() -> None:
    watch = watched()
    assert watch.see(replace(SOUND, failed=200)) == set()
    assert watch.see(replace(SOUND, failed=10)) == {"errors"}
    often = watched()
    assert [often.see(replace(SOUND, failed=1)) for _ in range(1000)] == [set()] * 1000


def test_an_alarm_ends_once_the_endpoint_is_sound_again_and_what_was_wrong_does_not_become_usual() -> None:
    watch = watched()
    slow = replace(SOUND, tpot_s=0.05)
    for _ in range(500):
        watch.see(slow)
    assert watch.alarms == {"tpot"}
    for _ in range(3):
        watch.see(SOUND)
    assert watch.alarms == set()
    assert [watch.see(slow) for _ in range(3)][-1] == {"tpot"}


def test_a_server_is_compared_with_itself_under_a_similar_load() -> None:
    watch = watched()
    busy = replace(SOUND, load=30.0, tpot_s=0.06)
    assert [watch.see(busy) for _ in range(40)] == [set()] * 40
    assert [watch.see(replace(busy, tpot_s=0.12)) for _ in range(4)][-1] == {"tpot"}


def test_before_anything_is_usual_only_answers_that_are_far_off_count() -> None:
    watch = Watch()
    assert [watch.see(replace(SOUND, divergence=0.02)) for _ in range(LEARNED)][-1] == set()
    broken = Watch()
    assert [broken.see(replace(SOUND, divergence=0.5)) for _ in range(3)][-1] == {"answers"}


def test_what_was_usual_more_than_a_week_ago_is_forgotten() -> None:
    watch = watched()
    for _ in range(KEPT):
        watch.see(replace(SOUND, tpot_s=0.021))
    usual = watch.usual("tpot", 0.0)
    assert usual
    assert usual[0] == pytest.approx(-3.863, abs=0.001)


def test_what_a_look_could_not_show_is_no_evidence() -> None:
    watch = watched()
    mute = replace(SOUND, divergence=None, ttft_s=None, tpot_s=None, context=None, requests=0)
    assert [watch.see(mute) for _ in range(20)] == [set()] * 20
