from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from scoring.decide import contenders_of, decide, with_twins
from scoring.draws import Items, Round, allowing_for_few, load_draws, quality_draws
from scoring.metrics import METRICS
from scoring.profile import Profile

NAMES = ["fp16", "awq", "gptq"]
FEW_DRAWS = 400
FACTORS = [2.0**-10, 2.0**20, 1e-3, 1 / 60, 7.0, 1.609344]

metric = st.floats(min_value=1, max_value=1e6)
variant = st.fixed_dictionaries({"quality": st.floats(0, 1), "latency": metric, "throughput": metric, "memory": metric})
variants = st.dictionaries(st.sampled_from(NAMES), variant, min_size=1, max_size=3)
weights = st.fixed_dictionaries(dict.fromkeys(METRICS, st.floats(0.01, 100)))
methods = st.sampled_from(["min-max", "relative"])
spreads = st.floats(0, 0.5)
quick = settings(max_examples=40)


def frame(rows: dict[str, dict[str, float]]) -> pd.DataFrame:
    return pd.DataFrame.from_dict(rows, orient="index")


def row(quality: float = 0.8, latency: float = 10, throughput: float = 100, memory: float = 1e9) -> dict[str, float]:
    return {"quality": quality, "latency": latency, "throughput": throughput, "memory": memory}


def profile(**fields: Any) -> Profile:
    return Profile.model_validate({"name": "mine"} | fields)


def only(name: str) -> dict[str, float]:
    return dict.fromkeys(METRICS, 0.0) | {name: 1.0}


def is_power_of_two(factor: float) -> bool:
    return math.frexp(factor)[0] == 0.5


def noisy(rows: dict[str, dict[str, float]], spread: float) -> dict[str, dict[str, np.ndarray]]:
    """Draws with a standard deviation of *spread* times the value, independent of one another; memory is exact."""
    return {
        variant: {
            name: np.random.default_rng([*f"{variant} {name}".encode()]).gamma(spread**-2, each * spread**2, FEW_DRAWS)
            if spread > 0.001 and each > 1e-9
            else np.full(FEW_DRAWS, each)
            for name, each in values.items()
            if name != "memory"
        }
        for variant, values in rows.items()
    }


@quick
@given(variants, weights, methods, spreads, variant, st.data())
def test_a_variant_that_is_better_in_everything_never_loses(rows, wanted, method, spread, other, data):
    rival = data.draw(st.sampled_from(sorted(rows)))
    rows["better"] = {
        name: (max if each.higher_is_better else min)(rows[rival][name], other[name]) for name, each in METRICS.items()
    }
    found = decide(frame(rows), profile(weights=wanted, normalization=method), noisy(rows, spread))
    assert found.winner != rival or rows["better"] == rows[rival]


@quick
@given(variants, weights, methods, spreads, st.randoms(use_true_random=False))
def test_the_order_of_input_does_not_matter(rows, wanted, method, spread, chance):
    names = list(rows)
    chance.shuffle(names)
    mine = profile(weights=wanted, normalization=method)
    first = decide(frame(rows), mine, noisy(rows, spread))
    shuffled = {name: rows[name] for name in names}
    second = decide(frame(shuffled), mine, noisy(shuffled, spread))
    assert first.verdict == second.verdict
    assert first.ranking.equals(second.ranking)
    assert first.win_probability == second.win_probability


@quick
@given(variants, weights, methods, spreads, st.sampled_from(sorted(METRICS)), st.sampled_from(FACTORS))
def test_the_choice_of_units_does_not_matter(rows, wanted, method, spread, name, factor):
    mine = profile(weights=wanted, normalization=method)
    if not is_power_of_two(factor):
        # A difference in the last digits is not the same in other units.
        values = sorted(each[name] for each in rows.values())
        assume(all(a == b or b - a > 1e-6 * b for a, b in pairwise(values)))
    samples = noisy(rows, spread)
    first = decide(frame(rows), mine, samples)
    other = {each: {**values, name: values[name] * factor} for each, values in rows.items()}
    scaled = {
        each: {**values, **({name: values[name] * factor} if name in values else {})}
        for each, values in samples.items()
    }
    second = decide(frame(other), mine, scaled)
    few = 0.0 if is_power_of_two(factor) else 2 / FEW_DRAWS
    assert first.win_probability == pytest.approx(second.win_probability, abs=few)
    # What is on the very edge of the confidence may fall either way by its last digit.
    if not few or all(abs(each - mine.decision.confidence) > 2 * few for each in first.win_probability.values()):
        assert first.winner == second.winner


@quick
@given(variants, weights, methods, spreads)
def test_probabilities_and_intervals_are_what_they_are_called(rows, wanted, method, spread):
    found = decide(frame(rows), profile(weights=wanted, normalization=method), noisy(rows, spread))
    for shares in (found.win_probability, found.near_weights, found.any_weights):
        assert set(shares) == set(rows)
        assert sum(shares.values()) == pytest.approx(1)
    assert all(0 <= low <= high <= 1 for low, high in found.score_interval.values())
    assert not found.separated or (found.winner and found.win_probability[found.winner] >= 0.9)
    assert ("the evidence does not separate them" in found.verdict) == (not found.separated)
    if found.margin:
        assert found.margin.low <= found.margin.value <= found.margin.high
        assert found.margin.over in set(rows) - {found.winner}


@quick
@given(variants, weights, methods, spreads)
def test_identical_twins_are_never_separated(rows, wanted, method, spread):
    name = sorted(rows)[0]
    rows["twin"] = rows[name]
    found = decide(frame(rows), profile(weights=wanted, normalization=method), noisy(rows, spread))
    if found.winner in (name, "twin"):
        assert not found.separated
        listed, _, rest = found.verdict.partition(" could each score highest: the evidence does not separate them")
        assert rest
        assert {f"{each} (" in listed for each in (name, "twin")} == {True}


@quick
@given(variants, weights, methods, spreads, st.floats(0.5, 2))
def test_a_variant_that_violates_a_constraint_never_wins(rows, wanted, method, spread, limit):
    limit = limit * np.median([each["latency"] for each in rows.values()])
    mine = profile(weights=wanted, normalization=method, constraints={"e2el_p95_ms": {"max": limit}})
    found = decide(frame(rows), mine, noisy(rows, spread))
    slow = {name for name, each in rows.items() if each["latency"] > limit}
    assert set(found.excluded) == slow
    assert found.winner not in slow
    assert (found.winner is None) == (len(slow) == len(rows))


@quick
@given(variants, methods, st.floats(0.01, 0.05))
def test_a_variant_that_is_far_worse_never_wins_on_quality_alone(rows, method, spread):
    rows["good"] = row(quality=1.0)
    rows["bad"] = row(quality=0.5, latency=1, throughput=1e6, memory=1)
    # Ten standard deviations of the difference, also where the others' are the larger.
    samples = noisy(rows, spread)
    found = decide(frame(rows), profile(weights=only("quality"), normalization=method), samples)
    assert found.winner != "bad"
    assert found.win_probability["bad"] < 0.01


def measured_twice(seed: int, *, turns: bool) -> tuple[dict[str, dict[str, np.ndarray]], pd.DataFrame]:
    """Two evaluations of the same variant: taking turns on a machine whose speed changes, or one after the other."""
    chance = np.random.default_rng(seed)
    own = {name: chance.normal(500, 20 if turns else 60, 4) for name in ("one", "two")}
    machine = np.exp(chance.normal(0, 0.25, 4)) if turns else np.ones(4)
    rounds = {
        name: [Round(chance.gamma(20, 50, 128) * 500 / speed, speed) for speed in each * machine]
        for name, each in own.items()
    }
    right = (chance.random(300) < 0.7).astype(float)
    quality = quality_draws({name: {"arc": Items(right)} for name in rounds}, draws=FEW_DRAWS)
    drawn = allowing_for_few(load_draws(rounds, paired=turns, draws=FEW_DRAWS), rounds, paired=turns)
    figures = {
        name: row(
            quality=right.mean(),
            latency=float(np.percentile(np.concatenate([one.latencies_ms for one in each]), 95)),
            throughput=float(np.mean([one.output_tokens_per_s for one in each])),
        )
        for name, each in rounds.items()
    }
    return {name: each | quality[name] for name, each in drawn.items()}, frame(figures)


@pytest.mark.parametrize("turns", [True, False])
@pytest.mark.parametrize("method", ["min-max", "relative"])
def test_two_measurements_of_one_variant_are_not_separated(method, turns):
    separated = 0
    for seed in range(40):
        samples, raw = measured_twice(seed, turns=turns)
        separated += decide(raw, profile(normalization=method), samples).separated
        same = decide(raw, profile(normalization=method), samples, digests={"one": "d", "two": "d"})
        assert not same.separated
        assert "the evidence does not separate them" in same.verdict
    # Nobody knows here that they are the same. By their measurements alone, chance separates few.
    assert separated <= 3


def test_a_difference_beyond_noise_is_separated():
    rows = {"fp16": row(), "awq": row(throughput=150, latency=7)}
    found = decide(frame(rows), profile(), noisy(rows, 0.02))
    assert (found.winner, found.separated) == ("awq", True)
    assert found.win_probability["awq"] > 0.99
    assert "not measured" not in found.verdict


def test_without_separation_the_higher_quality_is_preferred():
    rows = {"fp16": row(quality=0.80, throughput=100), "awq": row(quality=0.70, throughput=116)}
    samples = noisy(rows, 0.04)
    for name in rows:
        samples[name]["quality"] = np.full(FEW_DRAWS, rows[name]["quality"])
    wanted = only("throughput") | {"quality": 0.1}
    found = decide(frame(rows), profile(weights=wanted), samples)
    assert found.eligible == ("awq", "fp16")
    assert (found.winner, found.separated) == ("fp16", False)
    assert found.verdict.endswith(
        "fp16 is preferred: its quality is higher, beyond noise, than that of every variant ranked before it."
    )


def test_quality_within_noise_excludes_no_variant():
    rows = {"fp16": row(quality=0.801, latency=9.5), "awq": row(quality=0.800, memory=0.5e9)}
    wanted = only("latency") | {"memory": 0.01}
    found = decide(frame(rows), profile(weights=wanted), noisy(rows, 0.03))
    assert found.verdict.startswith("awq (")
    assert " and fp16 (" in found.verdict
    assert found.winner == "awq"


def test_variants_that_speed_does_not_separate_are_chosen_by_quality_and_memory():
    faster = {"awq": row(quality=0.800, memory=1e9), "gptq": row(quality=0.801, memory=1e9, latency=9.8)}
    slower = {"awq": row(quality=0.800, memory=1e9, latency=9.8), "gptq": row(quality=0.801, memory=1e9)}
    found = [decide(frame(rows), profile(weights=only("latency")), noisy(rows, 0.03)) for rows in (faster, slower)]
    assert [each.ranking["score"].to_list() for each in found] == [[1.0, 1.0], [1.0, 1.0]]
    assert [(each.winner, each.separated) for each in found] == [("gptq", False), ("gptq", False)]
    assert all("the evidence does not separate them. gptq is preferred" in each.verdict for each in found)


def test_a_profile_that_asks_for_more_confidence_is_harder_to_satisfy():
    rows = {"fp16": row(), "awq": row(throughput=126)}
    samples = noisy(rows, 0.05)
    asked = {
        each: decide(frame(rows), profile(weights=only("throughput"), decision={"confidence": each}), samples)
        for each in (0.6, 0.999)
    }
    assert asked[0.6].separated
    assert not asked[0.999].separated


def test_without_draws_a_lead_is_taken_at_face_value_and_the_verdict_says_so():
    found = decide(frame({"fp16": row(), "awq": row(throughput=101)}), profile())
    assert (found.winner, found.separated) == ("awq", True)
    assert "The noise of quality, latency and throughput was not measured" in found.verdict


def test_equal_variants_without_draws_are_not_separated_and_ties_go_by_name():
    found = decide(frame({"b": row(), "a": row()}), profile())
    assert (found.winner, found.separated) == ("a", False)
    assert found.verdict.startswith("a (50%) and b (50%) could each score highest")


def test_one_variant_is_the_choice():
    found = decide(frame({"awq": row()}), profile(), noisy({"awq": row()}, 0.1))
    assert (found.winner, found.separated, found.win_probability) == ("awq", True, {"awq": 1.0})
    assert found.verdict == "awq is the only variant that can be chosen."


@pytest.mark.parametrize("method", ["min-max", "relative"])
def test_there_is_no_winner_if_all_variants_are_excluded(method):
    rows = {"fp16": row(quality=float("nan")), "awq": row(latency=900)}
    found = decide(frame(rows), profile(normalization=method, constraints={"e2el_p95_ms": {"max": 500}}))
    assert (found.winner, found.separated, found.eligible) == (None, False, ())
    assert found.excluded == {
        "awq": ("e2el_p95_ms 900 is above the maximum of 500",),
        "fp16": ("quality was not measured",),
    }
    assert "900 is above" in found.verdict
    assert decide(frame({"fp16": row()}).iloc[:0], profile(normalization=method)).winner is None


def test_every_reason_is_given():
    mine = profile(constraints={"quality_recovery": {"min": 0.95}, "ttft_p95_ms": {"max": 500}})
    rows = {"fp16": row(), "awq": row(quality=0.6, throughput=float("nan"))}
    values: dict[str, dict[str, float | None]] = {"fp16": {"ttft_p95_ms": 100.0}, "awq": {"ttft_p95_ms": None}}
    found = decide(frame(rows), mine, constraint_values=values)
    assert found.winner == "fp16"
    assert [each.split()[0] for each in found.excluded["awq"]] == ["throughput", "quality_recovery", "ttft_p95_ms"]


def within(limit: float = 97.5) -> Profile:
    return profile(constraints={"e2el_p95_ms": {"max": limit}})


def around(value: float, deviation: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(value, deviation, FEW_DRAWS)


def test_the_only_choice_is_not_sure_where_its_noise_reaches_across_a_limit():
    rows = {"awq": row(latency=97), "gptq": row(latency=900)}
    latency = around(97, 0.5)
    found = decide(frame(rows), within(), {"awq": {"latency": latency}})
    assert (found.winner, found.separated) == ("awq", False)
    assert found.win_probability["awq"] == pytest.approx((latency <= 97.5).mean())
    assert 0.8 < found.win_probability["awq"] < 0.9
    assert "with a probability of 8" in found.verdict
    assert found.verdict.endswith(
        "of being chosen again: the evidence does not show which variants meet the constraints."
    )
    (note,) = found.near_limits
    assert note.startswith("awq meets the maximum of 97.5 for e2el_p95_ms with 97, but its 95 % interval of 96.")
    assert note.endswith("crosses the limit.")


def test_a_variant_excluded_by_less_than_its_noise_may_win_draws():
    rows = {"fp16": row(latency=90), "awq": row(latency=98, throughput=300, memory=0.3e9)}
    mine = within().model_copy(update={"weights": profile(weights=only("throughput")).weights})
    latency = around(98, 1.0)
    samples = {"fp16": {"latency": around(90, 0.1, 1)}, "awq": {"latency": latency}}
    found = decide(frame(rows), mine, samples)
    assert (found.winner, found.separated) == ("fp16", False)
    assert found.win_probability == {"fp16": pytest.approx((latency > 97.5).mean())}
    assert found.near_limits[0].startswith("awq violates the maximum of 97.5 for e2el_p95_ms with 98, but its 95 %")
    far = decide(
        frame(rows | {"awq": rows["awq"] | {"latency": 198}}), mine, samples | {"awq": {"latency": latency + 100}}
    )
    assert (far.winner, far.separated, far.near_limits) == ("fp16", True, ())
    assert far.win_probability == {"fp16": 1.0}


def test_a_draw_in_which_no_variant_meets_the_constraints_has_no_winner():
    rows = {"fp16": row(latency=97), "awq": row(latency=97, throughput=200)}
    latency = around(97, 0.5)
    found = decide(frame(rows), within(), {name: {"latency": latency} for name in rows})
    kept = float((latency <= 97.5).mean())
    assert found.win_probability == pytest.approx({"awq": kept, "fp16": 0.0})
    assert (found.winner, found.separated) == ("awq", False)
    assert found.verdict.startswith("awq has the highest score, with a probability of 8")
    assert "the evidence does not show which variants meet the constraints." in found.verdict


def test_common_variation_does_not_affect_the_recovery():
    rows = {"fp16": row(quality=0.8), "awq": row(quality=0.768, throughput=300, latency=5)}
    whole = around(0.8, 0.04)
    mine = profile(weights=only("throughput"), constraints={"quality_recovery": {"min": 0.95}})
    found = decide(frame(rows), mine, {"fp16": {"quality": whole}, "awq": {"quality": 0.96 * whole}})
    assert (found.near_limits, sum(found.win_probability.values())) == ((), pytest.approx(1))
    apart = decide(frame(rows), mine, {"fp16": {"quality": whole}, "awq": {"quality": 0.96 * around(0.8, 0.04, 1)}})
    assert apart.near_limits[0].startswith("awq meets the minimum of 0.95 for quality_recovery with 0.96, but")


def test_whatever_is_limited_can_have_draws():
    values = {"awq": {"ttft_p95_ms": 480.0}}
    mine = profile(constraints={"ttft_p95_ms": {"max": 500}})
    ttft = around(480, 20)
    sure = decide(frame({"awq": row()}), mine, {}, values)
    unsure = decide(
        frame({"awq": row()}), mine, {"awq": {"latency": np.full(FEW_DRAWS, 10.0), "ttft_p95_ms": ttft}}, values
    )
    assert (sure.separated, sure.near_limits) == (True, ())
    assert unsure.win_probability["awq"] == pytest.approx((ttft <= 500).mean())
    assert "ttft_p95_ms with 480" in unsure.near_limits[0]


def test_fp16_without_a_metric_still_tells_the_recovery_of_the_others():
    rows = {"fp16": row(throughput=float("nan")), "awq": row(quality=0.79)}
    found = decide(frame(rows), profile(constraints={"quality_recovery": {"min": 0.95}}), noisy(rows, 0.001))
    assert (found.winner, found.separated) == ("awq", True)


@pytest.mark.parametrize("method", ["min-max", "relative"])
def test_an_incomparable_metric_does_not_count(method):
    rows = {"fp16": row(quality=0.81), "awq": row(quality=0.80, latency=1, throughput=1e5)}
    asked = profile(normalization=method, weights={"quality": 0.3, "latency": 0.4, "throughput": 0.2, "memory": 0.1})
    samples = noisy(rows, 0.001)
    assert decide(frame(rows), asked, samples).winner == "awq"
    found = decide(frame(rows), asked, samples, incomparable=("latency", "throughput"))
    assert (found.winner, found.separated) == ("fp16", True)
    assert set(found.noise) == {"quality", "memory"}
    latency = found.ranking["latency"]
    assert latency["fp16"] == latency["awq"]


def test_the_margin_is_the_difference_of_the_scores():
    rows = {"fp16": row(), "awq": row(throughput=150, latency=7), "gptq": row(throughput=140)}
    found = decide(frame(rows), profile(), noisy(rows, 0.02))
    scores = found.ranking["score"]
    assert found.margin is not None
    assert (found.margin.over, found.margin.value) == ("gptq", pytest.approx(scores["awq"] - scores["gptq"]))
    assert 0 < found.margin.low < found.margin.value < found.margin.high
    assert decide(frame({"fp16": row()}), profile()).margin is None


def test_a_winner_that_ranks_behind_has_a_margin_below_zero():
    rows = {"fp16": row(quality=0.80, throughput=100), "awq": row(quality=0.70, throughput=116)}
    samples = noisy(rows, 0.04)
    for name in rows:
        samples[name]["quality"] = np.full(FEW_DRAWS, rows[name]["quality"])
    found = decide(frame(rows), profile(weights=only("throughput") | {"quality": 0.1}), samples)
    assert found.winner == "fp16"
    assert found.margin is not None
    assert found.margin.over == "awq"
    assert found.margin.low < found.margin.value < 0


def test_a_constraint_on_an_unmeasured_value_excludes_every_variant():
    found = decide(frame({"fp16": row(), "awq": row()}), profile(constraints={"kl_divergence": {"max": 0.1}}))
    assert found.winner is None


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
def test_invalid_draws_exclude_their_variant(wrong):
    rows = {"fp16": row(), "awq": row(throughput=200)}
    samples = noisy(rows, 0.01)
    samples["awq"]["latency"][7] = wrong
    found = decide(frame(rows), profile(), samples)
    assert found.winner == "fp16"
    assert found.excluded["awq"] == ("latency has draws that are negative or not finite",)


def test_an_excluded_variant_does_not_affect_the_scale_of_the_others():
    rows = {"fp16": row(), "awq": row(throughput=120, quality=0.79)}
    limited = profile(constraints={"e2el_p95_ms": {"max": 500}})
    alone = decide(frame(rows), limited)
    beside = decide(frame({**rows, "gptq": row(latency=501, throughput=1e6, quality=0.01)}), limited)
    assert beside.ranking.equals(alone.ranking)


def test_fp16_stays_the_reference_where_it_can_not_be_chosen():
    rows = {"fp16": row(memory=30 * 2**30), "awq": row(memory=8 * 2**30, throughput=130), "gptq": row(memory=8 * 2**30)}
    mine = profile(normalization="relative", constraints={"memory_gib": {"max": 20}})
    found = decide(frame(rows), mine, noisy(rows, 0.01))
    assert found.excluded == {"fp16": ("memory_gib 30 is above the maximum of 20",)}
    assert set(found.win_probability) == {"awq", "gptq"}
    assert found.winner == "awq"
    assert found.ranking.loc["gptq", "quality"] == pytest.approx(0.5)


def test_without_fp16_relative_relates_to_the_highest_quality():
    rows = {"awq": row(quality=0.8), "gptq": row(quality=0.7)}
    found = decide(frame(rows), profile(normalization="relative"))
    assert list(found.ranking.loc["awq", list(METRICS)]) == [0.5] * 4
    recovery = profile(constraints={"quality_recovery": {"min": 0.5}})
    assert decide(frame(rows), recovery).winner is None


def test_a_choice_that_hangs_on_the_weights_says_so():
    rows = {"fp16": row(quality=0.9), "awq": row(quality=0.8, latency=5, throughput=200, memory=0.3e9)}
    wanted = {"quality": 0.51, "latency": 0.2, "throughput": 0.2, "memory": 0.09}
    found = decide(frame(rows), profile(weights=wanted), noisy(rows, 0.001))
    assert (found.winner, found.separated) == ("fp16", True)
    assert found.near_weights["fp16"] < 0.7
    assert "depends on the weights" in found.verdict


@pytest.mark.parametrize(
    ("digests", "expected"),
    [
        ({"a": "1", "b": "2", "c": "3"}, ("a",)),
        ({"a": "1", "b": "1", "c": "3"}, ("a", "b")),
        ({"a": "1", "b": "2", "c": "1"}, ("a", "b", "c")),
        ({"b": "1", "c": "1"}, ("a",)),
        ({}, ("a",)),
    ],
)
def test_variants_that_are_identical_file_by_file_are_never_separated(digests, expected):
    assert with_twins(("a",), ["a", "b", "c"], digests) == expected


@pytest.mark.parametrize(
    ("chances", "expected"),
    [
        ({"a": 0.9, "b": 0.1}, ("a",)),
        ({"a": 0.8, "b": 0.15, "c": 0.05}, ("a", "b")),
        ({"a": 0.5, "b": 0.25, "c": 0.25}, ("a", "b", "c")),
        ({"a": 0.88, "b": 0.06, "c": 0.06}, ("a", "b", "c")),
        ({"a": 0.3, "b": 0.02, "c": 0.68}, ("a", "b", "c")),
        ({"a": 0.05, "b": 0.95}, ("a", "b")),
        ({"a": 1.0}, ("a",)),
        ({"a": 0.6, "b": 0.0}, ("a",)),
        ({"a": 0.3, "b": 0.3, "c": 0.0}, ("a", "b")),
        ({"a": 0.0, "b": 0.0}, ("a",)),
    ],
)
def test_contenders_are_the_likeliest_that_hold_the_confidence_together(chances, expected):
    assert contenders_of(chances, 0.9) == expected
