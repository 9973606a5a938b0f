from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scoring.metrics import METRICS
from scoring.normalize import measurable, normalize, reference_of

METHODS = ["min-max", "relative"]
POWERS_OF_TWO = [2.0**-20, 2.0**-10, 2.0**10, 2.0**20]

# As far apart as real figures are: a few ms to hours, one token/s to millions, bytes to terabytes.
metric = st.floats(min_value=1e-3, max_value=1e12, allow_nan=False)
variant = st.fixed_dictionaries({"quality": st.floats(0, 1), "latency": metric, "throughput": metric, "memory": metric})
variants = st.dictionaries(st.sampled_from(["fp16", "awq", "gptq", "fp8", "int8"]), variant, min_size=1, max_size=5)
noises = st.fixed_dictionaries({}, optional={"quality": st.floats(0, 1)} | dict.fromkeys(["latency", "memory"], metric))
methods = st.sampled_from(METHODS)


def frame(rows: dict[str, dict[str, float]]) -> pd.DataFrame:
    return pd.DataFrame.from_dict(rows, orient="index")


def row(quality: float = 0.5, latency: float = 10, throughput: float = 100, memory: float = 1000) -> dict[str, float]:
    return {"quality": quality, "latency": latency, "throughput": throughput, "memory": memory}


@given(variants, methods, noises)
def test_normalized_metrics_stay_between_zero_and_one(rows, method, noise):
    found = normalize(frame(rows), method, noise)
    assert set(found.index) == set(rows)
    assert found.ge(0).all(axis=None)
    assert found.le(1).all(axis=None)


@given(variants, methods, noises, st.sampled_from(sorted(METRICS)), st.sampled_from(POWERS_OF_TWO))
def test_the_choice_of_units_does_not_matter(rows, method, noise, name, factor):
    # Powers of two scale a float exactly, so that any difference would be ours.
    other = {variant: {**each, name: each[name] * factor} for variant, each in rows.items()}
    assume(all(each[name] > 0 or rows[variant][name] == 0 for variant, each in other.items()))
    scaled = {**noise, name: noise[name] * factor} if name in noise else noise
    assert normalize(frame(other), method, scaled).equals(normalize(frame(rows), method, noise))


@given(variants, methods, noises, st.sampled_from(sorted(METRICS)))
def test_a_better_value_is_never_worth_less(rows, method, noise, name):
    best_first = sorted(rows, key=lambda each: rows[each][name], reverse=METRICS[name].higher_is_better)
    worth = normalize(frame(rows), method, noise)[name]
    assert [worth[each] for each in best_first] == sorted(worth, reverse=True)


@pytest.mark.parametrize(("method", "level"), [("min-max", 1.0), ("relative", 0.5)])
@pytest.mark.parametrize("name", sorted(METRICS))
def test_differences_within_noise_give_everyone_the_same(method, level, name):
    rows = {"fp16": row(), "awq": row(), "gptq": row()}
    rows["awq"][name] *= 1.05
    rows["gptq"][name] *= 0.95
    noise = {name: 0.11 * row()[name]}
    assert normalize(frame(rows), method, noise)[name].to_list() == [level] * 3
    assert normalize(frame(rows), method)[name].nunique() == 3


def test_a_difference_fades_into_the_noise_without_a_jump():
    rows = {"fp16": row(quality=0.8), "awq": row(quality=0.7)}
    worth = [normalize(frame(rows), noise={"quality": noise})["quality"]["awq"] for noise in (0, 0.05, 0.0999, 0.11)]
    assert worth == pytest.approx([0, 0.5, 0.999, 1])


def test_a_variant_within_noise_of_the_best_counts_as_the_best_and_the_others_keep_their_gap():
    rows = {"fp16": row(quality=0.80), "awq": row(quality=0.79), "gptq": row(quality=0.70), "fp8": row(quality=0.60)}
    found = normalize(frame(rows), noise={"quality": 0.02})["quality"]
    assert found.to_dict() == pytest.approx({"fp16": 1, "awq": 1, "gptq": 0.6, "fp8": 0.1})


def test_relative_counts_a_percent_as_a_percent_around_the_reference():
    rows = {"fp16": row(), "awq": row(quality=0.505, latency=10.1, throughput=99, memory=500)}
    found = normalize(frame(rows), "relative")
    assert list(found.loc["fp16"]) == [0.5] * 4
    assert found.loc["awq"].to_dict() == pytest.approx(
        {"quality": 0.51, "latency": 0.49, "throughput": 0.49, "memory": 16 / 17}, abs=3e-4
    )


def test_relative_takes_the_noise_out_before_it_compares():
    rows = {"fp16": row(throughput=100), "awq": row(throughput=130)}
    found = normalize(frame(rows), "relative", {"throughput": 10})["throughput"]
    ratio = 130 / 110
    assert found["awq"] == pytest.approx(ratio**4 / (1 + ratio**4))
    assert found["fp16"] == 0.5


def test_without_its_reference_relative_relates_to_the_highest_quality():
    rows = {"gptq": row(quality=0.7), "awq": row(quality=0.8, latency=20)}
    assert reference_of(frame(rows)) == "awq"
    assert list(normalize(frame(rows), "relative").loc["awq"]) == [0.5] * 4
    assert reference_of(frame({"fp16": row(quality=float("nan"))})) is None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", sorted(METRICS))
def test_a_metric_that_is_zero_for_all_decides_nothing(method, name):
    rows = {variant: {**row(), name: 0.0} for variant in ("fp16", "awq")}
    assert normalize(frame(rows), method)[name].nunique() == 1


def test_relative_to_a_reference_of_zero_is_defined():
    rows = {"fp16": row(quality=0, latency=0), "awq": row(quality=0.1), "gptq": row(quality=0, latency=0)}
    found = normalize(frame(rows), "relative")
    assert found["quality"].to_dict() == {"fp16": 0.5, "awq": 1.0, "gptq": 0.5}
    assert found["latency"].to_dict() == {"fp16": 0.5, "awq": 0.0, "gptq": 0.5}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, None])
@pytest.mark.parametrize("name", sorted(METRICS))
def test_a_variant_with_an_invalid_metric_is_excluded(name, value):
    rows = {"fp16": row(), "awq": {**row(), name: value}}
    assert measurable(frame(rows)).to_dict() == {"fp16": True, "awq": False}
    assert list(normalize(frame(rows)).index) == ["fp16"]


@pytest.mark.parametrize("method", METHODS)
def test_an_unmeasured_variant_does_not_stretch_the_scale_of_the_others(method):
    rows = {"fp16": row(latency=10), "awq": row(latency=20)}
    broken = {**rows, "gptq": {**row(latency=1e9), "quality": float("nan")}}
    assert normalize(frame(broken), method).equals(normalize(frame(rows), method))
