from __future__ import annotations

import math

import numpy as np

from scoring.arrays import Floats
from scoring.limits import limited_draws, near

DRAWS: Floats = np.linspace(90.0, 110.0, 2001, dtype=np.float64)


def test_a_value_whose_interval_crosses_its_limit_is_named_with_its_numbers():
    assert near("awq", "ttft_p95_ms", 105.0, 100.0, DRAWS) == (
        "awq meets the maximum of 105 for ttft_p95_ms with 100, "
        "but its 95 % interval of 90.5 to 109.5 crosses the limit."
    )
    violated = near("awq", "goodput_share", 0.95, 0.94, np.linspace(0.9, 1.0, 2001, dtype=np.float64))
    assert violated is not None
    assert violated.startswith("awq violates the minimum of 0.95 for goodput_share with 0.94")


def test_a_value_that_is_clear_not_measured_or_exact_is_not_named():
    assert near("awq", "ttft_p95_ms", 120.0, 100.0, DRAWS) is None
    assert near("awq", "ttft_p95_ms", 105.0, None, DRAWS) is None
    assert near("awq", "ttft_p95_ms", 105.0, math.nan, DRAWS) is None
    assert near("awq", "memory_gib", 105.0, 100.0, None) is None


def test_the_quality_recovery_is_drawn_with_the_references_quality():
    quality = np.array([0.5, 0.6])
    found = limited_draws({"fp16": {"quality": quality}, "awq": {"quality": quality * 0.9, "latency": DRAWS}})
    assert np.allclose(found["awq"]["quality_recovery"], 0.9)
    assert np.array_equal(found["awq"]["e2el_p95_ms"], DRAWS)
    assert "quality_recovery" not in limited_draws({"awq": {"quality": quality}})["awq"]
