from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scoring.confidence import intervals, noise_of, score_draws, win_probabilities
from scoring.profile import DEFAULT
from scoring.sensitivity import shares_anywhere, shares_near

SHARES = DEFAULT.shares()
QUALITY_ONLY = {"quality": 1.0, "latency": 0.0, "throughput": 0.0, "memory": 0.0}


def raw(**qualities: float) -> pd.DataFrame:
    rows = {
        name: {"quality": each, "latency": 10.0, "throughput": 100.0, "memory": 1e9} for name, each in qualities.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def normal(center: float, deviation: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(center, deviation, 4000)


def test_noise_is_the_difference_that_chance_explains():
    samples = {"fp16": {"quality": normal(0.8, 0.01, 0)}, "awq": {"quality": normal(0.8, 0.01, 1)}}
    noise = noise_of(raw(fp16=0.8, awq=0.8), samples)
    assert noise["quality"] == pytest.approx(1.96 * 0.01 * np.sqrt(2), rel=0.05)
    assert noise["latency"] == noise["memory"] == 0


def test_paired_draws_have_less_noise():
    shared = normal(0.8, 0.01, 0)
    samples = {"fp16": {"quality": shared}, "awq": {"quality": shared - 0.001}}
    assert noise_of(raw(fp16=0.8, awq=0.8), samples)["quality"] == pytest.approx(0, abs=1e-9)


def test_a_single_variant_has_no_noise():
    assert set(noise_of(raw(fp16=0.8), {"fp16": {"quality": normal(0.8, 0.01, 0)}}).values()) == {0.0}


def test_the_likelier_winner_wins_more_draws():
    samples = {"fp16": {"quality": normal(0.8, 0.01, 0)}, "awq": {"quality": normal(0.79, 0.01, 1)}}
    chances = win_probabilities(score_draws(raw(fp16=0.8, awq=0.79), samples, QUALITY_ONLY))
    # P(N(0.01, 0.01·√2) > 0)
    assert chances == pytest.approx({"fp16": 0.76, "awq": 0.24}, abs=0.02)


def test_level_scores_share_the_win():
    scores = pd.DataFrame({"a": [1.0, 0.5, 1.0], "b": [1.0, 0.7, 0.0], "c": [1.0, 0.7, 0.0]})
    assert win_probabilities(scores) == pytest.approx({"a": 4 / 9, "b": 5 / 18, "c": 5 / 18})


def test_only_able_variants_win_a_draw_and_a_draw_may_have_no_winner():
    scores = pd.DataFrame({"a": [1.0, 0.5, 1.0, 1.0], "b": [0.5, 0.7, 0.0, 0.5]})
    able = pd.DataFrame({"a": [False, True, True, False], "b": [True, True, True, False]})
    assert win_probabilities(scores, able) == {"a": 0.25, "b": 0.5}


def test_only_the_variants_to_choose_from_set_the_scale_of_a_draw():
    samples = {name: {"quality": np.full(2, each)} for name, each in (("a", 0.8), ("b", 0.7), ("c", 0.2))}
    among = pd.DataFrame({"a": [True, True], "b": [True, True], "c": [True, False]})
    found = score_draws(raw(a=0.8, b=0.7, c=0.2), samples, QUALITY_ONLY, among=among)
    everyone = score_draws(raw(a=0.8, b=0.7, c=0.2), samples, QUALITY_ONLY)
    assert found.iloc[0].to_list() == everyone.iloc[0].to_list()
    assert found.iloc[1, :2].to_list() == [1.0, 0.0]


def test_the_interval_holds_95_percent_of_the_draws():
    scores = pd.DataFrame({"a": np.linspace(0, 1, 1001)})
    assert intervals(scores)["a"] == pytest.approx((0.025, 0.975))


@pytest.mark.parametrize("counts", [(10, 20), (0, 0)])
def test_draws_that_do_not_belong_together_are_refused(counts):
    samples = {name: {"quality": np.ones(count)} for name, count in zip(("fp16", "awq"), counts, strict=True)}
    with pytest.raises(ValueError, match="numbers of draws"):
        noise_of(raw(fp16=0.8, awq=0.8), samples)


def normalized(**rows: list[float]) -> pd.DataFrame:
    return pd.DataFrame.from_dict(rows, orient="index", columns=["quality", "latency", "throughput", "memory"])


def test_a_choice_that_hangs_on_the_weights_shows():
    clear = normalized(awq=[1, 1, 1, 1], fp16=[1, 0, 0, 0])
    assert shares_near(clear, SHARES)["awq"] == shares_anywhere(clear)["awq"] == 1
    # Wins where quality has more than half of the weight: a coin's toss near 0.5, (1/2)³ over all weightings.
    narrow = normalized(fp16=[1, 0, 0, 0], awq=[0, 1, 1, 1])
    assert shares_near(narrow, SHARES)["fp16"] == pytest.approx(0.5, abs=0.05)
    assert shares_anywhere(narrow)["fp16"] == pytest.approx(1 / 8, abs=0.02)
    assert shares_near(narrow, SHARES) == shares_near(narrow, SHARES)


def test_a_weight_of_zero_stays_zero_in_the_weightings_nearby():
    only_latency_differs = normalized(fp16=[1, 0, 1, 1], awq=[1, 1, 1, 1])
    ignored = {"quality": 0.4, "latency": 0.0, "throughput": 0.5, "memory": 0.1}
    assert shares_near(only_latency_differs, ignored) == {"fp16": 0.5, "awq": 0.5}
    assert shares_anywhere(only_latency_differs)["awq"] == 1
