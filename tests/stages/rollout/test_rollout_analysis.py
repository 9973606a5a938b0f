from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest

from stages.parts.base.errors import TransientError
from stages.parts.base.settings import Rollout
from stages.parts.engine.metrics import read_counters
from stages.parts.records.counters import ZERO, Counters
from stages.parts.records.rollout import Analysis, Figures, Pace, SyntheticRequests, Window
from stages.rollout.analysis import Observation, analyse, check_quality, extend_pace, figures

BOUNDS = (0.01, 0.1, 1.0)
SETTINGS = Rollout(min_requests=50, ttft_slack_ms=0, tpot_slack_ms=0)
NOTHING = ZERO.model_copy(update={"instance": "one"})


def told(
    answered: int,
    *,
    failed: int = 0,
    refused: int = 0,
    slow: int = 0,
    tokens_per_s: float = 100,
    instance: str = "one",
) -> Counters:
    """The counters after that many requests of 10 tokens, *slow* of which took over 0.1 s to begin."""
    fast = answered - slow
    return Counters(
        answered=answered,
        failed=failed,
        refused=refused,
        output_tokens=10 * answered,
        in_flight_s=10 * answered / tokens_per_s,
        ttft_bounds=BOUNDS,
        ttft=(0, fast, answered, answered),
        tpot_bounds=BOUNDS,
        tpot=(answered, answered, answered, answered),
        instance=instance,
    )


def look(canary: Counters, stable: Counters | None, *, percent: int = 10, **changes: Any) -> Analysis:
    """The last of ten looks that were alike."""
    window = Window(canary=NOTHING, stable=stable and NOTHING, **changes.pop("own", {}))
    pace = changes.pop("pace", None) or (repeated(extend_pace(window, canary, stable)) if stable else None)
    window = window.model_copy(update={"pace": pace})
    given: dict[str, Any] = {"earlier": [], "agreement": 1.0, "seconds": 60, "at": datetime.now(UTC)}
    return analyse(SETTINGS, Observation(percent, window, canary, stable, **(given | changes)))


def repeated(pace: Pace) -> Pace:
    return pace.model_copy(update={"canary": 10 * pace.canary, "stable": 10 * pace.stable})


def speeds(canary: list[float], stable: list[float | None]) -> Pace:
    return Pace(canary_from=NOTHING, stable_from=NOTHING, canary=tuple(canary), stable=tuple(stable))


def verdicts(analysis: Analysis) -> dict[str, str]:
    return {each.name: each.verdict for each in analysis.checks}


def test_figures_are_differences_of_counters() -> None:
    found = figures(told(300, failed=3, slow=30).since(told(200, failed=1, slow=30)))
    assert (found.requests, found.answered, found.failed) == (100, 100, 2)
    assert found.ttft_p95_ms == pytest.approx(95.5)  # all between 10 and 100 ms
    assert found.tpot_p95_ms == pytest.approx(9.5)
    assert found.tokens_per_s_each == pytest.approx(100)


def test_an_empty_window_has_no_figures_rather_than_zero() -> None:
    found = figures(told(5).since(told(5)))
    assert (found.requests, found.ttft_p95_ms, found.tpot_p95_ms, found.tokens_per_s_each) == (0, None, None, None)


def test_the_first_answer_of_a_server_that_had_reported_no_histogram_counts() -> None:
    assert figures(told(7).since(NOTHING)).requests == 7


def test_a_server_that_was_restarted_is_noticed_and_counted_from_zero() -> None:
    assert told(10, instance="two").restarted_since(told(5))
    assert told(4).restarted_since(told(5))
    assert not told(5).restarted_since(told(5))
    assert figures(told(4, instance="two").since(told(500))).requests == 4


@pytest.mark.parametrize(
    ("series", "field"),
    [
        ('http_requests_total{handler="/v1/completions",method="POST",status="2xx"}', "answered"),
        ("vllm:request_generation_tokens_sum", "output_tokens"),
        ("vllm:e2e_request_latency_seconds_sum", "in_flight_s"),
        ('vllm:time_to_first_token_seconds_bucket{le="+Inf"}', "ttft"),
    ],
)
@pytest.mark.parametrize("value", ["NaN", "+Inf"])
def test_metrics_that_are_not_numbers_are_a_transient_error(series: str, field: str, value: str) -> None:
    with pytest.raises(TransientError, match=f"not a number: {field}"):
        read_counters(f"{series} {value}\n", "one")


def test_a_canary_that_is_as_good_is_promoted() -> None:
    found = look(told(50), told(450))
    assert (found.verdict, set(verdicts(found).values())) == ("promote", {"pass"})


@pytest.mark.parametrize(("canary", "stable"), [(49, 450), (50, 49), (0, 0)])
def test_too_few_requests_to_either_release_are_inconclusive(canary: int, stable: int) -> None:
    found = look(told(canary), told(stable))
    assert found.verdict == "inconclusive"
    assert found.reason == (
        f"{canary} requests to the canary and {stable} to the stable release; 50 of each are needed"
    )


@pytest.mark.parametrize(
    ("canary", "failing"),
    [
        (told(50, slow=20), "ttft"),
        (told(50, tokens_per_s=70), "speed"),
        (told(50, failed=10), "errors"),
        (told(0, failed=10), "errors"),
    ],
)
def test_one_failed_check_is_enough_to_roll_back(canary: Counters, failing: str) -> None:
    found = look(canary, told(450))
    assert found.verdict == "rollback"
    assert [name for name, verdict in verdicts(found).items() if verdict == "fail"] == [failing]
    assert found.reason == next(each.text for each in found.checks if each.name == failing)


@pytest.mark.parametrize(
    ("canary", "stable", "verdict"),
    [
        ([90.0] * 9 + [1.0], [100.0] * 10, "pass"),
        ([60.0, 100.0] * 5, [100.0, 50.0] * 5, "pass"),
        ([70.0] * 6, [100.0] * 6, "unclear"),
        ([70.0] * 7, [100.0] * 7, "fail"),
        ([70.0] * 7 + [100.0], [100.0] * 8, "unclear"),
        ([70.0] * 9, [100.0, None, None] * 3, "unclear"),
        ([], [], "unclear"),
    ],
    ids=["one stall", "by turns", "few looks", "slower", "chance", "nothing beside it", "none"],
)
def test_a_speed_is_compared_look_by_look_so_that_one_stall_decides_nothing(
    canary: list[float], stable: list[float | None], verdict: str
) -> None:
    found = look(told(50, tokens_per_s=1), told(450), pace=speeds(canary, stable))
    assert verdicts(found)["speed"] == verdict


def test_a_canary_with_most_of_the_traffic_is_slow_if_it_is_slower_than_the_stable_release_was_with_it() -> None:
    before = figures(told(450, tokens_per_s=80).since(NOTHING))
    for canary, verdict in ((70.0, "pass"), (50.0, "fail")):
        found = look(told(50), told(50), percent=90, earlier=[before], pace=speeds([canary] * 7, [100.0] * 7))
        assert verdicts(found)["speed"] == verdict
    speed = next(each for each in found.checks if each.name == "speed")
    assert (speed.canary, speed.stable, speed.limit) == (50, pytest.approx(80), pytest.approx(60))


def test_a_look_lasts_until_a_request_has_ended_at_both_releases() -> None:
    window = Window(canary=NOTHING, stable=NOTHING)
    begun = extend_pace(window, told(5, tokens_per_s=50), NOTHING)
    assert (begun.canary, begun.stable) == ((), ())
    ended = extend_pace(window.model_copy(update={"pace": begun}), told(6), told(1))
    assert (ended.canary, ended.stable) == (pytest.approx((100,)), pytest.approx((100,)))
    later = extend_pace(window.model_copy(update={"pace": ended}), told(9, tokens_per_s=50), told(1))
    assert later == ended


def test_as_many_errors_as_the_stable_release_has_do_not_roll_back() -> None:
    assert look(told(2, failed=1), told(2, failed=1)).verdict == "inconclusive"
    assert verdicts(look(told(40, failed=20), told(40, failed=20)))["errors"] == "pass"


def test_failures_of_our_own_requests_count_even_if_the_platform_counts_none() -> None:
    own = {"to_canary": SyntheticRequests(sent=16, failed=16), "to_stable": SyntheticRequests(sent=16)}
    found = look(told(0), told(450), own=own)
    assert found.verdict == "rollback"
    assert "16 of 16 requests failed (stable release: 0 of 16)" in found.reason


def test_refusing_requests_that_the_stable_release_accepts_rolls_back() -> None:
    own = {"to_canary": SyntheticRequests(sent=45), "to_stable": SyntheticRequests(sent=45)}
    found = look(told(50, refused=8), told(90), own=own)
    assert found.verdict == "rollback"
    assert found.reason == "8 of 13 clients' requests were refused (stable release: 0 of 45)"
    assert verdicts(look(told(50, refused=8), told(90), own={}))["errors"] == "pass"


@pytest.mark.parametrize(
    ("canary", "stable", "verdict"),
    [
        (told(125, refused=20), told(405, refused=90), "pass"),  # clients' mistakes, at both alike
        (told(50, refused=1), told(90), "pass"),  # of six clients' requests, one
        (told(45), told(45), "pass"),  # no client asks anything
        (told(45, refused=3), told(45), "unclear"),  # no client asked the stable release
    ],
)
def test_mistakes_of_clients_do_not_count_against_a_release(canary: Counters, stable: Counters, verdict: str) -> None:
    own = {"to_canary": SyntheticRequests(sent=45), "to_stable": SyntheticRequests(sent=45)}
    assert verdicts(look(canary, stable, own=own))["refused"] == verdict


BUSY = Figures(requests=500, answered=500, failed=0, ttft_p95_ms=900.0, tpot_p95_ms=9.5, tokens_per_s_each=100.0)


def test_more_load_than_the_stable_release_has_now_does_not_make_a_canary_slow() -> None:
    few = BUSY.model_copy(update={"requests": 3})
    slow, idle = told(50, slow=20), told(50)
    assert look(slow, idle, percent=90).verdict == "rollback"
    assert look(slow, idle, percent=90, earlier=[BUSY]).verdict == "promote"
    assert look(slow, idle, percent=90, earlier=[few]).verdict == "rollback", "too few to compare with"
    assert look(slow, idle, percent=90, earlier=[few, BUSY]).verdict == "promote"
    assert look(slow, told(50, slow=20), percent=90, earlier=[figures(idle.since(NOTHING))]).verdict == "promote"


def test_at_100_percent_a_machine_that_became_busy_is_no_fault_of_the_canary() -> None:
    idle = figures(told(500).since(NOTHING))
    found = look(told(50, slow=50, tokens_per_s=1), None, percent=100, earlier=[idle])
    assert (found.verdict, found.stable) == ("promote", None)
    assert found.reason == "as good as the stable release in every check, and sound with all the traffic"
    assert list(verdicts(found)) == ["requests", "errors", "own requests", "quality"]


@pytest.mark.parametrize(
    ("canary", "failed_before", "verdict"),
    [
        (told(49), 0, "inconclusive"),
        (told(99, failed=1), 0, "promote"),
        (told(97, failed=3), 0, "inconclusive"),
        (told(90, failed=10), 0, "rollback"),
        (told(90, failed=10), 50, "promote"),  # the stable release failed as often while both served
        (told(0, failed=10), 0, "rollback"),
    ],
)
def test_at_100_percent_errors_decide(canary: Counters, failed_before: int, verdict: str) -> None:
    both = figures(told(450, failed=failed_before).since(NOTHING))
    assert look(canary, None, percent=100, earlier=[both]).verdict == verdict


def test_at_100_percent_failures_of_our_own_requests_and_other_answers_decide() -> None:
    own = {"to_canary": SyntheticRequests(sent=16, failed=16)}
    found = look(told(50), None, percent=100, own=own)
    assert (found.verdict, found.reason) == ("rollback", "16 of 16 requests failed (at most 1.0 %)")
    assert look(told(50), None, percent=100, agreement=0.5).verdict == "rollback"


@pytest.mark.parametrize(("agreement", "verdict"), [(0.9, "pass"), (0.89, "fail"), (math.nan, "fail"), (0.0, "fail")])
def test_answers_must_agree_with_the_recorded_ones(agreement: float, verdict: str) -> None:
    assert check_quality(SETTINGS, agreement).verdict == verdict
    assert look(told(50), told(50), agreement=agreement).verdict == {"pass": "promote", "fail": "rollback"}[verdict]


def test_steps_ascend_to_100_percent() -> None:
    for steps in ((), (10,), (50, 10, 100), (10, 10, 100), (0, 100), (100, 101)):
        with pytest.raises(ValueError, match=r"steps"):
            Rollout(steps=steps)
    assert Rollout(steps=(100,)).steps == (100,)
