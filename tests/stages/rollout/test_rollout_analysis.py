from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from stages.parts.base.errors import TransientError
from stages.parts.base.rollout_settings import Rollout
from stages.parts.base.store import ModelStore
from stages.parts.base.workload import Slo
from stages.parts.records.rollout import ZERO, Analysis, Counters, Journal, Observed, Side, Slice, Window
from stages.parts.releases.release import METRICS
from stages.parts.vllm.prometheus import read_counters
from stages.rollout.analysis import Observation, analyse, check_quality
from stages.rollout.observation import FEWEST_PROMPT_TOKENS, MOST_PROMPT_TOKENS, Observer, prompt_tokens
from stages.rollout.slices import LOST, Timing, add_pairs, begin_slice, end_slice, late_s, logs
from stages.rollout.target import Target

BOUNDS = (0.01, 0.1, 1.0)
SETTINGS = Rollout(min_requests=50, ttft_slack_ms=0, tpot_slack_ms=0)
NOTHING = ZERO.model_copy(update={"instance": "one"})


def told(answered: int, *, failed: int = 0, refused: int = 0, slow: int = 0, instance: str = "one") -> Counters:
    """The counters after that many requests, *slow* of which took over 0.1 s to begin."""
    fast = answered - slow
    return Counters(
        answered=answered,
        failed=failed,
        refused=refused,
        output_tokens=10 * answered,
        ttft_bounds=BOUNDS,
        ttft=(0, fast, answered, answered),
        ttft_s=0.05 * fast + 0.5 * slow,
        tpot_bounds=BOUNDS,
        tpot=(answered, answered, answered, answered),
        tpot_s=0.005 * answered,
        instance=instance,
    )


WIGGLE = (0.98, 1.0, 1.03, 0.99)
"""Slices differ a little."""


def slices(
    count: int = 12, *, ttft_s: float = 0.1, tpot_s: float = 0.02, load: float = 1.0, **canary: Any
) -> list[Slice]:
    """Slices of five pairs, in which the stable release takes 0.1 s and 0.02 s and gets ten requests more.

    Args:
        ttft_s, tpot_s: the canary's.
        load: the canary's requests, relative to the stable release's.
        canary: what else the canary did in each.
    """
    found = []
    for number in range(count):
        sides = []
        for first, token, requests in ((ttft_s, tpot_s, 10 * load), (0.1, 0.02, 10.0)):
            first_log, token_log = (5 * math.log(each) for each in (first * WIGGLE[number % 4], token))
            sides.append(Side(answered=requests, ttft_count=requests, sent=5, log_ttft=first_log, log_tpot=token_log))
        sides[0] = sides[0].model_copy(
            update={"log_ttft": sides[0].log_ttft + 0.05 * (-1) ** number, "log_tpot": sides[0].log_tpot} | canary
        )
        found.append(Slice(seconds=5, pairs=5, canary=sides[0], stable=sides[1]))
    return found


def look(
    within: Sequence[Slice],
    *,
    percent: int = 10,
    earlier: Sequence[Observed] = (),
    canary: Counters | None = None,
    stable: Counters | None = None,
    agreement: float | None = 1.0,
    slo: Slo | None = None,
) -> Analysis:
    window = Window(canary=NOTHING, stable=NOTHING, slices=tuple(within))
    counters = canary or told(100), stable or told(100)
    fields = {"percent": percent, "windows": 1, "observed": earlier, "settings": SETTINGS}
    fields |= {"copied": 0 if percent else 100, "entered_at": datetime.now(UTC)}
    journal = cast(Journal, SimpleNamespace(**fields))
    return analyse(Observation(journal, window, *counters, 60, slo, agreement))


def verdicts(analysis: Analysis) -> dict[str, str]:
    return {each.name: each.verdict for each in analysis.checks}


def test_what_was_counted_are_differences_of_counters() -> None:
    found = told(300, failed=3, slow=30).since(told(200, failed=1, slow=30))
    assert (found.answered, found.failed, found.ttft_count) == (100, 2, 100)
    assert (found.ttft_s, found.tpot_s) == (pytest.approx(0.05 * 100), pytest.approx(0.005 * 100))


def test_nothing_is_counted_in_an_empty_window() -> None:
    found = told(5).since(told(5))
    assert (found.ttft_count, found.ttft_s) == (0, 0)


def test_the_first_answer_of_a_server_that_had_reported_no_histogram_counts() -> None:
    assert told(7).since(NOTHING).ttft_count == 7


def test_a_server_that_was_restarted_is_noticed_and_counted_from_zero() -> None:
    assert told(10, instance="two").restarted_since(told(5))
    assert told(4).restarted_since(told(5))
    assert not told(5).restarted_since(told(5))
    assert told(4, instance="two").since(told(500)).ttft_count == 4


def test_observations_are_above_a_limit_only_if_they_are_so_certainly() -> None:
    counted = told(10).model_copy(update={"ttft": (1, 3, 6, 10)})
    assert [counted.since(NOTHING, limit).delayed for limit in (0.01, 0.05, 0.1, 0.5, 5)] == [9, 7, 7, 4, 0]
    assert NOTHING.since(NOTHING, 1).delayed == 0


@pytest.mark.parametrize(
    ("series", "field"),
    [
        ('http_requests_total{handler="/v1/completions",method="POST",status="2xx"}', "answered"),
        ("vllm:request_generation_tokens_sum", "output_tokens"),
        ("vllm:time_to_first_token_seconds_sum", "ttft_s"),
        ('vllm:time_to_first_token_seconds_bucket{le="+Inf"}', "ttft"),
    ],
)
@pytest.mark.parametrize("value", ["NaN", "+Inf"])
def test_metrics_that_are_not_numbers_are_a_transient_error(series: str, field: str, value: str) -> None:
    with pytest.raises(TransientError, match=f"not a number: {field}"):
        read_counters(f"{series} {value}\n", "one")


def test_a_canary_that_is_as_good_is_promoted() -> None:
    found = look(slices())
    assert (found.verdict, set(verdicts(found).values())) == ("promote", {"pass"})
    ttft = next(each for each in found.checks if each.name == "ttft")
    assert (ttft.canary, ttft.stable, ttft.limit) == (
        pytest.approx(100, 0.01),
        pytest.approx(100, 0.01),
        pytest.approx(125, 0.01),
    )


@pytest.mark.parametrize(("canary", "stable"), [(49, 450), (50, 49), (0, 0)])
def test_too_few_requests_to_either_release_are_inconclusive(canary: int, stable: int) -> None:
    found = look(slices(), canary=told(canary), stable=told(stable))
    assert found.verdict == "inconclusive"
    assert found.reason == (
        f"{canary} requests to the canary and {stable} to the stable release; 50 of each are needed"
    )


@pytest.mark.parametrize(
    ("worse", "failing"),
    [
        ({"ttft_s": 0.2}, "ttft"),
        ({"tpot_s": 0.03}, "tpot"),
        ({"failed": 3.0}, "errors"),
        ({"answered": 0.0, "failed": 10.0}, "errors"),
        ({"lost": 2}, "own requests"),
        ({"late": 2}, "late"),
        ({"delayed": 3.0}, "delayed"),
        ({"refused": 4.0}, "refused"),
    ],
)
def test_one_failed_check_is_enough_to_roll_back(worse: dict[str, Any], failing: str) -> None:
    found = look(slices(**worse))
    assert found.verdict == "rollback"
    assert [name for name, verdict in verdicts(found).items() if verdict == "fail"] == [failing]
    assert found.reason == next(each.text for each in found.checks if each.name == failing)


def test_a_canary_can_only_fail_at_a_look_but_does_not_pass_in_between() -> None:
    assert verdicts(look(slices(12, tpot_s=0.03)))["tpot"] == "fail"
    for between in (9, 21):
        assert verdicts(look(slices(between, tpot_s=0.03)))["tpot"] == "unclear"


def test_what_is_unclear_says_what_would_tell() -> None:
    noisy = [each for number in range(6) for each in slices(2, tpot_s=0.025 * 2 ** (-1) ** number)]
    tpot = next(each for each in look(noisy).checks if each.name == "tpot")
    assert tpot.verdict == "unclear"
    assert "; unclear at ±" in tpot.text
    assert tpot.text.endswith(" would tell")
    few = next(each for each in look(slices(1)).checks if each.name == "tpot")
    assert few.text.endswith("; unclear: there are too few slices")


def test_failures_at_both_do_not_roll_back() -> None:
    both = [
        each.model_copy(update={"stable": each.stable.model_copy(update={"failed": 3.0})})
        for each in slices(failed=3.0)
    ]
    assert verdicts(look(both))["errors"] == "pass"


def test_failures_of_the_whole_rollout_count() -> None:
    before = (Observed(percent=10, slices=tuple(slices(failed=2.0))),)
    assert verdicts(look(slices(2), percent=100))["errors"] == "pass"
    assert verdicts(look(slices(2), percent=100, earlier=before))["errors"] == "fail"


def test_mistakes_of_clients_do_not_count_against_a_release() -> None:
    assert verdicts(look(slices(answered=5.0, refused=0.0)))["refused"] == "pass"
    one = [*slices(11), *slices(1, refused=1.0)]
    assert verdicts(look(one))["refused"] != "fail"


def test_more_load_than_the_stable_release_has_does_not_make_a_canary_slow() -> None:
    busy = slices(ttft_s=0.3, tpot_s=0.03, load=9)
    then = [each.model_copy(update={"canary": each.stable, "stable": each.canary}) for each in busy]
    before = (Observed(percent=10, slices=tuple(then)),)
    found = look(busy, percent=90, earlier=before)
    assert (verdicts(found)["ttft"], verdicts(found)["tpot"]) == ("pass", "pass")
    tpot = next(each for each in found.checks if each.name == "tpot")
    assert "(stable release with 90 % of the requests, 18.0 a second, now 18.0: 30." in tpot.text
    assert tpot.limit == pytest.approx(2 * 1.1 * 30, rel=0.01)


def test_a_canary_that_cannot_carry_most_of_the_requests_is_slow() -> None:
    before = (Observed(percent=10, slices=tuple(slices(load=1 / 9))),)
    saturated = look(slices(ttft_s=3.0, load=1.0), percent=90, earlier=before)
    assert verdicts(saturated)["ttft"] == "fail"
    assert "late" not in verdicts(saturated)
    alone = look(slices(ttft_s=3.0, load=1.0), percent=100, earlier=before)
    assert verdicts(alone)["ttft"] == "fail"


def test_with_most_of_the_requests_a_canary_keeps_the_workload_s_targets_unless_the_stable_release_did_not() -> None:
    saturated, slo = slices(ttft_s=0.6), Slo(ttft_ms=500, tpot_ms=100)
    fast = (Observed(percent=10, slices=tuple(slices())),)
    slow = (Observed(percent=10, slices=tuple(each.model_copy(update={"stable": each.canary}) for each in saturated)),)
    assert verdicts(look(saturated, percent=90, earlier=fast))["ttft"] == "pass"
    assert verdicts(look(saturated, percent=90, earlier=fast, slo=slo))["ttft"] == "fail"
    assert verdicts(look(saturated, percent=90, earlier=slow, slo=slo))["ttft"] == "pass"


def test_a_rollout_goes_on_without_targets_if_the_release_s_metrics_can_not_be_read(tmp_path: Path) -> None:
    store, journal = ModelStore(tmp_path, "org/name"), SimpleNamespace(release="0001-fp16-aaaaaaaaaaaa")
    observer = Observer(store, cast(Target, None), cast(Journal, journal), lambda: 0.0)
    assert observer.slo() is None
    path = store.releases / journal.release / METRICS
    path.parent.mkdir(parents=True)
    path.write_text('{"workload": {"slo": {"ttft_ms": 500, "tpot_ms": 100}}}')
    assert observer.slo() == Slo(ttft_ms=500, tpot_ms=100)
    path.write_text("{")
    assert observer.slo() is None


def test_without_a_step_in_which_the_stable_release_was_loaded_a_loaded_canary_is_not_called_slow() -> None:
    assert "ttft" not in verdicts(look(slices(ttft_s=3.0), percent=90))
    assert verdicts(look(slices(), percent=90))["ttft"] == "pass"


def test_a_canary_that_carries_more_at_50_percent_is_compared_at_equal_load() -> None:
    light = (Observed(percent=10, slices=tuple(slices(tpot_s=0.017, load=0.3))),)
    heavy = slices(tpot_s=0.023, load=1.7)
    assert verdicts(look(heavy, percent=50))["tpot"] == "fail"
    assert verdicts(look(heavy, percent=50, earlier=light))["tpot"] == "pass"
    slow = (Observed(percent=10, slices=tuple(slices(tpot_s=0.022, load=0.3))),)
    assert verdicts(look(slices(tpot_s=0.028, load=1.7), percent=50, earlier=slow))["tpot"] == "fail"


def test_at_100_percent_neither_refusals_nor_the_stable_release_s_number_of_requests_count() -> None:
    found = look(slices(refused=5.0), percent=100, stable=NOTHING)
    assert (found.verdict, found.reason) == ("promote", "sound with all the traffic")
    assert "refused" not in verdicts(found)


@pytest.mark.parametrize(("agreement", "verdict"), [(0.9, "pass"), (0.89, "fail"), (math.nan, "fail"), (0.0, "fail")])
def test_answers_must_agree_with_the_recorded_ones(agreement: float, verdict: str) -> None:
    assert check_quality(SETTINGS, agreement).verdict == verdict
    assert look(slices(), agreement=agreement).verdict == {"pass": "promote", "fail": "rollback"}[verdict]


def test_steps_ascend_to_100_percent() -> None:
    for steps in ((), (10,), (50, 10, 100), (10, 10, 100), (0, 100), (100, 101)):
        with pytest.raises(ValueError, match=r"steps"):
            Rollout(steps=steps)
    assert Rollout(steps=(100,)).steps == (100,)


QUICK, SLOW = Timing(0.1, 0.02), Timing(0.4, 0.02)


def test_a_slice_keeps_what_both_releases_did_with_the_same_requests() -> None:
    found = add_pairs(Slice(seconds=0), [(SLOW, QUICK), (LOST, QUICK), (QUICK, QUICK)], late_s=0.6)
    assert found.pairs == 2
    assert (found.canary.sent, found.canary.lost, found.canary.late) == (3, 1, 1)
    assert (found.stable.sent, found.stable.lost, found.stable.late) == (3, 0, 0)
    assert math.exp(found.canary.log_ttft / 2) == pytest.approx(0.2)
    assert math.exp(found.stable.log_ttft / 2) == pytest.approx(0.1)


def test_a_canary_that_is_asked_alone_has_no_pairs() -> None:
    found = add_pairs(Slice(seconds=0), [(QUICK,), (LOST,)], late_s=1)
    assert (found.pairs, found.canary.sent, found.canary.lost, found.stable.sent) == (0, 2, 1, 0)


def test_a_slice_that_ends_has_what_the_servers_counted_in_it() -> None:
    window = begin_slice(Window(canary=NOTHING, stable=NOTHING), told(10), told(20), 5.0)
    window = end_slice(window, told(15, failed=1, slow=2), told(50), 11.0, late_s=0.1)
    (ended,) = window.slices
    assert ended.seconds == 6
    assert (ended.canary.answered, ended.canary.failed, ended.canary.delayed) == (5, 1, 2)
    assert (ended.stable.answered, ended.stable.ttft_count, ended.stable.delayed) == (30, 30, 0)
    assert window.open
    assert (window.open.seconds, window.canary_from) == (11.0, told(15, failed=1, slow=2))


def test_without_pairs_latencies_are_the_means_that_the_servers_count() -> None:
    side = Side(ttft_s=2.0, ttft_count=10, tpot_s=0.5, tpot_count=10)
    alone = [Slice(seconds=5, canary=side), Slice(seconds=5)]
    assert logs(alone, "canary", "ttft") == [pytest.approx(math.log(0.2))]
    assert logs(alone, "stable", "ttft") == []


def test_an_answer_is_late_relative_to_what_is_typical() -> None:
    assert late_s([], [(QUICK, SLOW)]) == pytest.approx(1 + 3 * 0.4)
    assert late_s(slices(), [(SLOW, SLOW)]) == pytest.approx(1 + 3 * 0.4, rel=0.02)
    assert late_s([]) == math.inf


def test_prompts_are_as_long_as_those_of_clients() -> None:
    counted = told(10).model_copy(update={"prompt_tokens": 3000.0, "prompts": 10.0})
    assert prompt_tokens(counted, None) == 300
    assert prompt_tokens(counted, counted.model_copy(update={"prompt_tokens": 1000.0})) == 200
    assert prompt_tokens(NOTHING, NOTHING) == FEWEST_PROMPT_TOKENS
    assert prompt_tokens(counted.model_copy(update={"prompt_tokens": 1e6})) == MOST_PROMPT_TOKENS


def test_lost_copies_roll_back_once_they_are_known_well() -> None:
    worse = slices(copies=20, lost_copies=4)
    for number, part in enumerate(worse):
        worse[number] = part.model_copy(update={"stable": part.stable.model_copy(update={"copies": 20})})
    found = look(worse, percent=0)
    assert found.verdict == "rollback"
    assert [check.name for check in found.checks if check.verdict == "fail"] == ["copies"]
    assert look(worse[:6], percent=0).verdict == "inconclusive", "a burst may be more than it seems"
    assert not [check for check in look(worse).checks if check.name == "copies"]
