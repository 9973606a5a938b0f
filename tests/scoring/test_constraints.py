from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from scoring.constraints import MEASURES, Constraints, violations

STRICT = Constraints.model_validate(
    {name: {"min": 0.5} if each.higher_is_better else {"max": 0.5} for name, each in MEASURES.items()}
)


def test_every_measure_can_be_limited_in_its_direction_and_in_no_other():
    assert set(Constraints.model_fields) == set(MEASURES)
    assert set(STRICT.limits()) == set(MEASURES)
    for name, measure in MEASURES.items():
        with pytest.raises(ValidationError):
            Constraints.model_validate({name: {"max": 0.5} if measure.higher_is_better else {"min": 0.5}})


def test_all_mistakes_show_at_once():
    given = {"ttft_p95": {"max": 500}, "quality_recovery": {"min": 98}, "memory_gib": {"min": 20}, "kl_divergence": 1}
    with pytest.raises(ValidationError) as caught:
        Constraints.model_validate(given)
    assert {str(each["loc"][0]) for each in caught.value.errors()} == set(given)


def test_only_set_limits_are_written():
    constraints = Constraints.model_validate({"memory_gib": {"max": 20}, "quality_recovery": None})
    assert constraints.model_dump() == {"memory_gib": {"max": 20.0}}
    assert Constraints.model_validate_json(constraints.model_dump_json()) == constraints


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", sorted(MEASURES))
def test_an_unmeasured_value_meets_no_constraint(name, value):
    kept = dict.fromkeys(MEASURES, 0.5)
    assert violations(kept, STRICT) == []
    (found,) = violations({**kept, name: value}, STRICT)
    assert found.startswith(f"{name} was not measured")
    assert violations({}, STRICT)[0].startswith("quality_recovery was not measured")


@given(st.sampled_from(sorted(MEASURES)), st.floats(0, 1), st.floats(0, 1))
def test_a_limit_is_broken_beyond_it_and_not_at_it(name, limit, value):
    side = "min" if MEASURES[name].higher_is_better else "max"
    found = violations({name: value}, Constraints.model_validate({name: {side: limit}}))
    assert bool(found) == (value < limit if side == "min" else value > limit)


def test_a_violation_has_its_numbers():
    limits = Constraints.model_validate({"quality_recovery": {"min": 0.95}, "ttft_p95_ms": {"max": 500}})
    assert violations({"quality_recovery": 0.9499999, "ttft_p95_ms": 612.25}, limits) == [
        "quality_recovery 0.9499999 is below the minimum of 0.95",
        "ttft_p95_ms 612.2 is above the maximum of 500",
    ]


def test_without_constraints_nothing_is_broken():
    assert violations({}, Constraints()) == []
