from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scoring.confidence import noise_of
from scoring.decide import decide
from scoring.machine import notes, widened
from scoring.profile import Profile

ROWS = {
    "fp16": {"quality": 0.8, "latency": 100.0, "throughput": 100.0, "memory": 2e9},
    "awq": {"quality": 0.8, "latency": 85.0, "throughput": 117.0, "memory": 1e9},
}


def steady() -> dict[str, dict[str, np.ndarray]]:
    chance = np.random.default_rng(0)
    return {
        name: {
            "latency": row["latency"] * chance.normal(1, 0.001, 2000),
            "throughput": np.full(2000, row["throughput"]),
        }
        for name, row in ROWS.items()
    }


def raw() -> pd.DataFrame:
    return pd.DataFrame.from_dict(ROWS, orient="index")


def test_a_machine_that_was_equally_fast_changes_nothing():
    samples = steady()
    found = widened(samples, {"fp16": 50.0, "awq": 50.0})
    for name, each in samples.items():
        for metric, values in each.items():
            assert np.array_equal(found[name][metric], values)
    assert notes({"fp16": 50.0, "awq": 50.0}) == []


def test_the_noise_includes_the_difference_between_the_machines():
    noise = noise_of(raw(), widened(steady(), {"fp16": 40.0, "awq": 50.0}))
    # ln(50/40) = 22 % of about 100 ms and of about 100 tokens/s.
    assert noise["latency"] == pytest.approx(0.223 * 92, rel=0.1)
    assert noise["throughput"] == pytest.approx(0.223 * 108, rel=0.1)
    assert noise["quality"] == 0


def test_a_variant_is_not_faster_for_a_faster_machine():
    only_speed = Profile.model_validate(
        {"name": "speed", "weights": {"quality": 0, "latency": 0.5, "throughput": 0.5, "memory": 0}}
    )
    assert decide(raw(), only_speed, steady()).separated
    found = decide(raw(), only_speed, widened(steady(), {"fp16": 40.0, "awq": 50.0}))
    assert not found.separated
    assert found.ranking["score"].to_list() == [1.0, 1.0]


def test_a_variant_without_probes_is_not_changed():
    samples = steady()
    found = widened(samples, {"fp16": 40.0})
    assert np.array_equal(found["awq"]["latency"], samples["awq"]["latency"])


def test_the_difference_between_the_machines_is_noted_with_its_number():
    (note,) = notes({"fp16": 50.0, "awq": 44.0, "gptq": 49.0})
    assert note.startswith("The machine itself was 12% slower for awq than for fp16")
    assert notes({}) == []
