from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from scoring.criteria import DEFAULT, Values, Weights
from scoring.profile import Profile

PROFILES = sorted((Path(__file__).parents[2] / "configs" / "profiles").glob("*.yaml"))


def test_weights_are_shares_whatever_their_sum():
    assert Weights(quality=5, latency=2, throughput=2, memory=1).shares() == pytest.approx(DEFAULT.shares())
    assert sum(Weights(quality=3, latency=1, throughput=0, memory=0.5).shares().values()) == pytest.approx(1)


LEGAL = DEFAULT.model_dump()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"quality": 0, "latency": 0, "throughput": 0, "memory": 0}, "all weights are zero"),
        (LEGAL | {"quality": -1}, "greater than or equal to 0"),
        (LEGAL | {"quality": float("inf")}, "finite"),
        (LEGAL | {"speed": 1}, "Extra inputs"),
        ({"quality": 1}, "Field required"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights, message):
    with pytest.raises(ValidationError, match=message):
        Weights(**weights)


@pytest.mark.parametrize(
    "wrong",
    [
        {"anchors": {"latency": {"zero": 2, "one": 1}}},
        {"margins": {"speed": 0}},
        {"error_rate": 0.5},
        {"task_loss": 3},
        {"constraints": {"speed": {"min": 1}}},
    ],
)
def test_a_profile_that_means_nothing_is_refused(wrong):
    with pytest.raises(ValidationError):
        Profile.model_validate({"name": "mine"} | wrong)


def test_a_profile_survives_its_way_through_json():
    profile = Profile.model_validate({"name": "mine", "constraints": {"memory_gib": {"max": 20}}})
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


def test_quality_counts_nothing_at_its_limit_unless_the_profile_says_where():
    limit = {"name": "mine", "constraints": {"quality_recovery": {"min": 0.9}}}
    assert Profile.model_validate(limit).anchors.quality.zero == 0.9
    anchors = {"quality": {"zero": 0.5, "one": 1.5}}
    assert Profile.model_validate(limit | {"anchors": anchors}).anchors.quality.zero == 0.5
    assert Profile.model_validate(limit | {"anchors": {"memory": {"zero": 1, "one": 2}}}).anchors.quality.zero == 0.9
    assert Profile(name="mine").anchors.quality.zero == 0.95


def test_a_profile_may_name_fixed_values_in_place_of_a_reference():
    values = {"quality": 0.6, "latency": 900, "throughput": 400, "memory": 16e9}
    profile = Profile.model_validate({"name": "mine", "reference": values})
    assert profile.reference == Values(**values)
    assert Profile.model_validate_json(profile.model_dump_json()) == profile


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_shipped_profile_gates_quality_and_divergence(path):
    profile = Profile.model_validate({"name": path.stem} | yaml.safe_load(path.read_text()))
    limits = profile.constraints.limits()
    assert limits["quality_recovery"] == profile.anchors.quality.zero >= 0.95
    assert limits["kl_divergence"] == 0.1
