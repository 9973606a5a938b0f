from __future__ import annotations

import math

import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scoring.metrics import METRICS
from scoring.profile import DEFAULT, Weights
from scoring.score import measurable, normalize, rank

SHARES = DEFAULT.shares()

# As far apart as real figures are: a few ms to hours, one token/s to millions, bytes to terabytes.
metric = st.floats(min_value=1e-3, max_value=1e12, allow_nan=False)
variant = st.fixed_dictionaries({"quality": st.floats(0, 1), "latency": metric, "throughput": metric, "memory": metric})
variants = st.dictionaries(st.sampled_from(["fp16", "awq", "gptq", "fp8", "int8"]), variant, min_size=1, max_size=5)
weights = st.lists(st.floats(0, 100), min_size=4, max_size=4).filter(lambda each: sum(each) > 1e-3)


def frame(rows: dict[str, dict[str, float]]) -> pd.DataFrame:
    return pd.DataFrame.from_dict(rows, orient="index")


def shares_of(numbers: list[float]) -> dict[str, float]:
    return Weights(**dict(zip(METRICS, numbers, strict=True))).shares()


def row(quality: float = 0.5, latency: float = 10, throughput: float = 100, memory: float = 1000) -> dict[str, float]:
    return {"quality": quality, "latency": latency, "throughput": throughput, "memory": memory}


@given(variants, weights)
def test_scores_and_normalized_metrics_stay_between_zero_and_one(rows, numbers):
    ranking = rank(frame(rows), shares_of(numbers))
    assert len(ranking) == len(rows)
    assert ranking.ge(0).all(axis=None)
    assert ranking.le(1).all(axis=None)


@given(variants, weights, st.randoms(use_true_random=False))
def test_the_order_of_input_does_not_matter(rows, numbers, chance):
    names = list(rows)
    chance.shuffle(names)
    shuffled = {name: rows[name] for name in names}
    assert list(rank(frame(rows), shares_of(numbers)).index) == list(rank(frame(shuffled), shares_of(numbers)).index)


@given(variants, weights, st.sampled_from(sorted(METRICS)), st.sampled_from([2.0**-20, 2.0**-10, 2.0**10, 2.0**20]))
def test_the_choice_of_units_does_not_matter(rows, numbers, name, factor):
    # Powers of two scale a float exactly, so that any difference would be ours.
    other = {variant: {**each, name: each[name] * factor} for variant, each in rows.items()}
    assert all(math.isfinite(each[name]) for each in other.values())
    assume(all(each[name] > 0 or rows[variant][name] == 0 for variant, each in other.items()))
    assert normalize(frame(other)).equals(normalize(frame(rows)))


@given(variants, weights)
def test_a_variant_that_is_better_in_everything_never_loses(rows, numbers):
    best = {
        name: (max if metric.higher_is_better else min)(each[name] for each in rows.values())
        for name, metric in METRICS.items()
    }
    rows = {**rows, "best": best}
    ranking = rank(frame(rows), shares_of(numbers))
    assert ranking.loc["best", "score"] == ranking["score"].max()


def test_the_default_weights_decide_as_documented():
    rows = {"fp16": row(0.80, 10, 100, 1000), "awq": row(0.78, 8, 120, 400), "gptq": row(0.70, 9, 110, 400)}
    ranking = rank(frame(rows), SHARES)
    # Weighted by 50/20/20/10: fp16 has quality alone; awq 0.8 of quality's span and all of the rest.
    assert ranking["score"].to_dict() == pytest.approx({"awq": 0.9, "fp16": 0.5, "gptq": 0.3})
    assert list(ranking.index) == ["awq", "fp16", "gptq"]


def test_a_metric_without_differences_decides_nothing():
    rows = {"fp16": row(quality=0.5, memory=1000), "awq": row(quality=0.5, memory=400)}
    assert normalize(frame(rows))["quality"].to_list() == [1.0, 1.0]
    assert rank(frame(rows), SHARES).index[0] == "awq"


def test_one_variant_scores_one():
    assert rank(frame({"fp16": row()}), SHARES)["score"].to_dict() == {"fp16": 1.0}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, None])
@pytest.mark.parametrize("name", sorted(METRICS))
def test_a_variant_with_a_metric_that_is_no_measurement_is_out(name, value):
    rows = {"fp16": row(), "awq": {**row(), name: value}}
    assert measurable(frame(rows)).to_dict() == {"fp16": True, "awq": False}
    assert list(rank(frame(rows), SHARES).index) == ["fp16"]


def test_a_missing_metric_is_no_measurement():
    raw = frame({"fp16": row()}).drop(columns="latency")
    assert rank(raw, SHARES).empty


def test_an_unmeasured_variant_does_not_stretch_the_scale_of_the_others():
    rows = {"fp16": row(latency=10), "awq": row(latency=20)}
    broken = {**rows, "gptq": {**row(latency=1e9), "quality": float("nan")}}
    assert normalize(frame(broken)).equals(normalize(frame(rows)))


def test_a_tie_goes_to_quality_then_memory_then_name():
    only_latency = Weights(quality=0, latency=1, throughput=0, memory=0).shares()
    rows = {"c": row(quality=0.5, memory=1), "b": row(quality=0.9, memory=9), "a": row(quality=0.9, memory=2)}
    assert list(rank(frame(rows), only_latency).index) == ["a", "b", "c"]
    same = {"z": row(), "y": row()}
    assert list(rank(frame(same), SHARES).index) == ["y", "z"]


def test_a_metric_that_is_zero_for_all_decides_nothing():
    rows = {"fp16": row(quality=0, memory=5), "awq": row(quality=0, memory=4)}
    assert rank(frame(rows), SHARES).index[0] == "awq"
