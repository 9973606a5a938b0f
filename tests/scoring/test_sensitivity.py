from __future__ import annotations

import numpy as np
import pytest

from scoring.sensitivity import shares_anywhere, shares_near

SHARES = {"quality": 0.5, "latency": 0.5, "throughput": 0.0, "memory": 0.0}


def test_a_variant_that_is_better_in_everything_is_first_under_all_weights():
    found = shares_anywhere({"awq": np.full(4, 0.9), "gptq": np.full(4, 0.8)})
    assert found == {"awq": 1.0, "gptq": 0.0}


def test_equal_variants_share_the_weightings():
    same = np.array([0.5, 0.2, 0.1, 1.0])
    assert shares_near({"awq": same, "gptq": same}, SHARES) == {"awq": 0.5, "gptq": 0.5}


def test_a_metric_without_weight_stays_without():
    found = shares_near({"small": np.array([0.5, 0.5, 0.0, 1.0]), "good": np.array([0.6, 0.5, 0.0, 0.0])}, SHARES)
    assert found == {"small": 0.0, "good": 1.0}


def test_a_choice_between_opposites_depends_on_the_weights():
    found = shares_near({"a": np.array([1.0, 0, 0, 0]), "b": np.array([0, 1.0, 0, 0])}, SHARES)
    assert found["a"] == pytest.approx(0.5, abs=0.03)
