"""The highest rate at which targets hold, from the trials of rates."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.evaluate.load import CLOSE, FIRST_STEPS, OTHER_STEPS, OWN_STEPS, Search
from stages.parts.samples.capacity import (
    Tried,
    bracket,
    capacity_of,
    capacity_per_s,
    response,
    strain_of,
    throughput_of,
)
from stages.parts.samples.lines import LoadRun, LoadSamples, StartLoad, TimedRequest


def request(ttft_ms: float, tpot_ms: float = 1.0, start_s: float = 0.0, tokens: int = 10) -> TimedRequest:
    return TimedRequest(
        restart=0,
        phase="trial",
        number=0,
        start_s=start_s,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        e2el_ms=ttft_ms + tokens * tpot_ms,
        itl_ms=(),
        prompt_tokens=5,
        output_tokens=tokens,
    )


def trial(start: int, rate: float, slowest_ms: float | None) -> LoadSamples:
    """A trial of 40 requests with a target of 100 ms; ended early if *slowest_ms* is None."""
    requests = () if slowest_ms is None else (request(slowest_ms),) * 40
    run = LoadRun(
        restart=start,
        phase="trial",
        number=start,
        rate_per_s=rate,
        concurrency=1,
        duration_s=40 / rate,
        targets_ms=(100.0, 10.0),
        held=slowest_ms is not None and slowest_ms <= 100,
    )
    return LoadSamples(run, requests)


def steady(start: int, tokens: int = 10) -> LoadSamples:
    run = LoadRun(restart=start, phase="round", number=start, rate_per_s=7.0, concurrency=1, duration_s=2.0)
    return LoadSamples(run, (request(50.0, tokens=tokens),) * 14)


def test_the_targets_hold_if_95_percent_of_the_requests_meet_both() -> None:
    good, late, slow = request(100.0, 10.0), request(101.0, 1.0), request(1.0, 11.0)
    assert strain_of([good] * 38 + [late, slow], 100, 10) == 1
    assert strain_of([good] * 37 + [late, late, slow], 100, 10) == pytest.approx(1.01)
    assert strain_of([], 100, 10) == math.inf


def test_a_wait_that_grows_all_the_time_does_not_hold_however_loose_the_targets_are() -> None:
    growing = [request(1000 * 0.2 * second, start_s=second) for second in range(40)]
    assert strain_of(growing, 60_000, 1000) == pytest.approx(2.0)
    assert strain_of([request(5000, start_s=second) for second in range(40)], 60_000, 1000) < 0.1


@pytest.mark.parametrize(("grows_s", "holds"), [(0.0, 95), (0.1, 95), (0.5, 5)])
def test_waits_that_differ_by_chance_in_a_short_trial_still_hold(grows_s: float, holds: int) -> None:
    chance = random.Random(1)

    def trial() -> list[TimedRequest]:
        times_s = [each / 15 for each in range(20)]
        return [request(200 + 1000 * grows_s * at + chance.uniform(0, 200), start_s=at) for at in times_s]

    held = sum(strain_of(trial(), 5000, 500) <= 1 for _ in range(100))
    assert held <= holds if holds < 50 else held >= holds - 3


def test_the_capacity_lies_between_the_highest_rate_that_held_and_the_next_that_did_not() -> None:
    assert capacity_per_s([Tried(8, 0.5), Tried(16, 2.0)]) == pytest.approx(8 * math.sqrt(2))
    assert capacity_per_s([Tried(8, 0.9), Tried(10, 0.95), Tried(16, math.inf)]) == pytest.approx(10.3, abs=0.2)
    assert capacity_per_s([Tried(4, 0.1), Tried(8, 1.0)]) == 8
    assert capacity_per_s([Tried(4, 1.5)]) is None


def test_the_response_never_falls_as_the_rate_rises() -> None:
    given = [Tried(8, 0.5), Tried(9, 0.9), Tried(10, 0.7), Tried(11, 0.8), Tried(12, 1.5)]
    assert [each.strain for each in response(given)] == [0.5, 0.7, 0.7, 0.8, 1.5]
    curve = response([Tried(each, chance) for each, chance in zip(range(1, 30), chances(29), strict=True)])
    assert all(one.strain <= two.strain for one, two in itertools.pairwise(curve))


def chances(count: int) -> list[float]:
    drawn = random.Random(2)
    return [drawn.uniform(0.1, 3) for _ in range(count)]


def test_one_failure_counts_only_if_no_other_trial_contradicts_it() -> None:
    held = [Tried(8, 0.5), Tried(10, 0.8), Tried(11, 0.9), Tried(12, 1.1)]
    capacity = capacity_per_s(held)
    assert capacity_per_s([*held, Tried(8, math.inf)]) == capacity  # another trial of the same rate
    assert capacity_per_s([held[0], Tried(10, math.inf), *held[2:]]) == capacity  # a trial of a higher rate
    assert capacity_per_s([*held[:2], Tried(10, math.inf), Tried(10, 3.0), held[3]]) == pytest.approx(9.7, abs=0.3)


def test_a_single_trial_of_a_rate_decides_when_nothing_contradicts_it() -> None:
    assert bracket([Tried(8, 0.5), Tried(16, 2.0)]) == (Tried(8, 0.5), Tried(16, 2.0))
    assert bracket([Tried(8, 0.5)]) == (Tried(8, 0.5), None)
    assert bracket([Tried(8, math.inf)]) == (None, Tried(8, math.inf))
    assert bracket([]) == (None, None)


@given(st.floats(1, 1000), st.sampled_from([OTHER_STEPS, FIRST_STEPS]), st.floats(1.5, 6), st.integers(0, 6))
def test_one_trial_that_a_pause_made_fail_does_not_move_what_a_search_finds(
    capacity: float, steps: int, steepness: float, paused: int
) -> None:
    search = Search.around(capacity / 1.5, steps)
    found = capacity_per_s(rates_of(search, capacity, steepness, paused))
    assert found == pytest.approx(capacity, rel=0.21)


@given(st.floats(1, 1000), st.floats(1.5, 6), st.integers(0, 2))
def test_nor_does_one_in_a_later_start(capacity: float, steepness: float, paused: int) -> None:
    found = capacity_per_s(rates_of(Search.again(capacity, 1), capacity, steepness, paused))
    assert found == pytest.approx(capacity, rel=0.21)


def rates_of(search: Search, capacity: float, steepness: float = 2.0, paused: int | None = None) -> list[Tried]:
    """What a search tries on a server whose strain is known; the trial with the number *paused* fails."""
    tried: list[Tried] = []
    while rate := search.following(tried):
        tried.append(Tried(rate, math.inf if len(tried) == paused else (rate / capacity) ** steepness))
        assert len(tried) < 20
    return tried


@given(
    st.floats(1, 1000), st.floats(1, 1000), st.sampled_from([OWN_STEPS, OTHER_STEPS, FIRST_STEPS]), st.floats(0.5, 6)
)
def test_the_search_ends_close_to_the_rate_where_the_strain_is_one(
    capacity: float, expected: float, steps: int, steepness: float
) -> None:
    for start in range(3):
        found = capacity_per_s(rates_of(Search.around(expected, steps, start), capacity, steepness))
        assert found == pytest.approx(capacity, rel=0.05)


def test_what_is_expected_lies_between_the_first_two_rates() -> None:
    for start in range(20):
        for steps in (OWN_STEPS, OTHER_STEPS):
            first, second, *_ = rates_of(Search.around(50.0, steps, start), 50.0)
            assert first.rate_per_s <= 50.0 * 1.0001
            assert second.rate_per_s >= 50.0 / 1.0001
            assert second.rate_per_s / first.rate_per_s == pytest.approx(CLOSE**steps)


def test_variants_are_tried_at_the_same_rates_in_a_start_and_at_others_in_the_next() -> None:
    scales = []
    for start in range(4):
        own = rates_of(Search.around(48.0, OWN_STEPS, start), 50.0)
        other = rates_of(Search.after(20.0, start), 50.0)
        closest = [[each.rate_per_s for each in bracket(given) if each] for given in (own, other)]
        assert closest[0] == pytest.approx(closest[1], rel=1e-9)
        scales.append(math.log(own[0].rate_per_s) / math.log(CLOSE) % 1)
    assert min(abs(one - two) for one, two in itertools.combinations(scales, 2)) > 0.1


def test_the_throughput_of_a_start_is_its_capacity_in_tokens_of_the_rounds() -> None:
    trials = (trial(0, 8, 50.0), trial(0, 16, 200.0))
    assert throughput_of(StartLoad((steady(0),), trials)) == pytest.approx(8 * math.sqrt(2) * 10)
    assert throughput_of(StartLoad((steady(0, 20),), trials)) == pytest.approx(8 * math.sqrt(2) * 20)
    assert throughput_of(StartLoad((steady(0),))) == pytest.approx(70)


def test_over_several_starts_the_capacity_has_an_interval() -> None:
    rates = [8.0, 8.2, 8.4]
    trials = tuple(
        each for start, rate in enumerate(rates) for each in (trial(start, rate, 100.0), trial(start, 9, None))
    )
    found = capacity_of(StartLoad(tuple(steady(start) for start in range(3)), trials))
    assert found is not None
    assert found.starts == pytest.approx((80, 82, 84))
    assert found.requests_per_s == pytest.approx(math.exp(fmean(map(math.log, rates))))
    assert found.low is not None
    assert found.high is not None
    # Student's t with two degrees of freedom: 4.30 · 2.0 / √3.
    assert (found.low, found.high) == pytest.approx((82 - 5, 82 + 5), abs=0.2)
    assert [(each.rate_per_s, each.share, each.held) for each in found.trials][:2] == [(8, 1.0, True), (9, None, False)]
    one = capacity_of(StartLoad((steady(0),), trials[:2]))
    assert one is not None
    assert (one.low, one.high) == (None, None)
    assert capacity_of(StartLoad((steady(0),))) is None
