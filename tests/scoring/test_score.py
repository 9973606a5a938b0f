from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoring.metrics import METRICS
from scoring.profile import DEFAULT, Weights
from scoring.score import rank

SHARES = DEFAULT.shares()

metric = st.floats(min_value=1e-3, max_value=1e12, allow_nan=False)
variant = st.fixed_dictionaries({"quality": st.floats(0, 1), "latency": metric, "throughput": metric, "memory": metric})
variants = st.dictionaries(st.sampled_from(["fp16", "awq", "gptq", "fp8", "int8"]), variant, min_size=1, max_size=5)
weights = st.lists(st.floats(0, 100), min_size=4, max_size=4).filter(lambda each: sum(each) > 1e-3)
methods = st.sampled_from(["min-max", "relative"])
noises = st.fixed_dictionaries({}, optional={"quality": st.floats(0, 1)} | dict.fromkeys(["latency", "memory"], metric))


def frame(rows: dict[str, dict[str, float]]) -> pd.DataFrame:
    return pd.DataFrame.from_dict(rows, orient="index")


def shares_of(numbers: list[float]) -> dict[str, float]:
    return Weights(**dict(zip(METRICS, numbers, strict=True))).shares()


def row(quality: float = 0.5, latency: float = 10, throughput: float = 100, memory: float = 1000) -> dict[str, float]:
    return {"quality": quality, "latency": latency, "throughput": throughput, "memory": memory}


@given(variants, weights, methods, noises)
def test_scores_stay_between_zero_and_one(rows, numbers, method, noise):
    ranking = rank(frame(rows), shares_of(numbers), method, noise)
    assert len(ranking) == len(rows)
    assert ranking["score"].between(0, 1).all()


@given(variants, weights, methods, noises, st.randoms(use_true_random=False))
def test_the_order_of_input_does_not_matter(rows, numbers, method, noise, chance):
    names = list(rows)
    chance.shuffle(names)
    shuffled = {name: rows[name] for name in names}
    first, second = (rank(frame(each), shares_of(numbers), method, noise) for each in (rows, shuffled))
    assert first.equals(second)


@given(variants, weights, methods, noises, variant, st.data())
def test_a_variant_that_is_better_in_everything_never_loses(rows, numbers, method, noise, other, data):
    # Better than one other, not than all: the order of any two must hold.
    rival = data.draw(st.sampled_from(sorted(rows)))
    rows["better"] = {
        name: (max if metric.higher_is_better else min)(rows[rival][name], other[name])
        for name, metric in METRICS.items()
    }
    ranking = list(rank(frame(rows), shares_of(numbers), method, noise).index)
    same = rows["better"] == rows[rival]
    assert ranking.index("better") < ranking.index(rival) or (same and rival < "better")


def test_the_default_weights_decide_as_documented():
    rows = {"fp16": row(0.80, 10, 100, 1000), "awq": row(0.78, 8, 120, 400), "gptq": row(0.70, 9, 110, 400)}
    ranking = rank(frame(rows), SHARES)
    # Weighted by 50/20/20/10: fp16 has quality alone; awq 0.8 of quality's span and all of the rest.
    assert ranking["score"].to_dict() == pytest.approx({"awq": 0.9, "fp16": 0.5, "gptq": 0.3})
    assert list(ranking.index) == ["awq", "fp16", "gptq"]


def test_a_metric_without_differences_decides_nothing():
    rows = {"fp16": row(quality=0.5, memory=1000), "awq": row(quality=0.5, memory=400)}
    assert rank(frame(rows), SHARES).index[0] == "awq"


def test_noise_decides_nothing():
    rows = {"fp16": row(quality=0.80, memory=1000), "awq": row(quality=0.79, memory=400)}
    assert rank(frame(rows), SHARES).index[0] == "fp16"
    assert rank(frame(rows), SHARES, noise={"quality": 0.02}).index[0] == "awq"


def test_one_variant_scores_one():
    assert rank(frame({"fp16": row()}), SHARES)["score"].to_dict() == {"fp16": 1.0}


def test_a_missing_metric_counts_as_not_measured():
    raw = frame({"fp16": row()}).drop(columns="latency")
    assert rank(raw, SHARES).empty


def test_a_tie_goes_to_quality_then_memory_then_name():
    only_latency = Weights(quality=0, latency=1, throughput=0, memory=0).shares()
    rows = {"c": row(quality=0.5, memory=1), "b": row(quality=0.9, memory=9), "a": row(quality=0.9, memory=2)}
    assert list(rank(frame(rows), only_latency).index) == ["a", "b", "c"]
    same = {"z": row(), "y": row()}
    assert list(rank(frame(same), SHARES).index) == ["y", "z"]
